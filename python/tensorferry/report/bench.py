"""The sections of a report on `tensorferry bench`."""

import math
from collections.abc import Callable, Sequence

from .page import (
    NONE,
    DisplayUnit,
    Interval,
    Json,
    Page,
    count,
    digits,
    heading,
    key_figures,
    number,
    numbers,
    paragraph,
    plural,
    rate_unit,
    section,
    side_by_side,
    size,
    steps,
    table,
    time_unit,
)

DIRECTIONS = ("read", "write")
Rate = tuple[float | None, float | None, float | None]  # mean, low, high in MB/s
Mark = tuple[float, float]  # when an operation began, and how long it took
Panel = tuple[Json, str, list[Mark], list[Mark]]  # a series, its colour, all marks, those drawn
Column = tuple[str, Callable[[Json], str]]  # the name and the text of a row

# More marks than this do not show more, and make a page slow.
TIME_LINE_MARKS = 2000
CURVE_POINTS = 300
BINS = 60
PANELS_STYLED = 8  # the style sheet has heights for up to 8 panels
# The axis shows 1 / (1 - share), so that each further nine takes the same space.
PERCENTILE_TICKS = {1: "0", 2: "50", 10: "90", 100: "99", 1000: "99.9", 1e4: "99.99", 1e5: "99.999"}


def interval(one: Json, member: str) -> Interval:
    """Returns (low, high) of a series' mean, or (None, None) if it has a single sample."""
    if len(numbers(one["seconds"])) < 2:
        return None, None
    low, high = one[member]["ci95"]
    return low, high


def figures(results: Json) -> str:
    """Shows the best rate of each direction, and the latency of the smallest tensors."""
    series = results["series"]
    rate = rate_unit(one["bandwidth_mb_per_second"]["mean"] for one in series)
    found = []
    for direction in DIRECTIONS:
        of_direction = [
            one
            for one in series
            if one["direction"] == direction
            and number(one["bandwidth_mb_per_second"]["mean"]) is not None
        ]
        if not of_direction:
            continue
        best = max(of_direction, key=lambda one: one["bandwidth_mb_per_second"]["mean"])
        summary = best["bandwidth_mb_per_second"]
        known = rate.interval(interval(best, "bandwidth_mb_per_second"))
        found.append(
            (
                f"{direction.capitalize()} bandwidth",
                rate.digits(summary["mean"]),
                rate.name,
                f"mean; 95 %: {known}; {size(best['bytes'])} tensors",
            )
        )
    for direction in DIRECTIONS:
        of_direction = [one for one in series if one["direction"] == direction]
        if of_direction:
            least = min(of_direction, key=lambda one: one["bytes"])
            unit = time_unit([least["latency_seconds"]["p50"]])
            tail = unit.text(least["latency_seconds"]["p99"])
            found.append(
                (
                    f"{direction.capitalize()} latency",
                    unit.digits(least["latency_seconds"]["p50"]),
                    unit.name,
                    f"median; 99th percentile {tail}; {size(least['bytes'])} tensors",
                )
            )
    return key_figures(found)


def sections(page: Page, results: Json, prefix: str) -> str:
    series = sorted(results["series"], key=lambda one: (one["direction"], one["bytes"]))
    if not series:
        return paragraph("No series was finished, so there is nothing to plot.", "notice")
    return "\n".join(
        [
            _bandwidth(page, series, prefix),
            _distribution(page, series, prefix),
            _time_line(page, series, prefix),
            _tables(series),
            _transport(series),
        ]
    )


def _of(series: list[Json], direction: str) -> list[tuple[Json, str]]:
    """Returns the series of a direction that have samples, each with its colour."""
    chosen = [one for one in series if one["direction"] == direction and numbers(one["seconds"])]
    return list(zip(chosen, steps(direction, len(chosen))))


def _bandwidth(page: Page, series: list[Json], prefix: str) -> str:
    rate = rate_unit(one["bandwidth_mb_per_second"]["mean"] for one in series)
    data = []
    for direction in DIRECTIONS:
        chosen = [one for one in series if one["direction"] == direction]
        if chosen:
            values = [
                (one["bandwidth_mb_per_second"]["mean"], *interval(one, "bandwidth_mb_per_second"))
                for one in chosen
            ]
            data.append(
                interval_trace(
                    direction.capitalize(),
                    f"var(--{direction})",
                    rate,
                    [size(one["bytes"]) for one in chosen],
                    values,
                )
            )
    sizes = [size(value) for value in sorted({one["bytes"] for one in series})]
    said = "; ".join(
        f"{one['direction']} {size(one['bytes'])}: "
        f"{rate.text(one['bandwidth_mb_per_second']['mean'])}"
        for one in series
    )
    return section(
        heading(3, "Bandwidth"),
        page.plot(
            f"{prefix}-bandwidth",
            f"Mean bandwidth by tensor size, {rate.name}",
            f"Bandwidth by tensor size. {said}.",
            data,
            interval_layout(sizes, "Tensor size"),
            "Bandwidth of single operations: size divided by latency. Bars are 95 % confidence "
            "intervals of the mean.",
            style="wide",
        ),
    )


