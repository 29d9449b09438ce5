"""Reads tensors before a program asks for them, if it asks in the order of the file."""

from __future__ import annotations

import contextlib
import threading

TYPE_CHECKING = False  # as in typing, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, NamedTuple

    from .._core import Operation

    Start = Callable[[int, int], tuple[list[Any], Operation]]

    class Window(NamedTuple):
        """Tensors that follow each other, and the operation that reads them."""

        first: int
        end: int
        memories: dict[int, Any]  # by index, of those that nobody has taken
        operation: Operation

else:
    from collections import namedtuple

    Window = namedtuple("Window", "first end memories operation")

# A window is long enough to keep a drive busy, and there are three at most: the one that is used,
# the one ahead, and the one before, for threads that overtake each other.
_WINDOW_BYTES = 16 << 20
_WINDOWS_MAX = 3
# So many calls in order begin it.
_CALLS_MIN = 3


class ReadAhead:
    """The tensors that a program will ask for next, of a list of sizes in bytes.

    Any thread may call it. It does not know the file, which lives as long as its users alone.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._windows: list[Window] = []
        self._next = 0
        self._calls = 0  # in order
        self._lock = threading.Lock()

    def take(self, index: int, start: Start) -> Any | None:
        """Returns the memory with the bytes of a tensor; None if the caller must read them.

        `start(first, end)` begins to read tensors and returns (memory of each, operation).
        """
        try:
            with self._lock:
                window = self._window_of(index, start)
                if window is None:
                    return None
                memory = window.memories.pop(index)
            window.operation.wait()
        except OSError:  # it may be of another tensor: the caller reads this one, and finds out
            self.stop()
            return None
        return memory

    def stop(self) -> None:
        """Forgets what was read ahead, and begins anew with the next calls in order."""
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        self._calls = 0
        for window in self._windows:
            with contextlib.suppress(OSError):  # a forked child cannot
                window.operation.cancel()
        self._windows.clear()

    def _window_of(self, index: int, start: Start) -> Window | None:
        known = self._holding(index)
        if known is None and index != self._next:
            self._forget()
        self._next = index + 1
        self._calls += 1
        if self._calls < _CALLS_MIN:
            return None
        if known is None:
            self._open(index, start)
            known = self._holding(index)
        if known is not None and known is self._windows[-1]:
            self._open(known.end, start)
        return known

    def _holding(self, index: int) -> Window | None:
        return next((window for window in self._windows if index in window.memories), None)

    def _open(self, first: int, start: Start) -> None:
        """Begins to read a window, unless its first tensor is longer than a window: a drive is busy
        enough with such a tensor alone."""
        end, total = first, 0
        while end < len(self._sizes) and total + self._sizes[end] <= _WINDOW_BYTES:
            total += self._sizes[end]
            end += 1
        if not total:
            return
        memories, operation = start(first, end)
        window = Window(first, end, dict(zip(range(first, end), memories)), operation)
        self._windows = [one for one in self._windows if one.memories][1 - _WINDOWS_MAX :]
        self._windows.append(window)
