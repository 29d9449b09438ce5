"""Tells how far a save or a load has come."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable

TYPE_CHECKING = False  # as in typing, which takes long to import
if TYPE_CHECKING:
    from ._core import Operation

# True prints a bar; a function gets the bytes that are done and the bytes in all.
Progress = bool | Callable[[int, int], object] | None

_INTERVAL_SECONDS = 0.1
_BAR_CELLS = 30


def report_of(progress: Progress, what: str) -> Callable[[int, int], object] | None:
    """Returns the function that gets (done, total), or None."""
    if progress is None or progress is False:
        return None
    if progress is True:
        return _Bar(what)
    if callable(progress):
        return progress
    raise TypeError("progress must be True, False, None or a function of (done, total)")


def wait_for(operation: Operation, total: int, report: Callable[[int, int], object] | None) -> None:
    """Waits until a read ends. Whatever is raised meanwhile, Ctrl-C too, ends the read first."""
    try:
        if report is None:
            operation.wait()
            return
        while not operation.done():
            report(min(operation.bytes, total), total)
            with contextlib.suppress(TimeoutError):
                operation.wait(timeout=_INTERVAL_SECONDS)
        operation.wait()
        report(total, total)
    except BaseException:
        end(operation)
        raise


def end(operation: Operation) -> None:
    """Cancels a read, and returns when nobody touches its memory any more."""
    operation.cancel()
    while not operation.done():
        time.sleep(0.001)


class ProgressReport:
    """Passes on at most ten reports a second, and the last one."""

    def __init__(self, progress: Progress, what: str, total: int) -> None:
        self._tell = report_of(progress, what)
        self._total = total
        self._told = time.monotonic()

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


class _Bar:
    """Prints a bar to stderr."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._begin = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
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