def interval_trace(
    name: str, colour: str, rate: DisplayUnit, categories: list[str], values: Sequence[Rate]
) -> Json:
    """Makes a line of (mean, low, high) in MB/s with its intervals."""
    rows = [(rate.of(mean), rate.of(low), rate.of(high)) for mean, low, high in values]
    above = [None if mean is None or high is None else high - mean for mean, _, high in rows]
    below = [None if mean is None or low is None else mean - low for mean, low, _ in rows]
    told = [f"{rate.text(mean)}<br>95 %: {rate.interval(known)}" for mean, *known in values]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": categories,
        "y": [mean for mean, _, _ in rows],
        "text": told,
        "hovertemplate": "%{x}: %{text}<extra>%{fullData.name}</extra>",
        "line": {"color": colour, "width": 2},
        "marker": {"color": colour, "size": 8},
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": above,
            "arrayminus": below,
            "color": colour,
            "thickness": 1.5,
            "width": 5,
        },
    }


def interval_layout(categories: list[str], title: str) -> Json:
    return {
        "xaxis": {
            "type": "category",
            "categoryorder": "array",
            "categoryarray": categories,
            "title": {"text": title},
            "showgrid": False,
        },
        "yaxis": {"rangemode": "tozero"},
    }


def _distribution(page: Page, series: list[Json], prefix: str) -> str:
    unit = time_unit(value for one in series for value in numbers(one["seconds"]))
    everything = [value for one in series for value in numbers(one["seconds"])]
    positive = [value * unit.scale for value in everything if value > 0]
    if not positive:
        return ""
    # One scale for reads and writes, so that the eye can compare.
    edges = bin_edges(min(positive), max(positive))
    axis = log_axis(edges[0], edges[-1])
    shapes, tails = [], []
    for direction in DIRECTIONS:
        chosen = _of(series, direction)
        if not chosen:
            continue
        name = direction.capitalize()
        said = "; ".join(
            f"{size(one['bytes'])}: median {unit.text(one['latency_seconds']['p50'])}, "
            f"99th percentile {unit.text(one['latency_seconds']['p99'])}"
            for one, _ in chosen
        )
        legend = {"showlegend": True}
        style = "plot" if len(chosen) <= 4 else "tall"
        shapes.append(
            page.plot(
                f"{prefix}-histogram-{direction}",
                f"{name}: share of operations, %",
                f"Histogram of {direction} latencies. {said}.",
                [_histogram(one, colour, unit, edges) for one, colour in chosen],
                legend
                | {
                    "barmode": "overlay",
                    "bargap": 0,
                    "yaxis": {"rangemode": "tozero"},
                    "xaxis": axis | {"title": {"text": f"Latency, {unit.name}"}},
                },
                style=style,
            )
        )
        tails.append(
            page.plot(
                f"{prefix}-percentiles-{direction}",
                f"{name}: latency by percentile, {unit.name}",
                f"Percentiles of {direction} latencies. {said}.",
                [_percentile_curve(one, colour, unit) for one, colour in chosen],
                legend | {"xaxis": _percentile_axis(series), "yaxis": axis},
                style=style,
            )
        )
    return section(
        heading(3, "Latency"),
        paragraph(
            "How long single operations took. Scales are logarithmic, and the same for reads "
            "and writes.",
            "lead",
        ),
        side_by_side(*shapes),
        side_by_side(*tails),
    )


def bin_edges(low: float, high: float) -> list[float]:
    """Divides a logarithmic scale into bins of equal width, with some space at both ends."""
    first, last = math.log10(low) - 0.05, math.log10(high) + 0.05
    return [10 ** (first + (last - first) * step / BINS) for step in range(BINS + 1)]


def log_axis(low: float, high: float) -> Json:
    """Makes a logarithmic axis with as many ticks as fit."""
    first, last = math.log10(low), math.log10(high)
    steps_of_decade: tuple[float, ...] = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    if last - first > 0.9:
        steps_of_decade = (1, 2, 5) if last - first < 2.5 else (1,)
    ticks = [
        step * 10.0**decade
        for decade in range(math.floor(first), math.ceil(last) + 1)
        for step in steps_of_decade
    ]
    ticks = [tick for tick in ticks if low <= tick <= high]
    return {
        "type": "log",
        "range": [first, last],
        "tickvals": ticks,
        "ticktext": [f"{tick:,.12g}" for tick in ticks],
    }


