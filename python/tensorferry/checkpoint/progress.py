"""Tells how far a save or a load has come."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

# True prints a bar; a function gets the bytes that are done and the bytes in all.
Progress = bool | Callable[[int, int], object] | None

_INTERVAL_SECONDS = 0.1
_BAR_CELLS = 30


class ProgressReport:
    """Passes on at most ten reports a second, and the last one."""

    def __init__(self, progress: Progress, what: str, total: int) -> None:
        self._tell: Callable[[int, int], object] | None = None
        if progress is True:
            self._tell = self._bar
        elif callable(progress):
            self._tell = progress
        elif progress:
            raise TypeError("progress must be True, False, None or a function of (done, total)")
        self._what = what
        self._total = total
        self._begin = time.monotonic()
        self._told = self._begin

    def update(self, done: int) -> None:
        if self._tell is None:
            return
        now = time.monotonic()
        if done >= self._total or now - self._told >= _INTERVAL_SECONDS:
            self._told = now
            tell = self._tell
            if done >= self._total:
                self._tell = None  # that was the last report
            tell(done, self._total)

    def _bar(self, done: int, total: int) -> None:
        part = done / total if total else 1.0
        seconds = max(time.monotonic() - self._begin, 1e-9)
        cells = int(part * _BAR_CELLS)
        print(
            f"\r{self._what} [{'#' * cells}{' ' * (_BAR_CELLS - cells)}] {part:4.0%} "
            f"{done / 1e9:.2f} of {total / 1e9:.2f} GB, {done / seconds / 1e9:.2f} GB/s",
            end="\n" if done >= total else "",
            file=sys.stderr,
            flush=True,
        )
