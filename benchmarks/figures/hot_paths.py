#!/usr/bin/env python3
"""Instructions of the calls that are made most, against their budget: `make counts`.

The budget holds for g++ 12, the preset `release` and x86-64. The exit status is 1 if a call takes
more than its budget and the tolerance. If one takes less, lower the budget.

Under valgrind no other thread runs while one waits in io_uring_enter, so this uses libaio and
threads. All but the engine itself is the same for io_uring.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.figures.callgrind import instructions_each
from benchmarks.jobs.job import PROGRAM, ROOT

TOLERANCE = 0.10
ELEMENTS = 10_000  # of one read_many


@dataclass(frozen=True)
class HotPath:
    what: str
    name: str  # in hot_paths.cc
    engine: str
    budget: int  # instructions
    counts: tuple[int, int] = (100, 1100)
    parts: int = 1  # of one call, to divide by


def many(what: str, name: str, budget: int) -> HotPath:
    return HotPath(what, name, "libaio", budget, counts=(1, 3), parts=ELEMENTS)


HOT_PATHS = (
    HotPath("submit and complete one request, libaio", "submit", "libaio", 4490),
    HotPath("submit and complete one request, threads", "submit", "threads", 8450),
    HotPath("inline read of 4 KiB, page-locked memory", "inline", "libaio", 1100),
    HotPath("inline read of 4 KiB, odd address", "copied", "libaio", 1760),
    many("read_many of 10,000, each", "many", 1940),
    many("read_many of 10,000 neighbours, each", "neighbours", 930),
)


def count(path: HotPath, file: Path, program: Path) -> float:
    env = os.environ | {"TENSORFERRY_PROFILES": ""}
    each = instructions_each(
        lambda calls: [program, path.name, file, calls, path.engine], path.counts, env
    )
    return each / path.parts


def verdict(counted: float, budget: int) -> str:
    if counted > budget * (1 + TOLERANCE):
        return "over the budget"
    return "lower the budget" if counted < budget * (1 - TOLERANCE) else "holds"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--directory", type=Path, default=ROOT / "build", help="for a scratch file")
    parser.add_argument("--program", type=Path, default=PROGRAM.parent / "hot_paths")
    parser.add_argument(
        "--only",
        nargs=2,
        metavar=("NAME", "ENGINE"),
        help="count one of these calls on any engine, whatever its budget: submit io_uring",
    )
    options = parser.parse_args()
    over = False
    print(f"{'instructions':42}{'counted':>9}{'budget':>8}")
    with tempfile.TemporaryDirectory(prefix="counts-", dir=options.directory) as folder:
        if options.only:
            name, engine = options.only
            known = next(path for path in HOT_PATHS if path.name == name)
            path = replace(known, what=f"{name}, {engine}", engine=engine)
            counted = count(path, Path(folder) / "file", options.program)
            print(f"{path.what:42}{counted:9.0f}")
            return 0
        for path in HOT_PATHS:
            counted = count(path, Path(folder) / "file", options.program)
            found = verdict(counted, path.budget)
            over |= found.startswith("over")
            print(f"{path.what:42}{counted:9.0f}{path.budget:8}  {found}", flush=True)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
