"""A line of figures: two sides measured in turns. For scripts that run without compare.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

from benchmarks.rows.pairs import Target, figure

HEAD = f"{'what / against what':64} {'ours':>9} {'other':>9}     ratio  95 % interval  target"


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def row(
    name: str,
    ours: Callable[[], float],
    other: Callable[[], float],
    pairs: int,
    target: Target | None,
    unit: str = "s",
) -> None:
    """Prints how many times as fast we are, as the median of the paired ratios. Both sides return
    seconds."""
    times = []
    for i in range(pairs + 1):
        first, second = (ours, other) if i % 2 else (other, ours)
        took = {first: first(), second: second()}
        if i > 0:  # the first pair warms up
            times.append((took[ours], took[other]))
    told = figure([theirs / mine for mine, theirs in times], target)
    scale = 1e6 if unit == "us" else 1
    mine, theirs = (scale * median(column) for column in zip(*times, strict=True))
    print(
        f"{name:64} {mine:9.4g} {theirs:9.4g} {unit}  {told.ratio:6.3f}  "
        f"{told.low:.3f} to {told.high:.3f}  {target or ''}  {told.verdict}",
        flush=True,
    )
