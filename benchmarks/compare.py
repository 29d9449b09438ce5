#!/usr/bin/env python3
"""Measures tensorferry against fio and against its own targets: `make compare`.

Each row is a ratio. fio's best settings are found in a calibration first; then every row gets
fresh pairs of jobs, one right after the other on the same file, the order alternating. The figure
is the median of the paired ratios with its 95 % interval. A target holds when the interval reaches
it and its far end is within 5 % of it; it is unclear when the interval reaches it but is wider.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median

import machine
import page
from jobs import (
    GIB,
    MIB,
    PROGRAM,
    REPORTS,
    ROOT,
    Ferry,
    FioPoint,
    JobFailed,
    Sample,
    fio_calls,
    fio_large,
    fio_new_files,
    size_text,
)
from pairs import Target
from progress import Progress
from rows import Row, call, call_less_open, cpu, speed
from offload_rows import offload_rows
from torch_rows import torch_rows

CALL_FILE_BYTES = GIB
# Enough passes that fio's millisecond matters little.
PASSES = {256 * MIB: 8, GIB: 2}
NEW_FILES = {256 * MIB: 4, GIB: 1}
CPU_PASSES = 8
OUR_IN_FLIGHT_BYTES = 16 * MIB  # what the library chooses for one disk
CALLS = {4 << 10: 4000, 64 << 10: 3000, MIB: 1000}
# More than this used by others disturbs a pair.
BYSTANDER_CORES_MAX = 0.5

# Beyond this fio spends its time on filling buffers and gains nothing.
IN_FLIGHT_BYTES_MAX = 128 * MIB
FULL_GRID = [
    FioPoint(kib << 10, depth, fixed)
    for kib in (128, 256, 512, 1024, 2048, 4096)
    for depth in (8, 16, 32, 64)
    for fixed in (True, False)
    if (kib << 10) * depth <= IN_FLIGHT_BYTES_MAX
]
QUICK_GRID = [
    point
    for point in FULL_GRID
    if point.fixed_buffers and point.depth > 8 and point.block_bytes in (512 << 10, MIB, 4 * MIB)
]


class Bench:
    """The files, the programs and fio's calibrated settings."""

    def __init__(self, folder: Path, program: Path, grid: list[FioPoint], say: Progress) -> None:
        self.ferry = Ferry(program)
        self.read_file = folder / "read.bin"
        self.write_file = folder / "write.bin"
        self.new_file = folder / "new.bin"
        self.grid = grid
        self.say = say
        self.calibration: dict[str, FioPoint] = {}
        self.calibration_speeds: dict[str, dict[str, float]] = {}
        self.our_block_bytes: dict[str, int] = {}
        self.at_end: list[Callable[[], None]] = []
        self.seed = 0

    def prepare(self) -> None:
        for file in (self.read_file, self.write_file):
            self.ferry.large(file, "write", GIB, 1, "--warm-up", "0")

    def file(self, direction: str) -> Path:
        return self.read_file if direction == "read" else self.write_file

    def fio(self, kind: str, size: int, point: FioPoint) -> Sample:
        """kind: read, write (over an existing file) or new."""
        if kind == "new":
            names = [self.new_file.with_suffix(f".{i}") for i in range(NEW_FILES[size])]
            return fio_new_files(names, point, size)
        return fio_large(self.file(kind), point, kind, size, PASSES[size])

    def best_point(self, kind: str, size: int) -> FioPoint:
        """All points once, the best few three times more; the best median is fio's."""
        cell = f"{kind} {size_text(size)}"
        if cell not in self.calibration:
            once = []
            for number, point in enumerate(self.grid, 1):
                self.say(f"calibrating fio: {cell}, {number} of {len(self.grid)}")
                once.append((self.fio(kind, size, point).gb_per_second, point))
            once.sort(key=lambda pair: -pair[0])
            again = {point: [seen] for seen, point in once[: max(3, len(once) // 6)]}
            for _ in range(3):
                for point, seen in again.items():
                    seen.append(self.fio(kind, size, point).gb_per_second)
            # The first sample chose them, so it does not count.
            speeds = {point: median(seen[1:]) for point, seen in again.items()}
            self.calibration[cell] = max(speeds, key=lambda point: speeds[point])
            self.calibration_speeds[cell] = {str(p): round(v, 3) for p, v in speeds.items()}
        return self.calibration[cell]

    def fio_best(self, kind: str, size: int) -> Sample:
        return self.fio(kind, size, self.best_point(kind, size))

    def fio_best_cpu(self, kind: str) -> Sample:
        best = self.best_point(kind, GIB)
        return self.fio_cpu(kind, FioPoint(best.block_bytes, best.depth, True))

    def fio_like_ours_cpu(self, kind: str) -> Sample:
        if kind not in self.our_block_bytes:
            self.our_block_bytes[kind] = self.pinned(kind, GIB).block_bytes
        block_bytes = self.our_block_bytes[kind]
        depth = max(1, OUR_IN_FLIGHT_BYTES // block_bytes)
        return self.fio_cpu(kind, FioPoint(block_bytes, depth, True))

    def fio_cpu(self, kind: str, point: FioPoint) -> Sample:
        return fio_large(self.file(kind), point, kind, GIB, CPU_PASSES, continuous=True)

    def pinned(self, kind: str, size: int, *options: str) -> Sample:
        if kind == "new":
            return self.ferry.new_files(self.new_file, size, NEW_FILES[size])
        return self.ferry.large(self.file(kind), kind, size, PASSES[size], *options)

    def calls(self, mode: str, size: int, memory: str) -> Sample:
        self.seed += 1
        return self.ferry.calls(
            self.read_file, mode, size, CALL_FILE_BYTES, CALLS[size], memory, self.seed
        )

    def psync(self, size: int) -> Sample:
        return fio_calls(self.read_file, size, CALL_FILE_BYTES, CALLS[size])


def large_rows(bench: Bench, sizes: list[int]) -> list[Row]:
    rows = []
    names = {"read": "read", "write": "overwrite", "new": "write of a new file"}
    for kind, name in names.items():
        for size in sizes:
            rows.append(
                Row(
                    f"page-locked {name}, {size_text(size)} / fio",
                    "GB/s",
                    Target(0.98, at_least=True),
                    partial(bench.pinned, kind, size),
                    partial(bench.fio_best, kind, size),
                    speed,
                )
            )
    for kind in ("read", "write"):
        for size in sizes:
            rows.append(
                Row(
                    f"ordinary memory {names[kind]}, {size_text(size)} / page-locked",
                    "GB/s",
                    Target(0.90, at_least=True),
                    partial(bench.pinned, kind, size, "--memory", "ordinary"),
                    partial(bench.pinned, kind, size),
                    speed,
                )
            )
    for memory, name in (("pinned", "page-locked"), ("ordinary", "reused")):
        for size in sizes:
            rows.append(
                Row(
                    f"fresh memory read, {size_text(size)} / {name}",
                    "GB/s",
                    None,
                    partial(bench.pinned, "read", size, "--memory", "fresh"),
                    partial(bench.pinned, "read", size, "--memory", memory),
                    speed,
                )
            )
    return rows


def call_rows(bench: Bench) -> list[Row]:
    rows = []
    target = Target(1.25, at_least=False)
    for memory, name in (("pinned", "page-locked"), ("ordinary", "ordinary memory")):
        for size in CALLS:
            rows.append(
                Row(
                    f"synchronous read on a File, {name}, {size_text(size)} / fio psync",
                    "us",
                    target,
                    partial(bench.calls, "sync", size, memory),
                    partial(bench.psync, size),
                    call,
                )
            )
    for size in CALLS:
        rows.append(
            Row(
                f"synchronous read by path less open and close, {size_text(size)} / fio psync",
                "us",
                target,
                partial(bench.calls, "path", size, "pinned"),
                partial(bench.psync, size),
                call_less_open,
            )
        )
    return rows


def cpu_rows(bench: Bench) -> list[Row]:
    """fio with fixed buffers: at its fastest settings, and with the blocks and depth we use."""
    fio_alternatives = (
        ("at its fastest", bench.fio_best_cpu),
        ("with our blocks", bench.fio_like_ours_cpu),
    )
    return [
        Row(
            f"CPU time, {kind}, page-locked 1 GiB / fio {name}",
            "ms/GB",
            Target(1.1, at_least=False),
            partial(bench.ferry.large, bench.file(kind), kind, GIB, CPU_PASSES),
            partial(other, kind),
            cpu,
        )
        for kind in ("read", "write")
        for name, other in fio_alternatives
    ]


def engine_rows(bench: Bench) -> list[Row]:
    return [
        Row(
            f"{engine} {kind}, page-locked 1 GiB / io_uring",
            "GB/s",
            Target(target, at_least=True),
            partial(bench.pinned, kind, GIB, "--engine", engine),
            partial(bench.pinned, kind, GIB, "--engine", "io_uring"),
            speed,
        )
        for engine, target in (("libaio", 0.9), ("threads", 0.8))
        for kind in ("read", "write")
    ]


def take_pair(row: Row, ours_first: bool) -> float:
    """Adds a pair; returns how many cores others used meanwhile."""
    bystanders = machine.Bystanders()
    if ours_first:
        ours = row.ours()
        other = row.other()
    else:
        other = row.other()
        ours = row.ours()
    row.pairs.append((ours, other))
    return bystanders.cores()


def table(rows: list[Row]) -> list[list[str]]:
    lines = []
    for row in rows:
        result, values = row.figure(), row.values()
        lines.append(
            [
                row.name,
                f"{median(v[0] for v in values):.4g}",
                f"{median(v[1] for v in values):.4g}",
                row.unit,
                f"{result.ratio:.3f}",
                f"{result.low:.3f} to {result.high:.3f}",
                str(row.target or ""),
                result.verdict,
            ]
        )
    return lines


HEAD = ["what / against what", "ours", "other", "unit", "ratio", "95 % interval", "target", ""]
NUMBERS = (1, 2, 4, 5, 6)


def summary(rows: list[Row]) -> str:
    verdicts = [row.figure().verdict for row in rows]
    count = {word: verdicts.count(word) for word in ("holds", "misses", "unclear")}
    pairs = sum(len(row.pairs) for row in rows)
    disturbed = sum(row.disturbed for row in rows)
    return (
        f"{count['holds']} targets hold, {count['misses']} are missed, {count['unclear']} are "
        f"unclear; {pairs} pairs, {disturbed} of them on a busy machine"
    )


def write_results(rows: list[Row], bench: Bench, facts: dict[str, str], output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    results = {
        "machine": facts,
        "calibration": {cell: asdict(point) for cell, point in bench.calibration.items()},
        "calibration_gb_per_second": bench.calibration_speeds,
        "rows": [
            {
                "name": row.name,
                "unit": row.unit,
                "target": str(row.target or ""),
                **asdict(row.figure()),
                "pairs_disturbed": row.disturbed,
                "pairs": [[asdict(ours), asdict(other)] for ours, other in row.pairs],
            }
            for row in rows
        ],
    }
    (output / "compare.json").write_text(json.dumps(results, indent=1) + "\n")
    (output / "compare.md").write_text(page.markdown_table(HEAD, table(rows)))
    chart = page.ratio_chart(
        [
            (
                row.name,
                row.ratios(),
                row.figure().ratio,
                row.figure().low,
                row.figure().high,
                row.target.value if row.target else None,
            )
            for row in rows
        ]
    )
    points = [[cell, str(point)] for cell, point in bench.calibration.items()]
    page.write(
        output / "compare.html",
        "tensorferry against fio",
        f"{time.strftime('%Y-%m-%d %H:%M')}; {summary(rows)}.",
        [
            ("Results", page.table(HEAD, table(rows), NUMBERS)),
            (
                "Every pair",
                page.paragraph(
                    "Dots are pairs, thick lines the 95 % intervals of the medians, red marks the "
                    "targets: right of it is better for speeds, left for latencies and CPU time."
                )
                + chart,
            ),
            ("Method", page.paragraph(" ".join((__doc__ or "").split("\n\n", 1)[1].split()))),
            ("fio's best settings", page.table(["what", "settings"], points)),
            ("Machine", page.facts_list(facts)),
        ],
    )


def load_calibration(path: Path) -> dict[str, FioPoint]:
    stored = json.loads(path.read_text())["calibration"]
    return {cell: FioPoint(**point) for cell, point in stored.items()}


def arguments() -> argparse.Namespace:
    quick = os.environ.get("QUICK", "") not in ("", "0")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        default=quick,
        help="fewer pairs, sizes and settings of fio: a first look within 5 minutes; also QUICK=1",
    )
    parser.add_argument("--pairs", type=int, help="pairs per row (20; 4 with --quick)")
    parser.add_argument("--rows", default="", help="only rows whose name matches this expression")
    parser.add_argument("--list", action="store_true", help="list the rows and end")
    parser.add_argument(
        "--directory",
        type=Path,
        default=ROOT / "build",
        help="where the scratch files go: the drive that is measured",
    )
    parser.add_argument("--output", type=Path, default=REPORTS)
    parser.add_argument("--program", type=Path, default=PROGRAM, help="ferry_job")
    parser.add_argument(
        "--calibration", type=Path, help="a compare.json whose settings of fio are taken over"
    )
    return parser.parse_args()


def measure(rows: list[Row], bench: Bench, pairs: int, progress: Progress) -> None:
    """A pair that others disturbed is taken again (a reason that knows no outcome), but not more
    than a quarter of all: some machines are never quiet."""
    progress("preparing files")
    bench.prepare()
    for index, row in enumerate(rows, 1):
        # Calibrates fio where the row needs it, and shows early that the job works.
        progress.step(f"rehearsal {index} of {len(rows)}: {row.name}")
        row.other()
    retakes_left = len(rows) * pairs // 4
    for number in range(pairs):
        progress.step(f"pair {number + 1} of {pairs}")
        for index, row in enumerate(rows, 1):
            progress(f"pair {number + 1} of {pairs}, row {index} of {len(rows)}: {row.name}")
            ours_first = number % 2 == 0
            busy_cores = take_pair(row, ours_first)
            if busy_cores > BYSTANDER_CORES_MAX and retakes_left > 0:
                retakes_left -= 1
                row.pairs.pop()
                busy_cores = take_pair(row, ours_first)
            row.disturbed += busy_cores > BYSTANDER_CORES_MAX


def main() -> int:
    options = arguments()
    # A killed run reports what it has and removes its scratch files, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    interrupted = False
    progress = Progress()
    options.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="compare-", dir=options.directory) as folder:
        grid = QUICK_GRID if options.quick else FULL_GRID
        bench = Bench(Path(folder), options.program, grid, progress)
        sizes = [GIB] if options.quick else [256 * MIB, GIB]
        rows = [*large_rows(bench, sizes), *call_rows(bench), *cpu_rows(bench), *engine_rows(bench)]
        if not options.quick:  # building DeepSpeed's op alone takes five minutes
            rows += [*torch_rows(bench), *offload_rows(bench)]
        rows = [row for row in rows if re.search(options.rows, row.name)]
        if options.list or not rows:
            print("\n".join(row.name for row in rows) or f"no row matches {options.rows}")
            return 0 if rows else 2
        if options.calibration:
            bench.calibration = load_calibration(options.calibration)
        facts = machine.facts(Path(folder))
        try:
            pairs = options.pairs or (4 if options.quick else 20)
            measure(rows, bench, pairs, progress)
        except JobFailed as error:
            progress.end()
            print(f"a job failed: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            interrupted = True
            rows = [row for row in rows if row.pairs]
        finally:
            for end in bench.at_end:
                end()
        progress.end()
        if not rows:
            return 130
    print(page.text_table(HEAD, table(rows), NUMBERS))
    print(summary(rows))
    write_results(rows, bench, facts, options.output)
    print(f"report: {options.output / 'compare.html'}, compare.md and compare.json beside it")
    return 130 if interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
