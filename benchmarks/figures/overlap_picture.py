"""Draws one optimizer step from a trace: when it reads, computes and writes each sub-group. Prints
how full the drive's queue was.

    echo '{"kind": "step", "repeat": 1}' | TENSORFERRY_TRACE=trace.json \\
        python benchmarks/jobs/offload_jobs.py tensorferry DIR
    python -m benchmarks.figures.overlap_picture trace.json docs/pictures/overlap.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

LANES = (
    ("read", "operation", "read", "#2a78d6"),
    ("wait", "work", "wait for", "#b5b4ac"),
    ("compute", "work", "AdamW step", "#1baf7a"),
    ("write", "operation", "write", "#eb6834"),
)
WIDTH, LEFT, ROW, GAP = 960, 76, 12, 14


def last_step(events: list[dict]) -> tuple[float, float]:
    step = max((e for e in events if e["name"] == "optimizer step"), key=lambda e: e["ts"])
    return step["ts"], step["ts"] + step["dur"]


def shown(events: list[dict], begin: float, end: float) -> list[dict]:
    return [
        e
        for e in events
        if e["name"] != "optimizer step" and e["cat"] != "request" and begin <= e["ts"] < end
    ]


def queued(events: list[dict], begin: float, end: float, count: int) -> float:
    """The part of the time in which at least `count` requests were in the queue."""
    changes = []
    for e in events:
        if e["cat"] == "request" and e["ts"] < end and e["ts"] + e["dur"] > begin:
            changes += [(max(begin, e["ts"]), 1), (min(end, e["ts"] + e["dur"]), -1)]
    in_queue, since, total = 0, begin, 0.0
    for at, change in sorted(changes):
        total += (at - since) * (in_queue >= count)
        in_queue, since = in_queue + change, at
    return total / (end - begin)


def rows(spans: list[tuple[float, float]]) -> list[int]:
    """A row for each span, so that no two spans in one row overlap."""
    ends: list[float] = []
    chosen = []
    for begin, end in spans:
        row = next((i for i, free in enumerate(ends) if free <= begin), len(ends))
        ends[row : row + 1] = [end]
        chosen.append(row)
    return chosen


def draw(events: list[dict]) -> str:
    start = min(e["ts"] for e in events)
    stop = max(e["ts"] + e["dur"] for e in events)
    scale = (WIDTH - LEFT - 16) / (stop - start)
    shapes = []
    y = 30.0
    for label, category, name, color in LANES:
        spans = sorted(
            (e["ts"], e["ts"] + e["dur"])
            for e in events
            if e["cat"] == category and e["name"].startswith(name)
        )
        placed = rows(spans)
        height = (max(placed, default=0) + 1) * ROW
        middle = y + height / 2 + 4
        shapes.append(f'<text x="{LEFT - 10}" y="{middle:.0f}" class="l">{label}</text>')
        for (begin, end), row in zip(spans, placed):
            x = LEFT + (begin - start) * scale
            width = max((end - begin) * scale - 1, 0.8)
            shapes.append(
                f'<rect x="{x:.1f}" y="{y + row * ROW:.0f}" width="{width:.1f}" height="{ROW - 2}" '
                f'rx="2" fill="{color}"/>'
            )
        y += height + GAP
    milliseconds = (stop - start) / 1000
    every = next(s for s in (10, 20, 50, 100, 200, 500, 1000) if milliseconds / s <= 12)
    ticks = []
    for at in range(0, int(milliseconds) + 1, every):
        x = LEFT + at * 1000 * scale
        ticks.append(f'<line x1="{x:.1f}" y1="24" x2="{x:.1f}" y2="{y:.0f}" class="g"/>')
        ticks.append(f'<text x="{x:.1f}" y="16" class="t">{at} ms</text>')
    style = (
        "text{font:13px system-ui,sans-serif;fill:#6b6a63}.l{text-anchor:end}"
        ".t{font-size:11px;text-anchor:middle}.g{stroke:#d9d8d0;stroke-width:1}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 4:.0f}" role="img" '
        f'aria-label="Reads, computation and writes of one step over time">'
        f"<style>{style}</style>{''.join(ticks)}{''.join(shapes)}</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path, help="the SVG file to write")
    given = parser.parse_args()
    events = json.loads(given.trace.read_text())
    target = given.picture
    target.parent.mkdir(parents=True, exist_ok=True)
    begin, end = last_step(events)
    target.write_text(draw(shown(events, begin, end)))
    parts = (f"{count}: {queued(events, begin, end, count):.0%}" for count in (1, 16, 32))
    seconds = (end - begin) / 1e6
    print(
        f"a step of {seconds:.3f} s; time with at least N requests in the queue: {', '.join(parts)}"
    )


if __name__ == "__main__":
    main()
