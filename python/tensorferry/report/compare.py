"""The sections of a report on several runs of one command. It compares each with the first."""

import math
from collections.abc import Iterable

from .bench import Rate, interval, interval_layout, interval_trace
from .page import (
    NONE,
    DisplayUnit,
    Interval,
    Json,
    Page,
    digits,
    escape,
    heading,
    number,
    numbers,
    paragraph,
    rate_unit,
    section,
    side_by_side,
    size,
    table,
)
from .sweep import good
from .tune import SETTING, measured, setting_text

Run = tuple[str, Json]  # the name of a file, and its results
Rates = dict[str, dict[float, Rate]]  # by direction and bytes

COLOURS = 6
# Student's t, 97.5 %, for 1, 2, ... degrees of freedom; beyond these the formula is close enough.
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)

EVEN = "Even means that the 95 % intervals overlap: the runs do not tell which is faster."
INTERVALS = {
    "bench": "Intervals are of the mean over all operations.",
    "sweep": "Intervals are over the loops of the best point; one loop has none.",
    "tune": "Intervals are those of the best setting's score in the last round.",
}


def sections(page: Page, runs: list[Run], command: str) -> str:
    """Compares two or more runs of a command."""
    parts = [heading(2, f"{command}: {len(runs)} runs compared", f"compare-{command}")]
    if command == "tune":
        parts.append(_settings(runs))
    else:
        parts.extend(_rates(page, runs, command))
    return '<article class="compare">' + "\n".join(parts) + "</article>"


def ratio(first: Rate, other: Rate) -> Rate:
    """Returns (ratio, low, high) of two (value, low, high). The interval of the ratio contains 1
    exactly if those of the two overlap; without them, low and high are None."""
    value, low, high = map(number, other)
    base, base_low, base_high = map(number, first)
    if value is None or not base:
        return None, None, None
    if low is None or high is None or base_high is None or base_low is None or base_low <= 0:
        return value / base, None, None
    return value / base, low / base_high, high / base_low


def verdict(times: float | None, low: float | None, high: float | None) -> str:
    """Says which is faster, in a word."""
    if times is None:
        return NONE
    if low is None or high is None:
        return "no interval, so not known"
    if low <= 1 <= high:
        return "even"
    return "faster" if times > 1 else "slower"


def mean_interval(values: Iterable[object]) -> Interval:
    """Returns (low, high) of the mean at 95 %, or (None, None) for fewer than two values."""
    known = numbers(values)
    freedom = len(known) - 1
    if freedom < 1:
        return None, None
    mean = sum(known) / len(known)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in known) / freedom)
    t = T_975[freedom - 1] if freedom <= len(T_975) else 1.96 + 2.5 / freedom
    half = t * deviation / math.sqrt(len(known))
    return mean - half, mean + half


def _bench(results: Json) -> Rates:
    """Returns the rates of bench by tensor size."""
    rates: Rates = {}
    for one in results["series"]:
        rates.setdefault(one["direction"], {})[one["bytes"]] = (
            one["bandwidth_mb_per_second"]["mean"],
            *interval(one, "bandwidth_mb_per_second"),
        )
    return rates


def _sweep(results: Json) -> Rates:
    """Returns the rates of sweep by block size; intervals are over the loops of the best point."""
    rates: Rates = {}
    for direction in ("read", "write"):
        for point in good(results["points"], direction):
            of_direction = rates.setdefault(direction, {})
            if point["block_bytes"] not in of_direction:
                rate = 1000 * point["gb_per_second"]
                seconds = [value for value in numbers(point.get("seconds") or ()) if value > 0]
                mean = sum(seconds) / len(seconds) if seconds else 0
                interval = mean_interval([rate * mean / value for value in seconds])
                of_direction[point["block_bytes"]] = (rate, *interval)
    return rates


MEASURES = {"bench": _bench, "sweep": _sweep}


