"""The sections of a report on `tensorferry plan`."""

from __future__ import annotations

from typing import Any

from .page import (
    Json,
    Page,
    count,
    digits,
    heading,
    key_figures,
    number,
    section,
    side_by_side,
    size,
    table,
    time_unit,
)

PLACES = {"gpu_bytes": "GPU", "memory_bytes": "Memory", "drive_bytes": "Drive"}
SHARES = ("var(--read)", "var(--write)", "var(--quiet)", "var(--line)", "var(--ink)")
GB = 1e9


def figures(results: Json) -> str:
    """Shows the size of the model, and how long the fastest choice takes."""
    task = results["settings"]["task"]
    first = results["choices"][0]
    unit = time_unit([_seconds(first)])
    found = [
        ("Parameters", digits(task["parameters"] / GB), "G", str(task["dtype"])),
        ("A step with its passes", unit.digits(_seconds(first)), unit.name, first["name"]),
        ("Limit", str(first["limit"]), "", "of the whole"),
    ]
    if number(first.get("drive_days")):
        found.append(("Drives last", digits(first["drive_days"]), "days", "at this pace"))
    return key_figures(found)


def sections(page: Page, results: Json, prefix: str) -> str:
    choices = results["choices"]
    parts = [
        section(
            heading(3, "What goes where"),
            *(_places(page, choice, f"{prefix}-places-{i}") for i, choice in enumerate(choices)),
        ),
        section(
            heading(3, "A step over time"),
            *(_timeline(page, choice, f"{prefix}-step-{i}") for i, choice in enumerate(choices)),
        ),
    ]
    if drives := [one for one in results["by_drives"] if number(one.get("seconds"))]:
        parts.append(section(heading(3, "More drives"), _by_drives(page, drives, prefix)))
    return "\n".join([*parts, section(heading(3, "All choices"), _table(choices))])


def _seconds(choice: Json) -> float:
    return float(choice["step_seconds"] + choice["pass_seconds"])


def _places(page: Page, choice: Json, name: str) -> str:
    """Stacked bytes of each place."""
    used = [place for place in PLACES if any(item[place] for item in choice["places"])]
    data = [
        {
            "type": "bar",
            "name": str(item["what"]),
            "x": [item[place] / GB for place in used],
            "y": [PLACES[place] for place in used],
            "orientation": "h",
            "marker": {"color": SHARES[i % len(SHARES)]},
            "hovertext": [f"{item['what']}: {size(item[place])}" for place in used],
            "hoverinfo": "text",
        }
        for i, item in enumerate(_escaped(choice["places"]))
    ]
    rows = [
        [str(item["what"]), *(size(item[place]) if item[place] else "" for place in used)]
        for item in choice["places"]
    ]
    return page.plot(
        name,
        f"{choice['name']}: bytes of each rank",
        f"Stacked bytes by place of the choice {choice['name']}.",
        data,
        {
            "barmode": "stack",
            "showlegend": True,
            "xaxis": {"title": {"text": "GB"}},
            "yaxis": {"automargin": True},
        },
    ) + table(
        f"{choice['name']}: bytes of each rank",
        ["What", *(f"#{PLACES[place]}" for place in used)],
        rows,
    )


def _escaped(items: list[Json]) -> list[Json]:
    """plotly reads tags in names."""
    words = str.maketrans({"<": "&lt;", ">": "&gt;", "&": "&amp;"})
    return [item | {"what": str(item["what"]).translate(words)} for item in items]


def _timeline(page: Page, choice: Json, name: str) -> str:
    """When each of the first sub-groups is read, computed and written."""
    stages = choice["step"]
    if not stages:
        return ""
    unit = time_unit([stages[-1]["write"][1]])
    colours = {"read": "var(--read)", "compute": "var(--ink)", "write": "var(--write)"}
    data = [
        {
            "type": "bar",
            "name": way,
            "orientation": "h",
            "base": [unit.of(stage[way][0]) for stage in stages],
            "x": [unit.of(stage[way][1] - stage[way][0]) for stage in stages],
            "y": [i + 1 for i in range(len(stages))],
            "marker": {"color": colour},
        }
        for way, colour in colours.items()
    ]
    shown = f"the first {count(len(stages))} of {count(choice['sub_groups'])} sub-groups"
    return page.plot(
        name,
        f"{choice['name']}: {shown}",
        f"When {shown} are read, computed and written in a step of the choice {choice['name']}.",
        data,
        {
            "barmode": "overlay",
            "showlegend": True,
            "xaxis": {"title": {"text": unit.name}},
            "yaxis": {"title": {"text": "sub-group"}, "autorange": "reversed"},
        },
    )


def _by_drives(page: Page, drives: list[Json], prefix: str) -> str:
    unit = time_unit([one["seconds"] for one in drives])

    def line(name: str, title: str, axis: str, values: list[Any]) -> str:
        return page.plot(
            f"{prefix}-{name}",
            title,
            f"{title}, for 1 to {count(drives[-1]['drives'])} drives in each node.",
            [
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "x": [one["drives"] for one in drives],
                    "y": values,
                    "line": {"color": "var(--read)"},
                }
            ],
            {
                "xaxis": {
                    "title": {"text": "drives in each node"},
                    "type": "log",
                    "dtick": 0.30103,
                },
                "yaxis": {"title": {"text": axis}, "rangemode": "tozero"},
            },
        )

    plots = [line("drives", "A step by drives", unit.name, [unit.of(d["seconds"]) for d in drives])]
    lives = [number(one.get("drive_days")) for one in drives]
    if any(lives):
        plots.append(line("life", "How long drives last", "days", lives))
    return side_by_side(*plots)


def _table(choices: list[Json]) -> str:
    rows = []
    for choice in choices:
        unit = time_unit([_seconds(choice)])
        rows.append(
            [
                str(choice["name"]),
                unit.text(_seconds(choice)),
                str(choice["limit"]),
                size(choice["gpu_bytes"]),
                size(choice["memory_bytes"]),
                size(choice["drive_bytes"]),
                digits(choice["tokens_per_second"]),
            ]
        )
    head = ["Choice", "#Step", "Limit", "#GPU", "#Memory", "#Drive", "#Tokens per second"]
    return table("All choices, each rank", head, rows)