def _histogram(one: Json, colour: str, unit: DisplayUnit, edges: list[float]) -> Json:
    values = numbers(one["seconds"])
    found = [0] * BINS
    first, last = math.log10(edges[0]), math.log10(edges[-1])
    for value in values:
        if value > 0:
            place = (math.log10(value * unit.scale) - first) / (last - first)
            found[min(BINS - 1, max(0, int(place * BINS)))] += 1
    told = [
        f"{digits(low)} to {digits(high)} {unit.name}: {plural(amount, 'operation')}"
        for low, high, amount in zip(edges, edges[1:], found)
    ]
    return {
        "type": "bar",
        "name": size(one["bytes"]),
        "opacity": 0.7,
        "x": [math.sqrt(low * high) for low, high in zip(edges, edges[1:])],
        "width": [high - low for low, high in zip(edges, edges[1:])],
        "y": [100 * amount / len(values) for amount in found],
        "marker": {"color": colour, "line": {"width": 0}},
        "hovertext": told,
        "hovertemplate": "%{hovertext}<br>%{y:.1f} %<extra>%{fullData.name}</extra>",
    }


def _percentile_curve(one: Json, colour: str, unit: DisplayUnit) -> Json:
    values = sorted(numbers(one["seconds"]))
    many = len(values)
    # Evenly in the number of nines, so that the tail is drawn as finely as the middle.
    if many <= CURVE_POINTS:
        chosen = list(range(many))
    else:
        end = math.log(2 * many)
        shares = [1 - math.exp(-end * step / CURVE_POINTS) for step in range(CURVE_POINTS + 1)]
        chosen = sorted({min(many - 1, int(share * many)) for share in shares})
    shares = [(place + 0.5) / many for place in chosen]
    return {
        "type": "scatter",
        "mode": "lines" if many > 1 else "markers",
        "name": size(one["bytes"]),
        "x": [1 / (1 - share) for share in shares],
        "y": [unit.of(values[place]) for place in chosen],
        "text": [f"{100 * share:.4g} %" for share in shares],
        "line": {"color": colour, "width": 2},
        "marker": {"color": colour, "size": 8},
        "hovertemplate": f"%{{text}} within %{{y:.4~g}} {unit.name}"
        "<extra>%{fullData.name}</extra>",
    }


def _percentile_axis(series: list[Json]) -> Json:
    """Makes an axis that ends a little after the last point of the longest series."""
    last = max(len(one["seconds"]) for one in series)
    return {
        "type": "log",
        "title": {"text": "Percentile"},
        "range": [0, math.log10(2.4 * last)],
        "tickvals": list(PERCENTILE_TICKS),
        "ticktext": list(PERCENTILE_TICKS.values()),
    }


def _time_line(page: Page, series: list[Json], prefix: str) -> str:
    plots = []
    for direction in DIRECTIONS:
        panels = []
        for one, colour in _of(series, direction):
            marks = [
                (begin, value)
                for begin, value in zip(
                    map(number, one.get("started_seconds") or ()), map(number, one["seconds"])
                )
                if begin is not None and value is not None
            ]
            if marks:
                panels.append((one, colour, marks, thinned(marks)))
        if not panels:
            continue
        measured = sum(len(marks) for _, _, marks, _ in panels)
        shown = sum(len(kept) for _, _, _, kept in panels)
        note = ""
        if shown < measured:
            note = (
                f"{shown:,} of {measured:,} operations are drawn: the quickest and the slowest "
                "of each stretch of time."
            )
        data, layout = _panels(panels)
        plots.append(
            page.plot(
                f"{prefix}-time-{direction}",
                f"{direction.capitalize()}: latency of each operation",
                f"Latency of each {direction} over time; {plural(measured, 'operation')}.",
                data,
                layout,
                note,
                style=f"panels-{min(len(panels), PANELS_STYLED)}",
            )
        )
    if not plots:
        return ""
    return section(
        heading(3, "Over time"),
        paragraph(
            "Each operation where it began, in seconds since its series began. Steps and "
            "drifts are caches that fill, or a drive that grows warm.",
            "lead",
        ),
        side_by_side(*plots),
    )


