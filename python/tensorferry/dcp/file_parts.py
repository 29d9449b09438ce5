"""Stretches of files and their memory, cut into windows of which a few are under way at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from .._core import File
from .._saving.windows import WINDOW_BYTES

_PARTS_MAX = 4096  # in a window
_PAGE_BYTES = 4096


class FilePart(NamedTuple):
    """A stretch of a file, which is not empty, and its memory."""

    file: File
    offset: int
    memory: Any  # a tensor of bytes
    owner: Any  # what is told when it is read or written


def windows(parts: Iterable[FilePart]) -> Iterator[list[FilePart]]:
    """Cuts parts into windows. Takes each as late as it can."""
    window: list[FilePart] = []
    room = WINDOW_BYTES
    for file, offset, memory, owner in parts:
        at = 0
        while at < len(memory):
            stop = len(memory)
            if stop - at > room:
                # The next part begins on a page, so that direct I/O needs no odd ends.
                stop = at + room
                stop = max(at, stop - (offset + stop) % _PAGE_BYTES)
            if stop > at:
                window.append(FilePart(file, offset + at, memory[at:stop], owner))
                room -= stop - at
                at = stop
            if at < len(memory) or len(window) == _PARTS_MAX:
                yield window
                window, room = [], WINDOW_BYTES
    if window:
        yield window
