"""The results of compare.py: as a table, as JSON, as an HTML page, and against an earlier run."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.jobs.peers import Peers
from benchmarks.report import page
from benchmarks.rows.bench import Bench, drive_differs
from benchmarks.rows.curves import Curve
from benchmarks.rows.pairs import PAIRS_TO_JUDGE
from benchmarks.rows.row import MORE_IS_BETTER, NO_TIME, Row

HEAD = ["what / against what", "ours", "other", "unit", "ratio", "95 % interval", "target", ""]
NUMBERS = (1, 2, 4, 5, 6)
METHOD = (
    "Each row is a ratio of two jobs. A calibration first finds fio's best settings. Then every "
    "row gets new pairs of jobs, one right after the other on the same file, in alternating order; "
    "the rows take turns. The figure is the median of the paired ratios with its "
    "95 % interval. A target holds if the interval reaches it and the other end is within 5 % "
    "of it. It is unclear if the interval reaches it but is wider. Without a target, even means "
    "that the interval contains 1: the noise hides which side is better."
)


def table(rows: list[Row]) -> list[list[str]]:
    lines = []
    for row in rows:
        lines.append(cells(as_dict(row) | {"pairs": row.values()}))
    return lines


def cells(row: dict[str, Any]) -> list[str]:
    """A line of the table, from a row of the JSON."""
    ours, other = (median(pair[side] for pair in row["pairs"]) for side in (0, 1))
    return [
        row["name"],
        f"{ours:.4g}",
        f"{other:.4g}",
        row["unit"],
        f"{row['ratio']:.3f}",
        f"{row['low']:.3f} to {row['high']:.3f}",
        row["target"],
        row["verdict"],
    ]


def as_dict(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "unit": row.unit,
        "target": str(row.target or ""),
        **asdict(row.figure()),
        "pairs_disturbed": row.disturbed,
        "pairs": [[rounded(ours), rounded(other)] for ours, other in row.values()],
    }


def summary(rows: list[Row]) -> str:
    verdicts = [row.figure().verdict for row in rows]
    count = {word: verdicts.count(word) for word in page.VERDICTS}
    pairs = sum(len(row.pairs) for row in rows)
    disturbed = sum(row.disturbed for row in rows)
    return (
        f"{count['holds']} targets hold, {count['misses']} are missed, {count['unclear']} are "
        f"unclear; of the rows without a target {count['ahead']} are ahead, {count['even']} even, "
        f"{count['behind']} behind; {pairs} pairs, {disturbed} of them on a busy machine"
    )


def as_json(
    rows: list[Row], curves: list[Curve], bench: Bench, peers: Peers, facts: dict[str, str]
) -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "machine": facts,
        "peers": peers.versions,
        "peers_missing": peers.missing,
        "calibration": {cell: asdict(point) for cell, point in bench.calibration.items()},
        "calibration_gb_per_second": bench.calibration_speeds,
        "rows": [as_dict(row) for row in rows],
        "curves": [
            {
                "title": curve.title,
                "unit": curve.unit,
                curve.x_name: list(curve.points),
                "lines": {
                    name: [rounded(curve.value(name, point)) for point in curve.points]
                    for name in curve.lines
                },
            }
            for curve in curves
        ],
    }


def rounded(value: float) -> float:
    return float(f"{value:.5g}")


def write(
    rows: list[Row],
    curves: list[Curve],
    bench: Bench,
    peers: Peers,
    facts: dict[str, str],
    not_measured: dict[str, str],
    options: Namespace,
) -> dict[str, Any]:
    """Writes all files and returns the JSON."""
    output: Path = options.output
    output.mkdir(parents=True, exist_ok=True)
    found = as_json(rows, curves, bench, peers, facts)
    found |= {"failed": not_measured, "quick": options.quick}
    text = json.dumps(found, indent=1)
    (output / "compare.json").write_text(text + "\n")
    markdown = page.markdown_table(HEAD, table(rows))
    sections = [("Results", page.table(HEAD, table(rows), NUMBERS))]
    for old in output.glob("compare-*.svg"):
        old.unlink()
    chart = ratio_chart(rows)
    sections.append(("Every pair", page.paragraph(CHART_TEXT) + chart))
    (output / "compare-ratios.svg").write_text(page.picture(chart))
    for curve in curves:
        head, lines = curve.table()
        markdown += f"\n{curve.title}:\n\n" + page.markdown_table(head, lines)
        drawing = ""
        if curve.picture:
            values = {n: [curve.value(n, p) for p in curve.points] for n in curve.lines}
            texts = [curve.x_text(point) for point in curve.points]
            drawing = page.line_chart(curve.x_name, curve.unit, texts, values)
            file = f"compare-{curve.x_name.replace(' ', '-')}.svg"
            (output / file).write_text(page.picture(drawing))
        table_html = page.table(head, lines, tuple(range(1, len(head))))
        sections.append((curve.title, drawing + table_html))
    (output / "compare.md").write_text(markdown)
    points = [[cell, str(point)] for cell, point in bench.calibration.items()]
    sections += [
        ("Method", page.paragraph(METHOD)),
        ("fio's best settings", page.table(["what", "settings"], points)),
        ("Machine", page.facts_list(facts)),
        ("Peers", page.facts_list(peers.versions)),
    ]
    if peers.missing:
        sections.append(("Peers that could not be set up here", page.facts_list(peers.missing)))
    if not_measured:
        sections.append(("Not measured", page.facts_list(not_measured)))
    lead = f"{found['date']}; {summary(rows)}."
    page.write(output / "compare.html", "tensorferry, side by side", lead, sections)
    return found


def updated(earlier: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The earlier run with the rows of this one in their places, new ones at the end. These rows
    keep their date and their commit."""
    stamp = {"date": now["date"], "tensorferry": now["machine"]["tensorferry"]}
    fresh = {row["name"]: row | stamp for row in now["rows"]}
    failed = earlier["failed"] | now["failed"]
    merged = {"failed": {name: why for name, why in failed.items() if name not in fresh}}
    for key in ("peers", "calibration", "calibration_gb_per_second"):
        merged[key] = now[key] | earlier[key]
    rows = [fresh.pop(row["name"], row) for row in earlier["rows"]]
    return earlier | merged | {"rows": [*rows, *fresh.values()]}


