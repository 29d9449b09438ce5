"""What a report shows of `tensorferry tune`."""

import json

from .page import (
    NONE,
    code,
    count,
    digits,
    escape,
    folded,
    heading,
    key_figures,
    number,
    paragraph,
    plural,
    section,
    size,
    table,
    time_unit,
)

SETTING = ("engine", "block_bytes", "queue_depth", "workers")
GAP = 2  # places between two rounds


def figures(results):
    """What was won, over which default, and what it cost."""
    best, default = results.get("best"), results.get("default")
    found = []
    if best:
        found.append(("Best setting", *measured(best), setting_text(best)))
    if default:
        found.append(("Default", *measured(default), setting_text(default)))
    ratio = gain(best, default)
    if ratio:
        found.append(("Best to default", digits(ratio), "×", "more is better"))
    tried = {_key(candidate) for one in results["rounds"] for candidate in one["candidates"]}
    found.append(
        (
            "Candidates",
            f"{len(tried):,}",
            "",
            f"in {plural(len(results['rounds']), 'round')}, {digits(results.get('seconds'))} s",
        )
    )
    return key_figures(found)


def gain(best, default):
    """How much better the first is than the second; None where that is not known."""
    if not best or not default:
        return None
    ours, theirs = number(best.get("gb_per_second")), number(default.get("gb_per_second"))
    if ours is None or not theirs:
        theirs, ours = number(best.get("latency_seconds")), number(default.get("latency_seconds"))
    return ours / theirs if ours and theirs else None


def setting_text(setting):
    return (
        f"{setting['engine']}, {size(setting['block_bytes'])} blocks, "
        f"depth {count(setting['queue_depth'])}, "
        f"{plural(setting['workers'], 'worker')}"
    )


def sections(page, results, prefix):
    rounds = [one for one in results["rounds"] if one["candidates"]]
    best, default = results.get("best"), results.get("default")
    parts = []
    if best:
        parts.append(_setting_to_use(results, best))
    if not rounds:
        parts.append(paragraph("No round was finished, so there is no path to plot.", "notice"))
        return "\n".join(parts)
    parts.append(_path(page, rounds, best, default, prefix))
    parts.append(
        section(
            heading(3, "All candidates"),
            *(_candidates(place, one) for place, one in enumerate(rounds, 1)),
        )
    )
    return "\n".join(parts)


def _key(setting):
    return tuple(setting[name] for name in SETTING)


def measured(setting):
    """(number, unit) of what the objective measures."""
    if number(setting.get("gb_per_second")) is not None:
        return digits(setting["gb_per_second"]), "GB/s"
    unit = time_unit([setting.get("latency_seconds")])
    return unit.digits(setting.get("latency_seconds")), unit.name


def _setting_to_use(results, best):
    block = {
        "aio": {
            "block_size": int(best["block_bytes"]),
            "queue_depth": int(best["queue_depth"]),
            "intra_op_parallelism": int(best["workers"]),
            "single_submit": False,
            "overlap_events": True,
        }
    }
    kept = (
        f"A Handle on this drive takes it from {results['profile']}."
        if results.get("profile")
        else "It was not stored as a profile."
    )
    return section(
        heading(3, "The setting to use"),
        paragraph(f"{setting_text(best)}. {kept} For DeepSpeed's configuration:"),
        code(json.dumps(block, indent=2), "The aio block of DeepSpeed's configuration"),
    )