def _panels(panels: list[Panel]) -> tuple[list[Json], Json]:
    """Returns (data, layout) of the panels: one below the other, each with its own scales."""
    data: list[Json] = []
    layout: Json = {"showlegend": False, "margin": {"t": 24}, "annotations": []}
    height = 1 / (1.5 * len(panels) - 0.5)  # the gap between two panels is half a panel
    for place, (one, colour, _, kept) in enumerate(panels, 1):
        unit = time_unit(value for _, value in kept)
        top = 1 - 1.5 * height * (place - 1)
        axis = "" if place == 1 else str(place)
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": size(one["bytes"]),
                "x": [begin for begin, _ in kept],
                "y": [unit.of(value) for _, value in kept],
                "xaxis": f"x{axis}",
                "yaxis": f"y{axis}",
                "marker": {"color": colour, "size": 5, "opacity": 0.75},
                "hovertemplate": f"%{{y:.4~g}} {unit.name}, %{{x:.3~f}} s after the start"
                "<extra>%{fullData.name}</extra>",
            }
        )
        layout[f"xaxis{axis}"] = {
            "anchor": f"y{axis}",
            "rangemode": "tozero",
            "nticks": 6,
            "showgrid": False,
            "ticksuffix": " s",
        }
        layout[f"yaxis{axis}"] = {
            "anchor": f"x{axis}",
            "domain": [max(0, top - height), top],
            "nticks": 4,
            "rangemode": "tozero",
        }
        layout["annotations"].append(
            {
                "text": f"{size(one['bytes'])}, {unit.name}",
                "showarrow": False,
                "xref": "paper",
                "x": 0,
                "xanchor": "left",
                "yref": "paper",
                "y": top,
                "yanchor": "bottom",
            }
        )
    return data, layout


def thinned(marks: list[Mark]) -> list[Mark]:
    """Keeps at most TIME_LINE_MARKS: the least and the greatest value of each stretch of time."""
    if len(marks) <= TIME_LINE_MARKS:
        return marks
    stretch = math.ceil(len(marks) / (TIME_LINE_MARKS // 2))
    kept = []
    for first in range(0, len(marks), stretch):
        part = marks[first : first + stretch]
        ends = {min(part, key=lambda mark: mark[1]), max(part, key=lambda mark: mark[1])}
        kept.extend(sorted(ends))
    return kept


def _tables(series: list[Json]) -> str:
    time = time_unit(one["latency_seconds"]["p50"] for one in series)
    rate = rate_unit(one["bandwidth_mb_per_second"]["mean"] for one in series)
    return section(
        heading(3, "All numbers"),
        _statistics(f"Latency, {time.name}", series, "latency_seconds", time),
        _statistics(
            f"Bandwidth, {rate.name}",
            series,
            "bandwidth_mb_per_second",
            rate,
            [("#CPU s/GB", lambda one: digits(one.get("cpu_seconds_per_gb")))],
        ),
    )


def _statistics(
    caption: str, series: list[Json], member: str, unit: DisplayUnit, more: Sequence[Column] = ()
) -> str:
    names = {
        "standard_deviation": "#Std. deviation",
        "median": "#Median (p50)",
        "p90": "#p90",
        "p99": "#p99",
        "p999": "#p99.9",
    }
    if not any("p999" in one[member] for one in series):
        del names["p999"]
    columns = [
        "Direction",
        "#Size",
        "#Samples",
        "#Mean",
        "#95 % interval",
        *names.values(),
        *(name for name, _ in more),
    ]
    rows = []
    for one in series:
        summary = one[member]
        values = [unit.digits(summary.get(name)) for name in names]
        rows.append(
            [
                one["direction"].capitalize(),
                size(one["bytes"]),
                f"{len(one['seconds']):,}",
                unit.digits(summary["mean"]),
                unit.interval(interval(one, member)),
                *values,
                *(value(one) for _, value in more),
            ]
        )
    return table(caption, columns, rows)


def _transport(series: list[Json]) -> str:
    engines: dict[tuple[str, object, str], list[str]] = {}
    for one in series:
        way = (str(one.get("engine", NONE)), one.get("direct"), str(one.get("engine_reason", "")))
        engines.setdefault(way, []).append(f"{one['direction']} {size(one['bytes'])}")
    said = {"True": "yes", "False": "no"}
    ways = [
        [engine, said.get(str(direct), NONE), ", ".join(which), reason]
        for (engine, direct, reason), which in engines.items()
    ]
    cold = [
        [
            size(one["bytes"]),
            size(one["cold"].get("bytes")),
            size(one["cold"].get("device_bytes")),
            count(one["cold"].get("resident_pages")),
            str(one["cold"].get("proof", NONE)),
        ]
        for one in series
        if isinstance(one.get("cold"), dict)
    ]
    return section(
        heading(3, "How bytes moved"),
        table("Engines", ["Engine", "Direct I/O", "Series", "Why"], ways),
        table(
            "Proof that reads were cold",
            [
                "#Tensor size",
                "#Asked for",
                "#Read by the drive",
                "#Pages in memory before",
                "Proof",
            ],
            cold,
            "Reads are cold when the drive moved the bytes, not the page cache.",
        ),
    )