CHART_TEXT = (
    "Dots are pairs, thick lines the 95 % intervals of the medians, red marks the targets. "
    "Right of a target is better for speeds, left of it for latencies, CPU time and memory. Values "
    "beyond the edge are drawn at the edge."
)


def ratio_chart(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        told = row.figure()
        target = row.target.value if row.target else None
        lines.append((row.name, row.ratios(), told.ratio, told.low, told.high, target))
    return page.ratio_chart(lines)


# Two runs differ by more than the pairs of one run: this much does not count as a fall.
RUN_TO_RUN = 0.03


def comparable(old: dict[str, Any] | None, row: dict[str, Any]) -> bool:
    return old is not None and min(len(old["pairs"]), len(row["pairs"])) >= PAIRS_TO_JUDGE


def fallen(before: dict[str, Any], now: dict[str, Any]) -> list[list[str]]:
    """The rows whose whole interval is now worse than the whole interval of before, by more than
    two runs differ. Rows with few pairs do not count."""
    earlier = {row["name"]: row for row in before["rows"]}
    found = []
    for row in now["rows"]:
        old = earlier.get(row["name"])
        if old is None or not comparable(old, row):
            continue
        if row["unit"] in MORE_IS_BETTER:
            worse = row["high"] < old["low"] * (1 - RUN_TO_RUN)
        else:
            worse = row["low"] > old["high"] * (1 + RUN_TO_RUN)
        if worse:
            shown = (f"{r['ratio']:.3f} ({r['low']:.3f} to {r['high']:.3f})" for r in (old, row))
            found.append([row["name"], *shown])
    return found


THE_SAME = ("processor", "cores", "memory", "device")  # otherwise it is another machine
ANY = {"command": "", "tensorferry": ""}  # what may differ from run to run on one machine


def same_machine(then: dict[str, str], here: dict[str, str]) -> bool:
    """Also with the same version of the kernel, built anew: "6.18.44-v2" after "6.18.44-v1"."""
    return _compared(then) == _compared(here)


def _compared(machine: dict[str, str]) -> dict[str, str]:
    return {**machine, **ANY, "kernel": machine.get("kernel", "").partition("-")[0]}


def other_drive(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Where fio's best speed changed much: ratios may change for that reason alone."""

    def best(run: dict[str, Any]) -> dict[str, float]:
        speeds = run.get("calibration_gb_per_second", {})
        return {cell: max(tried.values()) for cell, tried in speeds.items() if tried}

    then, here = best(before), best(now)
    return [
        f"fio's {cell} was {then[cell]:.1f} GB/s and is {here[cell]:.1f}"
        for cell in then
        if cell in here and drive_differs(then[cell], here[cell])
    ]


def against(before: dict[str, Any], now: dict[str, Any], whole: bool) -> bool:
    """Prints which rows fell, and which are gone if the run is `whole`. Returns whether any did so
    on the same machine."""
    here = all(before["machine"].get(fact) == now["machine"].get(fact) for fact in THE_SAME)
    if not here:
        print("this is another machine (see 'machine' in both files), so a fall does not count:")
    names = {row["name"] for row in now["rows"]}
    whole = whole and before.get("quick") == now.get("quick")  # quick runs have fewer rows
    names |= {name for name, why in now.get("failed", {}).items() if why == NO_TIME}
    gone = [row["name"] for row in before["rows"] if row["name"] not in names] if whole else []
    worse = fallen(before, now)
    if worse:
        print(page.text_table(["fallen by more than the noise", "before", "now"], worse))
    for name in gone:
        print(f"no longer measured: {name}")
    if here and not same_machine(before["machine"], now["machine"]):
        print("the machine has changed: see 'machine' in both files")
    for cell in other_drive(before, now):
        print(f"the drive has changed: {cell}")
    if before["peers"] != now["peers"]:
        print("the peers have changed: see 'peers' in both files")
    earlier = {row["name"]: row for row in before["rows"]}
    judged = sum(comparable(earlier.get(row["name"]), row) for row in now["rows"])
    print(
        f"against the run of {before['date']}: {len(worse)} of {judged} ratios fell by more than "
        f"the noise; {len(now['rows']) - judged} rows are new or have fewer than {PAIRS_TO_JUDGE} "
        f"pairs and do not count; {len(gone)} are gone"
    )
    return here and bool(worse or gone)
