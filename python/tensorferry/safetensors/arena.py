"""Fresh memory for bytes of a file, placed so that drives read straight into it."""

from __future__ import annotations

import contextlib
import mmap
import weakref

# The memory of a smaller tensor is not worth a call of its own.
_GIVE_BACK_BYTES = 1 << 20
# Nor are huge pages for less.
_HUGE_BYTES = 4 << 20


class Arena:
    """Memory for `length` bytes that lie at `offset` in a file.

    Its address and the offset leave the same remainder for a page, as direct reads need it. It
    lives as long as a part of it. Nobody has touched its pages: they are made, huge ones where the
    system has them, while the drive reads.
    """

    def __init__(self, offset: int, length: int) -> None:
        self._begin = offset - offset % mmap.PAGESIZE
        self._map = mmap.mmap(
            -1,
            max(offset + length - self._begin, 1),
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
        )
        if length >= _HUGE_BYTES:
            with contextlib.suppress(OSError, AttributeError):  # a system without huge pages
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(self._map)

    def part(self, offset: int, length: int) -> memoryview:
        """Returns the memory of these bytes of the file."""
        begin = offset - self._begin
        return self._view[begin : begin + length]

    def lent_part(self, offset: int, length: int) -> memoryview:
        """Returns the same, and gives its pages back to the system as soon as this object has gone.

        The user of the memory must hold this very object, not another view of the same bytes.
        """
        part = self.part(offset, length)
        if length >= _GIVE_BACK_BYTES:
            begin = offset - self._begin
            first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (begin + length) // mmap.PAGESIZE * mmap.PAGESIZE
            gone = weakref.finalize(part, self._map.madvise, mmap.MADV_DONTNEED, first, end - first)
            gone.atexit = False
        return part
