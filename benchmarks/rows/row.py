"""A row of compare.py: one ratio, its pairs of jobs, and which numbers of a pair it compares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.jobs.job import JobFailed, Sample
from benchmarks.rows.pairs import Figure, Target, figure

OURS = "our side: "  # begins the reason if our own job failed
NO_TIME = "no time for it"  # the reason if --quick ended before the first pair

# More is better in these units, less in all others.
MORE_IS_BETTER = ("GB/s",)


@dataclass
class Row:
    """One ratio: its two sides and the pairs so far."""

    name: str
    unit: str
    target: Target | None
    ours: Callable[[], Sample]
    other: Callable[[], Sample]
    # The two numbers of a pair that make the ratio.
    value: Callable[[Sample, Sample], tuple[float, float]]
    pairs: list[tuple[Sample, Sample]] = field(default_factory=list)
    peer: str = ""  # a name of peers.py that the row needs
    # Kernel threads work for it, or processes of a process of ours: they look like bystanders.
    kernel_works: bool = False
    disturbed: int = 0  # pairs that count although other processes were busy

    def take(self, ours_first: bool) -> None:
        """Adds a pair."""
        if ours_first:
            ours = self.take_ours()
            other = self.other()
        else:
            other = self.other()
            ours = self.take_ours()
        self.pairs.append((ours, other))

    def take_ours(self) -> Sample:
        try:
            return self.ours()
        except JobFailed as error:
            raise JobFailed(f"{OURS}{error}") from error

    def values(self) -> list[tuple[float, float]]:
        return [self.value(ours, other) for ours, other in self.pairs]

    def ratios(self) -> list[float]:
        return [ours / other for ours, other in self.values()]

    def more_is_better(self) -> bool:
        return self.unit in MORE_IS_BETTER

    def figure(self) -> Figure:
        return figure(self.ratios(), self.target, self.more_is_better())


def speed(ours: Sample, other: Sample) -> tuple[float, float]:
    return ours.gb_per_second, other.gb_per_second


def cpu(ours: Sample, other: Sample) -> tuple[float, float]:
    return ours.cpu_seconds_per_gb * 1000, other.cpu_seconds_per_gb * 1000


def call(ours: Sample, other: Sample) -> tuple[float, float]:
    return ours.call_us_median, other.call_us_median


def call_p99(ours: Sample, other: Sample) -> tuple[float, float]:
    return ours.call_us_p99, other.call_us_p99


def seconds(ours: Sample, other: Sample) -> tuple[float, float]:
    return ours.repetition_seconds, other.repetition_seconds


def milliseconds(ours: Sample, other: Sample) -> tuple[float, float]:
    return ours.repetition_seconds * 1000, other.repetition_seconds * 1000


def memory(ours: Sample, other: Sample) -> tuple[float, float]:
    return ours.memory_bytes / 2**20, other.memory_bytes / 2**20


def read_bytes(ours: Sample, _other: Sample) -> tuple[float, float]:
    """What the drive read for us, and what we asked for."""
    return ours.read_bytes / 2**20, ours.asked_bytes / 2**20


def descriptors(ours: Sample, other: Sample) -> tuple[float, float]:
    return ours.descriptors, other.descriptors


def switches(ours: Sample, other: Sample) -> tuple[float, float]:
    return ours.switches, other.switches


def call_less_open(ours: Sample, other: Sample) -> tuple[float, float]:
    return ours.call_us_median - ours.open_close_us, other.call_us_median
