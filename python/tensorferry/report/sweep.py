"""What a report shows of `tensorferry sweep`."""

from .page import (
    NONE,
    count,
    digits,
    escape,
    heading,
    key_figures,
    number,
    paragraph,
    plural,
    section,
    side_by_side,
    size,
    table,
)

DIRECTIONS = ("read", "write")
BEST = 10
HEAT = [[step / 4, f"var(--heat-{step})"] for step in range(5)]
HOT = 0.62  # from this share of the scale on, the other colour is read better
COLOURS = 6


def good(points, direction):
    """The points of a direction that have a rate, best first."""
    chosen = [
        point
        for point in points
        if point["direction"] == direction
        and point["status"] == "ok"
        and number(point.get("gb_per_second")) is not None
    ]
    return sorted(chosen, key=lambda point: -point["gb_per_second"])


def figures(results):
    """The best of each direction, and how much better it is than the worst."""
    points = results["points"]
    found = []
    for direction in DIRECTIONS:
        ranked = good(points, direction)
        if ranked:
            found.append(
                (
                    f"Best {direction}",
                    digits(ranked[0]["gb_per_second"]),
                    "GB/s",
                    _setting(ranked[0]),
                )
            )
    for direction in DIRECTIONS:
        ranked = good(points, direction)
        if len(ranked) > 1 and ranked[-1]["gb_per_second"] > 0:
            times = ranked[0]["gb_per_second"] / ranked[-1]["gb_per_second"]
            found.append(
                (
                    f"{direction.capitalize()}: best to worst",
                    digits(times),
                    "×",
                    f"the worst point had {digits(ranked[-1]['gb_per_second'])} GB/s",
                )
            )
    return key_figures(found)


def sections(page, results, prefix):
    points = results["points"]
    if not points:
        return paragraph("No point was finished, so there is nothing to plot.", "notice")
    failed = sum(point["status"] != "ok" for point in points)
    parts = [
        paragraph(
            f"{plural(len(points), 'point')} measured, "
            f"{count(failed) if failed else 'none'} failed.",
            "lead",
        )
    ]
    for direction in DIRECTIONS:
        ranked = good(points, direction)
        if ranked:
            parts.append(
                section(
                    heading(3, f"{direction.capitalize()} bandwidth"),
                    _maps(page, points, direction, prefix),
                    _workers(page, points, direction, prefix),
                    _best(ranked, direction),
                )
            )
    parts.append(_failures(points))
    return "\n".join(parts)


def _setting(point):
    return (
        f"{size(point['block_bytes'])} blocks, depth {count(point['queue_depth'])}, "
        f"{plural(point['workers'], 'worker')}, {point['overlap']}"
    )


class Modes:
    """The ways in which points were run, named by what differs between them."""

    def __init__(self, points):
        self._named = [
            name
            for name in ("engine", "directory", "submit")
            if len({str(point.get(name)) for point in points}) > 1
        ]

    def of(self, point):
        words = [point["overlap"], *(str(point.get(name, NONE)) for name in self._named)]
        return ", ".join(words)


def _by_mode(points, direction):
    modes = Modes(points)
    groups = {}
    for point in points:
        if point["direction"] == direction:
            groups.setdefault(modes.of(point), []).append(point)
    return groups


def _maps(page, points, direction, prefix):
    """One map for each mode, all of a direction on one scale."""
    rates = [point["gb_per_second"] for point in good(points, direction)]
    plots = []
    for index, (mode, chosen) in enumerate(_by_mode(points, direction).items()):
        ranked = good(chosen, direction)
        said = (
            f"Best: {digits(ranked[0]['gb_per_second'])} GB/s with {_setting(ranked[0])}."
            if ranked
            else "All points failed."
        )
        plots.append(
            page.plot(
                f"{prefix}-map-{direction}-{index}",
                f"{direction.capitalize()}, {mode}: GB/s",
                f"Bandwidth by block size and queue depth, {direction}, {mode}. {said}",
                _map(chosen, min(rates), max(rates)),
                {
                    "xaxis": {
                        "type": "category",
                        "title": {"text": "Queue depth, per worker"},
                        "showgrid": False,
                        "fixedrange": True,
                    },
                    "yaxis": {"type": "category", "showgrid": False, "fixedrange": True},
                    "dragmode": False,
                },
                style="map",
            )
        )
    return side_by_side(*plots) + paragraph(
        "Each cell is the best over the numbers of workers, by block size and queue depth; × is a "
        "point that failed.",
        "note",
    )


