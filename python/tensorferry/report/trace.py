"""The sections of a report on a trace of training: a timeline of an iteration, and who waited for
whom."""

from pathlib import Path
from typing import Any

from .page import (
    Json,
    Page,
    digits,
    escape,
    heading,
    key_figures,
    number,
    paragraph,
    plural,
    section,
    table,
    time_unit,
)

Span = tuple[float, float]  # seconds

# What the timeline shows, from top to bottom: (label, colour).
LANES = (
    ("Backward pass", "file-5"),
    ("Steps", "file-2"),
    ("Waits for the drive", "file-1"),
    ("Waits for copies", "file-3"),
    ("Drive reads", "read"),
    ("Drive writes", "write"),
)
ROUND = "iteration"
# Spans that have steps and waits inside.
AROUND = ("optimizer step", "module waits for step", "reader waits for step")


def results_of(path: object, events: list[Any]) -> Json | str:
    """Returns what the sections need of the events of a trace, or why nothing can be made of it."""
    lanes: dict[str, list[Span]] = {name: [] for name, _ in LANES}
    rounds: list[Span] = []
    for place, event in enumerate(events):
        one = event if isinstance(event, dict) else {}
        begin, lasts = number(one.get("ts")), number(one.get("dur"))
        name, kind = one.get("name"), one.get("cat")
        if begin is None or lasts is None or not isinstance(name, str):
            return f"event {place} has no name, ts and dur, as those of TENSORFERRY_TRACE have"
        span = (begin / 1e6, (begin + lasts) / 1e6)
        if kind == "work" and name == ROUND:
            rounds.append(span)
        elif (lane := _lane(name, kind)) is not None:
            lanes[lane].append(span)
    if not any(lanes.values()):
        return "the trace shows no operation and no step"
    rounds = sorted(rounds) or [_whole(lanes)]
    return {
        "command": "trace",
        "complete": True,
        "machine": {},
        "places": [{"directory": Path(str(path)).name}],
        "settings": {},
        "iterations": [_iteration(lanes, *one) for one in rounds],
    }


def _lane(name: str, kind: object) -> str | None:
    if kind == "operation":
        return "Drive reads" if name.startswith("read") else "Drive writes"
    if kind != "work":
        return None
    if name == "wait for copies":
        return "Waits for copies"
    if name.startswith("wait for "):
        return "Waits for the drive"
    if name == "backward pass":
        return "Backward pass"
    return "Steps" if name.endswith(" step") and name not in AROUND else None


def _whole(lanes: dict[str, list[Span]]) -> Span:
    spans = [span for lane in lanes.values() for span in lane]
    return min(begin for begin, _ in spans), max(end for _, end in spans)


def _iteration(lanes: dict[str, list[Span]], begin: float, end: float) -> Json:
    """An iteration: its lanes, counted from its beginning, and how long each was busy."""
    own = {name: union(lane, begin, end) for name, lane in lanes.items()}
    drive = union(own["Drive reads"] + own["Drive writes"], 0, end - begin)
    copies = union(own["Waits for copies"], 0, end - begin)
    waits = union(own["Waits for the drive"], 0, end - begin)
    # Copies are waited for inside waits for room.
    both = total(waits) + total(copies) - total(union(waits + copies, 0, end - begin))
    return {
        "seconds": end - begin,
        "lanes": own,
        "waited_drive": total(waits) - both,
        "waited_copies": total(copies),
        "stepped": total(own["Steps"]),
        "drive_worked": total(drive),
    }


def union(spans: list[Span], begin: float, end: float) -> list[Span]:
    """The times from `begin` to `end` that are in any of these spans, counted from `begin`."""
    found: list[Span] = []
    for first, last in sorted(spans):
        first, last = max(first, begin) - begin, min(last, end) - begin
        if first >= last:
            continue
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return found


def total(spans: list[Span]) -> float:
    return sum(last - first for first, last in spans)


def figures(results: Json) -> str:
    one = results["iterations"][-1]
    unit = time_unit([one["seconds"]])
    waited = one["waited_drive"] + one["waited_copies"]
    return key_figures(
        [
            ("Iteration", unit.digits(one["seconds"]), unit.name, "the last one of the trace"),
            ("Computation waited", _percent(waited, one), "%", "for the drive and for copies"),
            (
                "The drive waited",
                _percent(one["seconds"] - one["drive_worked"], one),
                "%",
                "for computation: nothing was read or written",
            ),
        ]
    )


