"""Paired measurements: ratios, their median and interval, and whether a target holds."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from statistics import median


def interval(values: list[float], confidence: float = 0.95) -> tuple[float, float]:
    """The 95 % interval of the median, from order statistics. It assumes nothing about the noise;
    with fewer than six values it is their range."""
    ordered = sorted(values)
    count = len(ordered)
    cut = 0  # values to leave out on each side
    # The median lies below the value at `cut` with the chance of at most `cut` heads in `count`
    # tosses, and above its mirror image with the same.
    outside = 2 * (1 + count) / 2**count
    while outside <= 1 - confidence:
        cut += 1
        outside += 2 * comb(count, cut + 1) / 2**count
    return ordered[cut], ordered[count - 1 - cut]


@dataclass(frozen=True)
class Target:
    """A ratio of `value` or more with `at_least`, or of `value` or less."""

    value: float
    at_least: bool

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.value:g}"

    def verdict(self, low: float, high: float) -> str:
        """A target holds if the interval reaches it and the other end is within 5 % of it."""
        near, far = (high, low) if self.at_least else (low, high)
        sign = 1 if self.at_least else -1
        if sign * (near - self.value) < 0:
            return "misses"
        limit = self.value * (0.95 if self.at_least else 1.05)
        return "holds" if sign * (far - limit) >= 0 else "unclear"


@dataclass(frozen=True)
class Figure:
    """The median, interval and verdict of the pairs of one row."""

    ratio: float
    low: float
    high: float
    # With a target: holds, misses or unclear. Without: ahead, even (the interval contains 1) or
    # behind. Empty with too few pairs.
    verdict: str


# With fewer pairs the interval is only their range.
PAIRS_TO_JUDGE = 6
# Pairs of a row with a target.
PAIRS = 20


def standing(low: float, high: float, more_is_better: bool) -> str:
    if low <= 1 <= high:
        return "even"
    return "ahead" if (low > 1) == more_is_better else "behind"


def figure(ratios: list[float], target: Target | None, more_is_better: bool = True) -> Figure:
    low, high = interval(ratios)
    verdict = ""
    if len(ratios) >= PAIRS_TO_JUDGE:
        verdict = target.verdict(low, high) if target else standing(low, high, more_is_better)
    return Figure(median(ratios), low, high, verdict)