def _map(points, low, high):
    blocks = sorted({point["block_bytes"] for point in points})
    depths = sorted({point["queue_depth"] for point in points})
    cells = {}
    for point in points:
        cells.setdefault((point["block_bytes"], point["queue_depth"]), []).append(point)
    values, told = [], []
    labels = {"var(--on-cool)": [], "var(--on-hot)": [], "var(--quiet)": []}
    for block in blocks:
        drawn = [_cell(cells.get((block, depth), [])) for depth in depths]
        values.append([value for value, _ in drawn])
        told.append([text for _, text in drawn])
        for depth, (value, _) in zip(depths, drawn):
            place = (count(depth), size(block))
            if value is None:
                labels["var(--quiet)"].append((*place, "×" if (block, depth) in cells else ""))
            else:
                hot = value - low > HOT * (high - low)
                labels[f"var(--on-{'hot' if hot else 'cool'})"].append((*place, digits(value)))
    heat = {
        "type": "heatmap",
        "x": list(map(count, depths)),
        "y": list(map(size, blocks)),
        "z": values,
        "hovertext": told,
        "hoverinfo": "text",
        "hoverongaps": True,
        "colorscale": HEAT,
        "zmin": low,
        "zmax": high,
        "xgap": 2,
        "ygap": 2,
        "showscale": False,
    }
    return [heat, *(_labels(colour, places) for colour, places in labels.items() if places)]


def _labels(colour, places):
    """Numbers on the cells, in a colour that can be read there."""
    columns = list(zip(*places))
    return {
        "type": "scatter",
        "mode": "text",
        "x": columns[0],
        "y": columns[1],
        "text": columns[2],
        "textfont": {"size": 12, "color": colour},
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _cell(points):
    """(value, what is told) of one place of the map."""
    ok = [
        point
        for point in points
        if point["status"] == "ok" and number(point.get("gb_per_second")) is not None
    ]
    failed = [point for point in points if point["status"] != "ok"]
    if not points:
        return None, "not measured"
    lines = [
        f"{plural(point['workers'], 'worker')}: {digits(point['gb_per_second'])} GB/s"
        for point in sorted(ok, key=lambda point: -point["gb_per_second"])
    ]
    lines += [f"{plural(point['workers'], 'worker')}: failed" for point in failed]
    head = f"{size(points[0]['block_bytes'])} blocks, depth {count(points[0]['queue_depth'])}"
    told = "<br>".join(map(escape, [head, *lines]))
    return max((point["gb_per_second"] for point in ok), default=None), told


def _workers(page, points, direction, prefix):
    """What more workers bring, each with the best of the other numbers."""
    workers = sorted({point["workers"] for point in points})
    if len(workers) < 2:
        return ""
    data, said = [], []
    for index, (mode, chosen) in enumerate(_by_mode(points, direction).items()):
        best = {}
        for point in good(chosen, direction):
            best.setdefault(point["workers"], point)
        if not best:
            continue
        colour = f"var(--file-{(index + 2) % COLOURS})"  # not those of reads and writes
        known = sorted(best)
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": escape(mode),
                "x": [count(value) for value in known],
                "y": [best[value]["gb_per_second"] for value in known],
                "text": [escape(_setting(best[value])) for value in known],
                "hovertemplate": "%{y:.3~g} GB/s<br>%{text}<extra></extra>",
                "line": {"color": colour, "width": 2},
                "marker": {"color": colour, "size": 8, "symbol": index % COLOURS},
            }
        )
        said.append(
            f"{mode}: "
            + ", ".join(
                f"{plural(value, 'worker')} {digits(best[value]['gb_per_second'])} GB/s"
                for value in known
            )
        )
    return page.plot(
        f"{prefix}-workers-{direction}",
        f"{direction.capitalize()} by number of workers: best GB/s",
        f"Best {direction} bandwidth by number of workers. {'; '.join(said)}.",
        data,
        {
            "showlegend": len(data) > 1,
            "yaxis": {"rangemode": "tozero"},
            "xaxis": {
                "type": "category",
                "categoryorder": "array",
                "showgrid": False,
                "categoryarray": [count(value) for value in workers],
                "title": {"text": "Workers"},
            },
        },
        style="plot" if len(data) <= 4 else "tall",
    )


def _best(ranked, direction):
    rows = [
        [
            str(place),
            digits(point["gb_per_second"]),
            digits(point.get("gib_per_second")),
            f"{100 * point['gb_per_second'] / (ranked[0]['gb_per_second'] or 1):.0f} %",
            size(point["block_bytes"]),
            count(point["queue_depth"]),
            count(point["workers"]),
            point["overlap"],
            str(point.get("submit", NONE)),
            str(point.get("engine", NONE)),
            str(point.get("directory", NONE)),
        ]
        for place, point in enumerate(ranked[:BEST], 1)
    ]
    return table(
        f"The best {plural(len(rows), 'point')} of {len(ranked):,}, {direction}",
        [
            "#Place",
            "#GB/s",
            "#GiB/s",
            "#Of best",
            "#Block",
            "#Depth",
            "#Workers",
            "Requests",
            "Submit",
            "Engine",
            "Directory",
        ],
        rows,
    )


def _failures(points):
    failed = [point for point in points if point["status"] != "ok"]
    if not failed:
        return ""
    rows = [
        [
            point["direction"].capitalize(),
            size(point["block_bytes"]),
            count(point["queue_depth"]),
            count(point["workers"]),
            point["overlap"],
            str(point.get("engine", NONE)),
            str(point.get("error", NONE)),
        ]
        for point in failed
    ]
    return section(
        heading(3, "Failed points"),
        table(
            f"{plural(len(failed), 'point')} failed",
            ["Direction", "#Block", "#Depth", "#Workers", "Requests", "Engine", "Error"],
            rows,
        ),
    )
