"""The rows and curves of compare.py about classes and rates: urgent reads beside a write in the
background. The reads come one at a time, 5 ms after the last one has ended, so that they leave the
drive to the write; what the write loses, it loses to being held back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.jobs.job import MIB, Sample, run, size_text
from benchmarks.rows.bench import Bench
from benchmarks.rows.curves import Curve
from benchmarks.rows.pairs import Target
from benchmarks.rows.row import Row, call_p99, speed

SECONDS = 4
RATE = 200 * 10**6
# What the write in the background may move, in percent of its speed alone; 100: no rate.
SHARES = (0, 25, 50, 75, 100)
SMALL = (4 << 10, 64 << 10)


class ClassJobs:
    """The classes_job program, beside ferry_job."""

    def __init__(self, bench: Bench) -> None:
        self.program = bench.ferry.program.parent / "classes_job"
        self.folder: Path = bench.read_file.parent
        self.seconds = SECONDS // (2 if bench.quick else 1)
        self.alone: float = 0.0  # bytes per second of the write, once it is known

    def run(self, *words: object) -> Sample:
        folder = ("--directory", self.folder, "--seconds", self.seconds)
        report = run([str(word) for word in (self.program, *folder, *words)])
        return Sample(
            gb_per_second=report["written_per_second"] / 1e9,
            call_us_median=report["read_p50"] * 1e6,
            call_us_p99=report["read_p99"] * 1e6,
        )

    def reads(self, size: int, *words: object) -> Sample:
        return self.run("--read-bytes", size, *words)

    def p99_at_share(self, size: int, percent: int) -> float:
        """The p99 of urgent reads beside a write that has this share of its speed alone."""
        if not self.alone:
            self.alone = self.run("--write").gb_per_second * 1e9
        words: list[object] = ["--classes"]
        if percent:
            words += ["--write"]
        if 0 < percent < 100:
            words += ["--rate", int(self.alone * percent / 100)]
        return self.reads(size, *words).call_us_p99


def class_rows(bench: Bench) -> list[Row]:
    jobs = ClassJobs(bench)
    text = size_text(MIB)
    idle = partial(jobs.reads, MIB, "--classes")
    beside = partial(jobs.reads, MIB, "--write", "--classes")
    limited = partial(jobs.run, "--write", "--rate", RATE)
    rate = partial(Sample, gb_per_second=RATE / 1e9)
    return [
        Row(
            f"p99, urgent reads of {text} beside a background write / idle drive",
            "us",
            Target(3, at_least=False),
            beside,
            idle,
            call_p99,
        ),
        Row(
            f"p99, reads of {text} beside a write, no classes / idle drive",
            "us",
            None,
            partial(jobs.reads, MIB, "--write"),
            idle,
            call_p99,
        ),
        Row(
            f"background write beside urgent reads of {text} / alone",
            "GB/s",
            Target(0.7, at_least=True),
            beside,
            partial(jobs.run, "--write"),
            speed,
        ),
        Row(
            "write at a rate of 200 MB/s / the rate",
            "GB/s",
            Target(0.95, at_least=True),
            limited,
            rate,
            speed,
        ),
        Row(
            "rate of 200 MB/s / a write at it",
            "GB/s",
            Target(0.95, at_least=True),
            rate,
            limited,
            speed,
        ),
    ]


def class_curves(bench: Bench) -> list[Curve]:
    jobs = ClassJobs(bench)
    lines: dict[str, Callable[[int], float]] = {
        f"reads of {size_text(size)}": partial(jobs.p99_at_share, size) for size in SMALL
    }
    return [
        Curve(
            "p99 of urgent reads by what a background write may move",
            "% of its speed alone",
            "us",
            SHARES,
            lines,
        )
    ]
