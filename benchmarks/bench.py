#!/usr/bin/env python3
"""Measures tensorferry on this machine in under a minute: `make bench`.

Speed by size, direction and memory; latency of synchronous calls; many small tensors in one call;
the engines; and the speed by block size and depth that the defaults are chosen from. Absolute
figures of one run: for ratios with intervals see `make compare`.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import machine
import page
from jobs import GIB, MIB, PROGRAM, REPORTS, ROOT, Ferry, JobFailed, Sample, remove, size_text
from progress import Progress

SECONDS_MAX = 55
SAMPLE_BYTES = GIB  # about as much is moved per figure
TENSORS = 10_000
MEMORY = {"pinned": "page-locked", "ordinary": "ordinary memory", "fresh": "fresh memory"}


@dataclass
class Section:
    """A table of the report, and perhaps a chart of one of its columns."""

    title: str
    head: list[str]
    chart_column: int | None = None
    rows: list[list[str]] = field(default_factory=list)

    def html(self) -> str:
        made = page.table(self.head, self.rows, range(1, len(self.head)))
        if self.chart_column is None or not self.rows:
            return made
        unit = self.head[self.chart_column]
        bars = [
            (row[0], float(row[self.chart_column]), f"{row[self.chart_column]} {unit}")
            for row in self.rows
        ]
        return page.bar_chart(bars) + made

    def text(self) -> str:
        made = page.text_table(self.head, self.rows, range(1, len(self.head)))
        return f"{self.title}\n{'-' * len(self.title)}\n{made}\n"


class Bench:
    """Runs the jobs, in the order of their worth, until the time is up."""

    def __init__(self, folder: Path, program: Path, progress: Progress) -> None:
        self.ferry = Ferry(program)
        self.file = folder / "tensor.bin"
        self.progress = progress
        self.deadline = time.monotonic() + SECONDS_MAX
        self.skipped = 0
        self.engine = ""

    def measure(
        self,
        section: Section,
        name: str,
        job: Callable[[], Sample],
        cells: Callable[[Sample], list[str]],
    ) -> None:
        if time.monotonic() > self.deadline:
            self.skipped += 1
            return
        self.progress(f"{section.title}: {name}")
        sample = job()
        self.engine = self.engine or sample.engine
        section.rows.append([name, *cells(sample)])

    def large(self, direction: str, size: int, *options: str) -> Sample:
        repeat = min(max(1, SAMPLE_BYTES // size), 64)
        return self.ferry.large(self.file, direction, size, repeat, *options)


def speed_cells(sample: Sample) -> list[str]:
    return [f"{sample.gb_per_second:.2f}", f"{sample.cpu_seconds_per_gb * 1000:.1f}"]


def call_cells(sample: Sample) -> list[str]:
    return [f"{us:.1f}" for us in (sample.call_us_median, sample.call_us_mean, sample.call_us_p99)]


def many_cells(sample: Sample) -> list[str]:
    return [*speed_cells(sample), f"{sample.repetition_seconds / TENSORS * 1e6:.2f}"]


def speeds(bench: Bench) -> Section:
    section = Section("Speed of one operation", ["operation", "GB/s", "CPU ms/GB"], 1)
    for size in (GIB, 256 * MIB, 16 * MIB, MIB):
        for direction in ("read", "write"):
            for memory in ("pinned", "ordinary"):
                bench.measure(
                    section,
                    f"{direction} {size_text(size)}, {MEMORY[memory]}",
                    partial(bench.large, direction, size, "--memory", memory),
                    speed_cells,
                )
    bench.measure(
        section,
        f"read 256 MiB, {MEMORY['fresh']}",
        partial(bench.large, "read", 256 * MIB, "--memory", "fresh"),
        speed_cells,
    )

    def new_files() -> Sample:
        sample = bench.ferry.new_files(bench.file.with_suffix(".new"), 256 * MIB, 4)
        remove([bench.file.with_suffix(".new")])
        return sample

    bench.measure(section, "write 256 MiB, page-locked, a new file", new_files, speed_cells)
    return section


def calls(bench: Bench) -> Section:
    section = Section(
        "Synchronous reads at random offsets", ["call", "median us", "mean us", "99 % us"], 1
    )
    for mode, name in (("sync", "on an open File"), ("path", "by path")):
        for size, count in ((4 << 10, 4000), (64 << 10, 3000), (MIB, 1000)):
            bench.measure(
                section,
                f"read_now {size_text(size)}, {name}",
                partial(bench.ferry.calls, bench.file, mode, size, GIB, count, "pinned", 1),
                call_cells,
            )
    return section


def many(bench: Bench) -> Section:
    section = Section(
        "10,000 tensors of 4 to 64 KiB in one call", ["call", "GB/s", "CPU ms/GB", "us per tensor"]
    )
    for direction in ("read", "write"):
        for memory in ("pinned", "ordinary"):
            bench.measure(
                section,
                f"{direction}_many, {MEMORY[memory]}",
                partial(
                    bench.ferry.run,
                    bench.file,
                    "--mode",
                    "many",
                    "--direction",
                    direction,
                    "--memory",
                    memory,
                    "--count",
                    str(TENSORS),
                    "--repeat",
                    "3",
                ),
                many_cells,
            )
    return section


def engines(bench: Bench) -> Section:
    section = Section("Engines, page-locked 256 MiB", ["engine", "GB/s", "CPU ms/GB"], 1)
    for engine in ("io_uring", "libaio", "threads"):
        for direction in ("read", "write"):
            bench.measure(
                section,
                f"{engine} {direction}",
                partial(bench.large, direction, 256 * MIB, "--engine", engine),
                speed_cells,
            )
    return section


def settings(bench: Bench) -> Section:
    section = Section(
        "Block size and depth, page-locked 256 MiB", ["setting", "GB/s", "CPU ms/GB"], 1
    )
    choices: list[tuple[str, tuple[str, ...]]] = [("the default", ())]
    choices += [
        (f"blocks of {kib} KiB", ("--block-bytes", f"{kib}K"))
        for kib in (128, 256, 512, 1024, 2048, 4096)
    ]
    choices += [(f"depth {depth}", ("--queue-depth", str(depth))) for depth in (4, 8, 16, 64)]
    for direction in ("read", "write"):
        for name, options in choices:
            bench.measure(
                section,
                f"{direction}, {name}",
                partial(bench.large, direction, 256 * MIB, *options),
                speed_cells,
            )
    return section


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--directory",
        type=Path,
        default=ROOT / "build",
        help="where the scratch files go: the drive that is measured",
    )
    parser.add_argument("--output", type=Path, default=REPORTS)
    parser.add_argument("--program", type=Path, default=PROGRAM, help="ferry_job")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    # A killed run removes its scratch files, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    progress = Progress()
    options.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.directory) as folder:
        bench = Bench(Path(folder), options.program, progress)
        facts = machine.facts(Path(folder))
        try:
            sections = [part(bench) for part in (speeds, calls, many, engines, settings)]
        except JobFailed as error:
            progress.end()
            print(f"a job failed: {error}", file=sys.stderr)
            return 1
    progress.end()
    sections = [section for section in sections if section.rows]
    print("\n".join(section.text() for section in sections))
    lead = f"{time.strftime('%Y-%m-%d %H:%M')}; engine {bench.engine}"
    if bench.skipped:
        lead += f"; {bench.skipped} figures left out, because the time was up"
    report = options.output / "bench.html"
    page.write(
        report,
        "tensorferry on this machine",
        lead,
        [
            *((section.title, section.html()) for section in sections),
            ("Method", page.paragraph(" ".join((__doc__ or "").split("\n\n", 1)[1].split()))),
            ("Machine", page.facts_list(facts)),
        ],
    )
    print(f"{lead}\nreport: {report}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
