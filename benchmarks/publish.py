"""Takes a run of compare.py into the documents: benchmarks/results.json, and the tables and
pictures of docs/performance.md.

    python benchmarks/publish.py build/reports

The paragraph that begins with "**Where the other is faster:**" lists what is behind. A row that the
page has is written anew where it stands; one that the run did not measure goes, and
is named; for a new one put a line with its name, "| name |", where it shall stand. What the page
says in words is not touched: read it again.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

from jobs import ROOT, size_text
from page import markdown_line
from pairs import PAIRS_TO_JUDGE
from results import cells

PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results.json"
PICTURES = ROOT / "docs" / "pictures"
X_TEXTS = {"block": size_text, "bytes": size_text, "operations": "{:,}".format}


def name_of(text: str) -> str:
    """The first cell of a line of a table; empty for any other line."""
    return text[2:].split(" |", 1)[0] if text.startswith("| ") else ""


def curve_lines(curve: dict[str, Any], x_name: str) -> list[str]:
    text = X_TEXTS.get(x_name, str)
    lines = curve["lines"].values()
    return [
        markdown_line([text(x), *(f"{values[number]:.3g}" for values in lines)])
        for number, x in enumerate(curve[x_name])
    ]


def check_head(head: str, curve: dict[str, Any]) -> None:
    shown = [cell.strip().removesuffix(f", {curve['unit']}") for cell in head.split("|")[2:-1]]
    if shown != list(curve["lines"]):
        raise SystemExit(f"{PAGE}: {curve['title']} has the lines {list(curve['lines'])}")


BEHIND = "**Where the other is faster:**"


def behind(results: dict[str, Any]) -> str:
    rows = [row for row in results["rows"] if row["verdict"] == "behind"]
    told = "; ".join(f"{row['name']} ({row['ratio']:.2f})" for row in rows) or "nowhere"
    return textwrap.fill(f"{BEHIND} {told}.", 100, break_on_hyphens=False)


def with_results(page: str, results: dict[str, Any]) -> str:
    """The page with the figures of the run. Fails with the names of rows that have no place."""
    rows = {row["name"]: row for row in results["rows"]}
    curves = {key: c for c in results["curves"] for key in c.keys() - {"title", "unit", "lines"}}
    written: list[str] = []
    gone: list[str] = []
    for block in page.split("\n\n"):
        lines = block.split("\n")
        names = [name_of(text) for text in lines]
        if names[0] in curves:
            check_head(lines[0], curves[names[0]])
            lines = lines[:2] + curve_lines(curves[names[0]], names[0])
        elif block.startswith(BEHIND):
            lines = [behind(results)]
        elif rows.keys() & set(names):
            gone += [name for name in names[2:] if name not in rows]
            lines = lines[:2] + [
                markdown_line(cells(rows.pop(name))) for name in names[2:] if name in rows
            ]
        written.append("\n".join(lines))
    if rows:
        raise SystemExit(f"{PAGE}: no table has a line for: {'; '.join(rows)}")
    for name in gone:
        print(f"not measured, and gone from the page: {name}")
    return "\n\n".join(written)


def not_to_be_shown(results: dict[str, Any]) -> str:
    """Why a run is not one of all rows that tells enough about each; empty if it is."""
    if results["quick"]:
        return "it is a quick one"
    if "--rows" in results["machine"]["command"]:
        return "it has some rows only"
    few = [row["name"] for row in results["rows"] if len(row["pairs"]) < PAIRS_TO_JUDGE]
    return f"these rows have too few pairs: {'; '.join(few)}" if few else ""


def without_folder(text: str) -> str:
    """Paths as from the root of the repository."""
    return text.replace(f"{ROOT}/", "")


def compact(results: dict[str, Any]) -> str:
    """JSON with one line per pair of brackets that holds numbers only."""
    rows = [json.dumps(row) for row in results["rows"]]
    curves = [json.dumps(curve) for curve in results["curves"]]
    rest = {key: value for key, value in results.items() if key not in ("rows", "curves")}
    head = json.dumps(rest, indent=1)[:-2]
    return (
        head
        + ',\n "rows": [\n  '
        + ",\n  ".join(rows)
        + '\n ],\n "curves": [\n  '
        + ",\n  ".join(curves)
        + "\n ]\n}\n"
    )


def main() -> None:
    reports = Path(sys.argv[1]) if len(sys.argv) == 2 else ROOT / "build" / "reports"
    results = json.loads(without_folder((reports / "compare.json").read_text()))
    if why := not_to_be_shown(results):
        raise SystemExit(f"this run cannot be shown: {why}")
    PAGE.write_text(with_results(PAGE.read_text(), results))
    RESULTS.write_text(compact(results))
    for picture in reports.glob("compare-*.svg"):
        shutil.copy(picture, PICTURES)


if __name__ == "__main__":
    main()
