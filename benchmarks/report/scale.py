"""Computes the tables of docs/scale.md from benchmarks/results.json: what one handle needs for many
drives.

    python -m benchmarks.report.scale

rewrites the tables of the page; the text does not change. publish.py does the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.jobs.job import ROOT
from benchmarks.report.page import markdown_line

PAGE = ROOT / "docs" / "scale.md"
RESULTS = ROOT / "benchmarks" / "results.json"

DRIVES = (1, 4, 8, 16)
DRIVE_GB_PER_SECOND = (7, 14)
SMALL_BYTES = 4096

# The rows that the costs come from.
READ_ROW = "CPU time, read, page-locked 1 GiB / fio with our blocks"
WRITE_ROW = "CPU time, write, page-locked 1 GiB / fio with our blocks"
COPY_ROW = "copy 1 MiB, hot to cold, told that it is cold / memcpy"
SMALL_ROW = "operations of 4 KiB, 64 at a time, random reads / fio"


class Costs:
    """What one gigabyte and one small read cost, in seconds of one core."""

    def __init__(self, results: dict[str, Any]) -> None:
        rows = {row["name"]: row for row in results["rows"]}

        def ours(name: str) -> float:
            if name not in rows:
                raise SystemExit(f"{PAGE}: the run has no row {name}")
            return median(pair[0] for pair in rows[name]["pairs"])

        self.read = ours(READ_ROW) / 1000
        self.write = ours(WRITE_ROW) / 1000
        self.copy = 1 / ours(COPY_ROW)
        # One thread keeps 64 reads in flight and does nothing else.
        self.small = SMALL_BYTES / (ours(SMALL_ROW) * 1e9)


def cost_lines(costs: Costs) -> list[str]:
    return [
        markdown_line(cells)
        for cells in (
            ("read in place", f"{costs.read * 1e3:.1f} ms per GB", f"`{READ_ROW}`"),
            ("write in place", f"{costs.write * 1e3:.1f} ms per GB", f"`{WRITE_ROW}`"),
            ("copy to or from a slot", f"{costs.copy * 1e3:.0f} ms per GB", f"`{COPY_ROW}`"),
            ("read of 4 KiB", f"{costs.small * 1e6:.1f} us", f"`{SMALL_ROW}`"),
        )
    ]


def cores_text(cores: float) -> str:
    return f"{cores:.2g}" if cores < 10 else f"{cores:.0f}"


def workers(drives: int, cores: float) -> int:
    """Each drive has a worker of its own at least, and a worker is one thread."""
    return drives * math.ceil(cores / drives)


def in_place_line(costs: Costs, drives: int, speed: float) -> list[str]:
    moved = drives * speed
    most = moved * max(costs.read, costs.write)
    return [
        cores_text(moved * costs.read),
        cores_text(moved * costs.write),
        f"{moved:.0f} GB/s",
        str(workers(drives, most)),
    ]


def slot_line(costs: Costs, drives: int, speed: float) -> list[str]:
    moved = drives * speed
    most = moved * (max(costs.read, costs.write) + costs.copy)
    return [
        cores_text(moved * (costs.read + costs.copy)),
        cores_text(moved * (costs.write + costs.copy)),
        f"{moved:.0f} to {3 * moved:.0f} GB/s",
        str(workers(drives, most)),
    ]


def small_line(costs: Costs, drives: int, speed: float) -> list[str]:
    reads = drives * speed * 1e9 / SMALL_BYTES
    cores = reads * costs.small
    return [f"{reads / 1e6:.1f} million", cores_text(cores), str(math.ceil(cores))]


# The first line of each table, and what makes its cells after the drives.
Line = Callable[[Costs, int, float], list[str]]
TABLES: dict[str, Line] = {
    "| drives | in place: cores to read | to write | memory bandwidth | workers |": in_place_line,
    "| drives | through slots: cores to read | to write | memory bandwidth | workers |": slot_line,
    "| drives | reads of 4 KiB per second | cores | threads that read |": small_line,
}
COSTS_HEAD = "| what | costs one core | row of `make compare` |"


def lines_of(costs: Costs, line: Line) -> list[str]:
    return [
        markdown_line([f"{drives} of {speed} GB/s", *line(costs, drives, speed)])
        for speed in DRIVE_GB_PER_SECOND
        for drives in DRIVES
    ]


def with_results(page: str, results: dict[str, Any]) -> str:
    """The page with the tables of this run. Exits if the page lacks one of them."""
    costs = Costs(results)
    missing = {COSTS_HEAD, *TABLES}
    written = []
    for block in page.split("\n\n"):
        lines = block.rstrip("\n").split("\n")
        end = block[len(block.rstrip("\n")) :]
        if lines[0] == COSTS_HEAD:
            lines = lines[:2] + cost_lines(costs)
        elif lines[0] in TABLES:
            lines = lines[:2] + lines_of(costs, TABLES[lines[0]])
        missing.discard(lines[0])
        written.append("\n".join(lines) + end)
    if missing:
        raise SystemExit(f"{PAGE}: it has no table that begins with {sorted(missing)[0]}")
    return "\n\n".join(written)


def main() -> None:
    PAGE.write_text(with_results(PAGE.read_text(), json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