def _rates(page: Page, runs: list[Run], command: str) -> list[str]:
    found = [(label, MEASURES[command](results)) for label, results in runs]
    title = "Tensor size" if command == "bench" else "Block size, best over all else"
    rate = rate_unit(
        row[0]
        for _, rates in found
        for of_direction in rates.values()
        for row in of_direction.values()
    )
    plots, tables = [], []
    for direction in ("read", "write"):
        keys = sorted({key for _, rates in found for key in rates.get(direction, {})})
        if not keys:
            continue
        name = direction.capitalize()
        data = []
        for index, (label, rates) in enumerate(found):
            mine = rates.get(direction, {})
            present = [key for key in keys if key in mine]
            data.append(
                interval_trace(
                    escape(label),
                    f"var(--file-{index % COLOURS})",
                    rate,
                    list(map(size, present)),
                    [mine[key] for key in present],
                )
            )
            data[-1]["marker"]["symbol"] = index % COLOURS
        rows = _rows(found, direction, keys, rate)
        said = "; ".join(f"{row[0]}, {row[1]}: {row[2]} {rate.name}" for row in rows)
        plots.append(
            page.plot(
                f"compare-{command}-{direction}",
                f"{name}: bandwidth, {rate.name}",
                f"{name} bandwidth of each run. {said}.",
                data,
                interval_layout(list(map(size, keys)), title) | {"showlegend": True},
            )
        )
        tables.append(
            table(
                f"{name}: against {found[0][0]}",
                [
                    title.split(",")[0],
                    "Run",
                    f"#{rate.name}",
                    "#95 % interval",
                    "#Ratio",
                    "#95 % interval",
                    "Verdict",
                ],
                rows,
            )
        )
    if not plots:
        return [paragraph("None of these runs has anything to compare.")]
    return [
        section(heading(3, "Bandwidth"), side_by_side(*plots)),
        section(
            heading(3, "Ratios"), paragraph(" ".join([EVEN, INTERVALS[command]]), "lead"), *tables
        ),
    ]


def _rows(
    found: list[tuple[str, Rates]], direction: str, keys: list[float], rate: DisplayUnit
) -> list[list[str]]:
    rows = []
    for key in keys:
        first = found[0][1].get(direction, {}).get(key)
        for index, (label, rates) in enumerate(found):
            mine = rates.get(direction, {}).get(key)
            if mine is None:
                continue
            row = [size(key), label, rate.digits(mine[0]), rate.interval(mine[1:])]
            if index == 0 or first is None:
                rows.append([*row, NONE, NONE, "reference" if index == 0 else NONE])
                continue
            times, low, high = ratio(first, mine)
            rows.append(
                [
                    *row,
                    digits(times),
                    DisplayUnit("", 1).interval((low, high)),
                    verdict(times, low, high),
                ]
            )
    return rows


def _best(results: Json) -> Rate:
    """Returns (value, low, high) of the best setting; more is better. The interval is that of its
    score in the last round."""
    best = results.get("best") or {}
    value = number(best.get("gb_per_second"))
    if value is None:
        seconds = number(best.get("latency_seconds"))
        value = 1 / seconds if seconds else None
    last = results["rounds"][-1]["candidates"] if results["rounds"] else []
    for candidate in last:
        score, low, high = (number(candidate.get(name)) for name in ("score", "low", "high"))
        same = all(candidate[name] == best.get(name) for name in SETTING)
        if same and score and value is not None and low is not None and high is not None:
            return value, value * low / score, value * high / score
    return value, None, None


def _settings(runs: list[Run]) -> str:
    rows = []
    objectives = [str(results["settings"].get("objective", NONE)) for _, results in runs]
    first = _best(runs[0][1])
    for index, ((label, results), objective) in enumerate(zip(runs, objectives)):
        best = results.get("best")
        row = [label, objective, " ".join(measured(best)) if best else NONE]
        if index and objective == objectives[0]:
            times, low, high = ratio(first, _best(results))
            row += [
                digits(times),
                DisplayUnit("", 1).interval((low, high)),
                verdict(times, low, high),
            ]
        else:
            row += [NONE, NONE, NONE if index else "reference"]
        rows.append([*row, setting_text(best) if best else "none was found"])
    return section(
        heading(3, "Settings"),
        paragraph(" ".join([EVEN, INTERVALS["tune"]]), "lead"),
        table(
            f"The best setting of each run, against {runs[0][0]}",
            ["Run", "Objective", "#Measured", "#Ratio", "#95 % interval", "Verdict", "Setting"],
            rows,
            "Ratios are between runs with the same objective; more is better.",
        ),
    )