def _percent(seconds: float, one: Json) -> str:
    return digits(100 * seconds / one["seconds"]) if one["seconds"] else "0"


def sections(page: Page, results: Json, prefix: str) -> str:
    rounds = results["iterations"]
    one = rounds[-1]
    unit = time_unit([one["seconds"]])
    return "\n".join(
        [
            section(
                heading(3, "Who waited for whom"),
                _bars(page, one, unit, prefix),
                _rounds(rounds, unit),
            ),
            section(
                heading(3, "An iteration over time"),
                _timeline(page, one, unit, prefix),
                paragraph(
                    "An iteration goes from the end of one optimizer step to the end of the next. "
                    "Where neither a backward pass nor a step is shown, the forward pass and the "
                    "rest of the program run. Steps in the backward pass and behind the forward "
                    "pass are those of overlap.",
                    "note",
                ),
            ),
        ]
    )


def _parts(one: Json) -> list[tuple[str, str, str, float]]:
    """The parts of the bars: (bar, part, colour, seconds)."""
    waited = one["waited_drive"] + one["waited_copies"]
    steps = one["stepped"]
    return [
        ("Computation", "computes the model", "file-5", one["seconds"] - waited - steps),
        ("Computation", "steps", "file-2", steps),
        ("Computation", "waits for the drive", "file-1", one["waited_drive"]),
        ("Computation", "waits for copies", "file-3", one["waited_copies"]),
        ("Drive", "reads and writes", "read", one["drive_worked"]),
        ("Drive", "waits for computation", "line", one["seconds"] - one["drive_worked"]),
    ]


def _bars(page: Page, one: Json, unit: Any, prefix: str) -> str:
    parts = [part for part in _parts(one) if part[3] > 0]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": f"{bar}: {part}",
            "y": [bar],
            "x": [unit.of(seconds)],
            "text": [escape(part)],
            "textposition": "inside",
            "insidetextanchor": "middle",
            "marker": {"color": f"var(--{colour})"},
            "hovertemplate": f"{escape(part)}: %{{x:.4g}} {unit.name}<extra></extra>",
        }
        for bar, part, colour, seconds in parts
    ]
    words = "; ".join(f"{bar} {part} {unit.text(seconds)}" for bar, part, _, seconds in parts)
    return page.plot(
        f"{prefix}-waits",
        "Who waited for whom",
        f"Two bars of {unit.text(one['seconds'])}. {words}.",
        data,
        {
            "barmode": "stack",
            "showlegend": False,
            "xaxis": {"title": {"text": unit.name}},
            "yaxis": {"autorange": "reversed"},
            "height": 220,
        },
    )


def _rounds(rounds: list[Json], unit: Any) -> str:
    rows = [
        [
            str(place),
            unit.digits(one["seconds"]),
            unit.digits(one["stepped"]),
            unit.digits(one["waited_drive"]),
            unit.digits(one["waited_copies"]),
            unit.digits(one["drive_worked"]),
        ]
        for place, one in enumerate(rounds, 1)
    ]
    columns = ["Iteration", "#All", "#Steps", "#Waits: drive", "#Waits: copies", "#Drive works"]
    return table(f"{plural(len(rounds), 'iteration')}, in {unit.name}", columns, rows[-20:])


def _timeline(page: Page, one: Json, unit: Any, prefix: str) -> str:
    data = []
    for name, colour in LANES:
        spans = one["lanes"][name]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": [name] * len(spans),
                "base": [unit.of(first) for first, _ in spans],
                "x": [unit.of(last - first) for first, last in spans],
                "marker": {"color": f"var(--{colour})"},
                "hovertemplate": f"{name}: from %{{base:.4g}}, %{{x:.4g}} {unit.name}"
                "<extra></extra>",
            }
        )
    busy = "; ".join(f"{name} {unit.text(total(one['lanes'][name]))}" for name, _ in LANES)
    return page.plot(
        f"{prefix}-timeline",
        f"One iteration of {unit.text(one['seconds'])}",
        f"When each of these was busy in an iteration of {unit.text(one['seconds'])}: {busy}.",
        data,
        {
            "barmode": "overlay",
            "showlegend": False,
            "xaxis": {
                "title": {"text": f"{unit.name} since the end of the last step"},
                "range": [0, unit.of(one["seconds"])],
            },
            "yaxis": {
                "categoryorder": "array",
                "categoryarray": [name for name, _ in LANES],
                "autorange": "reversed",
            },
            "height": 360,
        },
    )