def _path(page, rounds, best, default, prefix):
    """All candidates of each round in the order of their scores: fewer and fewer, better known."""
    kinds = {
        "Kept": {"color": "var(--read)", "size": 7},
        "Dropped": {"color": "var(--quiet)", "size": 6, "symbol": "circle-open"},
        "Default": {"color": "var(--ink)", "size": 11, "symbol": "diamond"},
        "Best": {"color": "var(--write)", "size": 13, "symbol": "star"},
    }
    marks = {name: [] for name in kinds}
    ticks, labels, edges, start = [], [], [], 0
    for number_of_round, one in enumerate(rounds, 1):
        ranked = sorted(one["candidates"], key=_score)
        for place, candidate in enumerate(ranked, start):
            kind = "Kept" if candidate.get("kept") else "Dropped"
            if default and _key(candidate) == _key(default):
                kind = "Default"
            if best and _key(candidate) == _key(best):
                kind = "Best"
            marks[kind].append((place, number_of_round, candidate))
        ticks.append(start + (len(ranked) - 1) / 2)
        labels.append(f"{number_of_round}<br>({len(ranked)})")
        start += len(ranked) + GAP
        edges.append(start - (GAP + 1) / 2)
    said = (
        f"{plural(len(rounds), 'round')} with "
        + ", ".join(str(len(one["candidates"])) for one in rounds)
        + " candidates."
        + (f" Best: {setting_text(best)}." if best else "")
    )
    lines = [
        {
            "type": "line",
            "x0": edge,
            "x1": edge,
            "y0": 0,
            "y1": 1,
            "yref": "paper",
            "line": {"color": "var(--line)", "width": 1},
        }
        for edge in edges[:-1]
    ]
    return section(
        heading(3, "The tuner's path"),
        page.plot(
            f"{prefix}-path",
            "Score of each candidate with its 95 % interval",
            f"The tuner's path. {said}",
            [_marks(name, kinds[name], rows) for name, rows in marks.items() if rows],
            {
                "showlegend": True,
                "shapes": lines,
                "xaxis": {
                    "tickvals": ticks,
                    "ticktext": labels,
                    "showgrid": False,
                    "range": [-1, start - GAP],
                    "title": {"text": "Round (candidates)"},
                },
                "yaxis": {"title": {"text": ""}, "tickformat": "~r"},
            },
            "1 is the median of all candidates in the same pass; more is better. Each round draws "
            "its candidates from the worst to the best. Later rounds move more bytes, so intervals "
            "shrink.",
            style="wide",
        ),
    )


def _score(candidate):
    score = number(candidate.get("score"))
    return float("-inf") if score is None else score


def _marks(name, marker, rows):
    above, below, told = [], [], []
    for _, number_of_round, candidate in rows:
        score, low, high = (number(candidate.get(member)) for member in ("score", "low", "high"))
        known = None not in (score, low, high)
        above.append(high - score if known else None)
        below.append(score - low if known else None)
        interval = f", 95 %: {digits(low)} to {digits(high)}" if known else ""
        value, unit = measured(candidate)
        told.append(
            "<br>".join(
                map(
                    escape,
                    (
                        f"Round {number_of_round}: {setting_text(candidate)}",
                        f"Score {digits(score)}{interval}",
                        f"{value} {unit}",
                        "kept" if candidate.get("kept") else "dropped",
                    ),
                )
            )
        )
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "marker": marker,
        "x": [place for place, _, _ in rows],
        "y": [number(candidate.get("score")) for _, _, candidate in rows],
        "hovertext": told,
        "hoverinfo": "text",
        "cliponaxis": False,
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": above,
            "arrayminus": below,
            "color": marker["color"],
            "thickness": 1,
            "width": 0,
        },
    }


def _candidates(place, one):
    rows = []
    for candidate in sorted(one["candidates"], key=_score, reverse=True):
        value, unit = measured(candidate)
        low, high = candidate.get("low"), candidate.get("high")
        interval = (
            NONE
            if number(low) is None or number(high) is None
            else (f"{digits(low)} to {digits(high)}")
        )
        rows.append(
            [
                digits(candidate.get("score")),
                interval,
                f"{value} {unit}",
                size(candidate["block_bytes"]),
                count(candidate["queue_depth"]),
                count(candidate["workers"]),
                str(candidate["engine"]),
                "kept" if candidate.get("kept") else "dropped",
            ]
        )
    caption = (
        f"Round {place}: {plural(len(rows), 'candidate')}, "
        f"{size(one.get('transfer_bytes'))} each, {digits(one.get('seconds'))} s"
    )
    columns = [
        "#Score",
        "#95 % interval",
        "#Measured",
        "#Block",
        "#Depth",
        "#Workers",
        "Engine",
        "Outcome",
    ]
    return folded(caption, table(caption, columns, rows))
