"""Reads the bytes of tensors in windows, a few ahead, whatever the size of the tensors.

Knows nothing of formats. Small tensors share a window of memory, so that the drive gets few large
requests.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from .._core import File, Operation
from .._shared_handle import shared_handle
from .tensors import Stretch

WINDOW_BYTES = 16 << 20  # a chunk of safetensors' checksums
WINDOWS = 4  # under way at a time
_PAGE_BYTES = 4096
_ELEMENT_BYTES = 16  # of the largest element
_ROOM_BYTES = WINDOW_BYTES + (64 << 10)  # with what it takes to begin where direct I/O likes it
_FILES_MAX = 64  # open at a time


class Source(NamedTuple):
    """Bytes to read, and for whom."""

    owner: Any
    bytes: int
    stretches: list[Stretch] | None
    # Fills the memory with the bytes from the given one on, if there are no stretches.
    gather: Callable[[int, memoryview], None] | None = None


class Window(NamedTuple):
    """Bytes of a source. The memory is reused when the next window is asked for."""

    owner: Any
    begin: int  # a multiple of WINDOW_BYTES
    memory: memoryview
    last: bool


def windows(sources: Iterable[Source]) -> Iterator[Window]:
    """Yields the bytes of all sources, in their order. A source without bytes has no window."""
    files = _Files()
    free: list[memoryview] = []
    under_way: deque[_Batch] = deque()

    def finish_oldest() -> Iterator[Window]:
        yield from under_way[0].finish()
        free.append(under_way.popleft().memory)

    batch: _Batch | None = None
    try:
        for source in sources:
            for begin in range(0, source.bytes, WINDOW_BYTES):
                length = min(WINDOW_BYTES, source.bytes - begin)
                if batch is None or not batch.has_room(length):
                    if batch is not None:
                        batch.start()
                    if len(under_way) == WINDOWS:
                        yield from finish_oldest()
                    memory = free.pop() if free else memoryview(mmap.mmap(-1, _ROOM_BYTES))
                    batch = _Batch(memory, files)
                    under_way.append(batch)
                batch.add(source, begin, length)
        if batch is not None:
            batch.start()
        while under_way:
            yield from finish_oldest()
    finally:
        for one in under_way:
            one.cancel()


class _Files:
    """The files that are open: the last few."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, File] = OrderedDict()

    def get(self, path: str) -> File:
        file = self._open.get(path)
        if file is None:
            if len(self._open) == _FILES_MAX:
                self._open.popitem(last=False)  # reads that are under way keep it open
            file = self._open[path] = File(path)
        self._open.move_to_end(path)
        return file


class _Batch:
    """What is read into one stretch of memory."""

    def __init__(self, memory: memoryview, files: _Files) -> None:
        self.memory = memory
        self._files = files
        self._at = 0
        self._windows: list[Window] = []
        self._reads: list[tuple[memoryview, File, int]] = []
        self._gathers: list[tuple[Callable[[int, memoryview], None], Window]] = []
        self._operation: Operation | None = None

    def has_room(self, length: int) -> bool:
        return self._at + length + _PAGE_BYTES <= len(self.memory)

    def add(self, source: Source, begin: int, length: int) -> None:
        parts = list(_cut(source.stretches or [], begin, length))
        if parts:  # as in the file, so that direct I/O needs no copy
            self._at += (parts[0].offset - self._at) % _PAGE_BYTES
        elif source.gather is not None:
            self._at += -self._at % _ELEMENT_BYTES
        memory = self.memory[self._at : self._at + length]
        self._at += length
        window = Window(source.owner, begin, memory, begin + length == source.bytes)
        self._windows.append(window)
        if source.gather is not None:
            self._gathers.append((source.gather, window))
        at = 0
        for path, offset, count in parts:
            self._reads.append((memory[at : at + count], self._files.get(path), offset))
            at += count

    def start(self) -> None:
        if self._reads:
            self._operation = shared_handle().read_many(self._reads)

    def finish(self) -> Iterator[Window]:
        if self._operation is not None:
            self._operation.wait()
        for gather, window in self._gathers:
            gather(window.begin, window.memory)
        yield from self._windows

    def cancel(self) -> None:
        """Returns when the drive has let go of the memory."""
        if self._operation is None:
            return
        self._operation.cancel()
        try:
            self._operation.wait()
        except OSError:
            pass  # cancelled, or failed: the caller has the first failure already


def _cut(stretches: list[Stretch], begin: int, length: int) -> Iterator[Stretch]:
    """The part of stretches that follow each other from `begin` on."""
    for path, offset, count in stretches:
        if begin < count and length:
            taken = min(count - begin, length)
            yield Stretch(path, offset + begin, taken)
            begin, length = 0, length - taken
        else:
            begin -= min(begin, count)


class Stream:
    """The bytes of sources one after the other, in pieces of any size and memory of their own."""

    def __init__(self, sources: Iterable[Source]) -> None:
        self._windows = windows(sources)
        self._left = memoryview(b"")

    def take(self, count: int) -> memoryview:
        """Returns the next bytes, which belong to the caller."""
        taken = memoryview(mmap.mmap(-1, count) if count >= _PAGE_BYTES else bytearray(count))
        at = 0
        while at < count:
            if not self._left:
                self._left = next(self._windows).memory
            step = min(count - at, len(self._left))
            taken[at : at + step] = self._left[:step]
            self._left = self._left[step:]
            at += step
        return taken

    def close(self) -> None:
        """Ends the reads that are under way."""
        self._left = memoryview(b"")
        self._windows.close()  # type: ignore[attr-defined]  # a generator has it
