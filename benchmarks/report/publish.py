"""Copies a run of compare.py into benchmarks/results.json and into the tables and pictures of
docs/performance.md, and computes those of docs/scale.md from it.

    python -m benchmarks.report.publish build/reports
    python -m benchmarks.report.publish benchmarks/results.json   # after compare.py --update

headline.py draws the first table and its picture. The summary of the targets gets the measurements
and verdicts. The paragraph that begins with "**Where the other is faster:**" lists the rows that
are behind, and the one that begins with "**Measured at another time:**" those that compare.py
--update measured. Each row of the page gets its new figures. Rows that the run did not measure are
removed and named. To add a row, put a line with its name, "| name |", into a table. The text of the
page does not change: read it again. README.md, docs/index.md and the guides repeat figures;
tests/house/test_compare.py checks them.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import textwrap
from pathlib import Path
from typing import Any

from benchmarks.jobs.job import REPORTS, ROOT, size_text
from benchmarks.report import headline, scale
from benchmarks.report.page import markdown_line
from benchmarks.report.results import cells
from benchmarks.rows.pairs import PAIRS, PAIRS_TO_JUDGE, standing
from benchmarks.rows.row import MORE_IS_BETTER

PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results.json"
PICTURES = ROOT / "docs" / "pictures"
X_TEXTS = {"block": size_text, "bytes": size_text, "operations": "{:,}".format}


# The lines of the summary and the rows that each covers.
SHORT_HEAD = "| what | target | measured |"
SHORT = {
    "page-locked memory, 256 MiB and 1 GiB, read and overwrite / fio": (
        r"page-locked (read|overwrite), \S+ \S+ / fio$"
    ),
    "page-locked memory, new files / fio": r"page-locked write of a new file, \S+ \S+ / fio$",
    "ordinary memory / page-locked": r"ordinary memory (read|overwrite), \S+ \S+ / page-locked$",
    "synchronous reads on a File, 4 KiB to 1 MiB / fio psync": (
        r"synchronous read on a File.* (4 KiB|64 KiB|1 MiB) /"
    ),
    "synchronous reads by path, less open and close / fio psync": (
        r"synchronous read by path less.* (4 KiB|64 KiB|1 MiB) /"
    ),
    "CPU time, page-locked 1 GiB / fio": "CPU time",
    "ordinary torch tensors, 256 MiB and 1 GiB / DeepSpeed": (
        r"ordinary torch.*(256 MiB|1 GiB) / DeepSpeed"
    ),
    "the same / fio": "ordinary torch.* / fio",
    "page-locked torch tensors / DeepSpeed": r"page-locked torch.*(256 MiB|1 GiB) / DeepSpeed",
    "4 KiB by path from Python / DeepSpeed": "synchronous read by path from Python.* / DeepSpeed",
    "10,000 small tensors in one call / DeepSpeed": "10,000 tensors",
    "copy of a hot slot (1 MiB) to cold memory / memcpy": r"copy 1 MiB, hot to cold, .* / memcpy",
    "copies elsewhere / memcpy": r"copy (?!1 MiB, hot to cold, told).* / memcpy",
    "libaio and threads / io_uring": r"(libaio|threads) (read|write)",
    "page-locked memory / what was asked": "page-locked memory for",
    "AdamW step from NVMe / fio or torch alone": "AdamW.*the drive or torch alone",
    "AdamW step from NVMe / DeepSpeed ZeRO-3": "AdamW.*ZeRO-3",
    "inference from NVMe / fio or torch alone": "inference.*the drive or torch alone",
    "a million operations: time, memory, descriptors": "1,000,000",
    "4 KiB, 64 at a time / fio": "operations of 4 KiB, 64 at a time",
    "a queued read of 4 KiB / a synchronous one": "queued read, page-locked, 4 KiB, one at a time",
    "context switches of a queued read / one": "context switches of a queued read",
    "2 to 8 threads, one handle / fio psync": r"\d+ threads, synchronous reads",
    "two drives, one handle / fio, or alone": r"drives? of \d+",
    "SwapSpace over two drives / the sum of each alone": "SwapSpace over drives",
    "drives in memory, one handle / fio": r"\d+ drives in memory",
}


def short_line(text: str, rows: list[dict[str, Any]]) -> str:
    """A line of the summary with the figures of the run; any other line unchanged."""
    what, target, *_, limit = text[2:-2].split(" | ")
    if what not in SHORT:
        return text
    behind_it = [row for row in rows if re.match(SHORT[what], row["name"])]
    if not behind_it:
        raise SystemExit(f"{PAGE}: the run has no row for: {what}")
    ratios = [f"{row['ratio']:.2f}" for row in sorted(behind_it, key=lambda row: row["ratio"])]
    measured = ratios[0] if ratios[0] == ratios[-1] else f"{ratios[0]} to {ratios[-1]}"
    return markdown_line([what, target, measured, verdicts(behind_it), limit])


def verdicts(rows: list[dict[str, Any]]) -> str:
    found = [row["verdict"] for row in rows]
    words = {
        "holds": ("holds", "hold"),
        "misses": ("is missed", "are missed"),
        "unclear": ("is unclear", "are unclear"),
    }
    told = []
    for verdict, (one, more) in words.items():
        count = found.count(verdict)
        if count == len(found):
            return one
        if count:
            told.append(f"{count} {one if count == 1 else more}")
    return ", ".join(told)


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


def is_behind(row: dict[str, Any]) -> bool:
    """Whether the other side is faster, whatever the target. A user does not notice 1 %."""
    is_even = abs(row["ratio"] - 1) <= 0.01
    more_is_better = row["unit"] in MORE_IS_BETTER
    return not is_even and standing(row["low"], row["high"], more_is_better) == "behind"


def behind(results: dict[str, Any]) -> str:
    rows = [row for row in results["rows"] if is_behind(row)]
    told = "; ".join(f"{row['name']} ({row['ratio']:.2f})" for row in rows) or "nowhere"
    return textwrap.fill(f"{BEHIND} {told}.", 100, break_on_hyphens=False)


ANOTHER_TIME = "**Measured at another time:**"


def another_time(results: dict[str, Any]) -> dict[str, list[str]]:
    """The rows that are not of the run itself, by their date and commit."""
    found: dict[str, list[str]] = {}
    own = (results["date"], results["machine"].get("tensorferry"))
    for row in results["rows"]:
        date, commit = row.get("date", own[0]), row.get("tensorferry", own[1])
        if (date, commit) != own:
            found.setdefault(f"{date}, commit {commit}", []).append(row["name"])
    return found


def times_text(found: dict[str, list[str]]) -> str:
    told = ". ".join(f"{when}: {'; '.join(names)}" for when, names in found.items()) or "nothing"
    return textwrap.fill(f"{ANOTHER_TIME} {told}.", 100, break_on_hyphens=False)


def with_results(page: str, results: dict[str, Any]) -> str:
    """The page with the figures of the run. Exits if it has no line for a row, or for the times of
    those that are not of the run itself."""
    rows = {row["name"]: row for row in results["rows"]}
    curves = {key: c for c in results["curves"] for key in c.keys() - {"title", "unit", "lines"}}
    times = another_time(results)
    if times and ANOTHER_TIME not in page:
        raise SystemExit(f"{PAGE}: no paragraph begins with: {ANOTHER_TIME}")
    written: list[str] = []
    gone: list[str] = []
    for block in page.split("\n\n"):
        lines = block.split("\n")
        names = [name_of(text) for text in lines]
        if names[0] in curves:
            check_head(lines[0], curves[names[0]])
            lines = lines[:2] + curve_lines(curves[names[0]], names[0])
        elif block.startswith(headline.HEAD):
            lines = lines[:2] + headline.table_lines(results["rows"])
        elif block.startswith(SHORT_HEAD):
            lines = lines[:2] + [short_line(text, results["rows"]) for text in lines[2:]]
        elif block.startswith(BEHIND):
            lines = [behind(results)]
        elif block.startswith(ANOTHER_TIME):
            lines = [times_text(times)]
        elif rows.keys() & set(names):
            gone += [name for name in names[2:] if name not in rows]
            lines = lines[:2] + [
                markdown_line(cells(rows.pop(name))) for name in names[2:] if name in rows
            ]
        written.append("\n".join(lines))
    if rows:
        raise SystemExit(f"{PAGE}: no table has a line for: {'; '.join(rows)}")
    for name in gone:
        print(f"not measured, so removed from the page: {name}")
    return "\n\n".join(written)


def not_to_be_shown(results: dict[str, Any]) -> str:
    """Why a run cannot be published: it lacks rows or pairs; empty if it can."""
    if results["quick"]:
        return "it was made with --quick"
    if "--rows" in results["machine"]["command"]:
        return "it was made with --rows"
    few = [
        row["name"]
        for row in results["rows"]
        if len(row["pairs"]) < (PAIRS if row["target"] else PAIRS_TO_JUDGE)
    ]
    return f"it has too few pairs for: {'; '.join(few)}" if few else ""


def without_folder(text: str) -> str:
    """Paths relative to the root of the repository."""
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "reports",
        type=Path,
        nargs="?",
        default=REPORTS,
        help="the folder of the run (build/reports), or the file that --update changed",
    )
    reports = parser.parse_args().reports
    file = reports if reports.is_file() else reports / "compare.json"
    results = json.loads(without_folder(file.read_text()))
    if why := not_to_be_shown(results):
        raise SystemExit(f"this run cannot be published: {why}")
    PAGE.write_text(with_results(PAGE.read_text(), results))
    RESULTS.write_text(compact(results))
    scale.PAGE.write_text(scale.with_results(scale.PAGE.read_text(), results))
    headline.PICTURE.write_text(headline.draw(results["rows"]))
    for picture in reports.glob("compare-*.svg"):
        shutil.copy(picture, PICTURES)


if __name__ == "__main__":
    main()
