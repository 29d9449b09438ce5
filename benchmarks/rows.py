"""A row of compare.py: one ratio, the pairs of jobs behind it, and which of their numbers count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from jobs import Sample
from pairs import Figure, Target, figure


@dataclass
class Row:
    """One ratio: what is measured, against what, and the pairs so far."""

    name: str
    unit: str
    target: Target | None
    ours: Callable[[], Sample]
    other: Callable[[], Sample]
    # The two numbers of a pair whose ratio counts.
    value: Callable[[Sample, Sample], tuple[float, float]]
    pairs: list[tuple[Sample, Sample]] = field(default_factory=list)
    disturbed: int = 0  # pairs that are in although others kept the machine busy

    def values(self) -> list[tuple[float, float]]:
        return [self.value(ours, other) for ours, other in self.pairs]

    def ratios(self) -> list[float]:
        return [ours / other for ours, other in self.values()]

    def figure(self) -> Figure:
        return figure(self.ratios(), self.target)


def speed(ours: Sample, other: Sample) -> tuple[float, float]:
    return ours.gb_per_second, other.gb_per_second


def cpu(ours: Sample, other: Sample) -> tuple[float, float]:
    return ours.cpu_seconds_per_gb * 1000, other.cpu_seconds_per_gb * 1000


def call(ours: Sample, other: Sample) -> tuple[float, float]:
    return ours.call_us_median, other.call_us_median


def seconds(ours: Sample, other: Sample) -> tuple[float, float]:
    return ours.repetition_seconds, other.repetition_seconds


def call_less_open(ours: Sample, other: Sample) -> tuple[float, float]:
    return ours.call_us_median - ours.open_close_us, other.call_us_median
