"""A file passes in windows, from front to back. A few of them are under way at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from .._core import Operation

# What suits files of which checksums are computed: the drive does not wait for them.
WINDOW_BYTES = 16 << 20
WINDOWS = 6  # under way at a time


class Part(NamedTuple):
    """A stretch of the file and its memory."""

    offset: int
    memory: Any  # a memoryview, or a tensor of bytes
    storage: int | None  # which storage it is; None for the bytes between storages


class Piece(NamedTuple):
    """What a window has of a part."""

    offset: int
    memory: Any
    storage: int | None
    last: bool  # the part ends here


def cut(parts: Iterable[Part], window_bytes: int = WINDOW_BYTES) -> Iterator[list[Piece]]:
    """Cuts parts, in the order of the file, into windows. Takes each part as late as it can.

    Windows begin at multiples of `window_bytes` in the file: so direct I/O needs no odd ends.
    """
    window: list[Piece] = []
    for part in parts:
        at = 0
        while at < len(part.memory):
            room = window_bytes - (part.offset + at) % window_bytes
            stop = min(at + room, len(part.memory))
            last = stop == len(part.memory)
            window.append(Piece(part.offset + at, part.memory[at:stop], part.storage, last))
            at = stop
            if (part.offset + at) % window_bytes == 0:
                yield window
                window = []
    if window:
        yield window


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Returns a tensor of all bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


Payload = TypeVar("Payload")


class UnderWay(Generic[Payload]):
    """Operations, oldest first, each with what belongs to it. Leaving `with` cancels them."""

    def __init__(self) -> None:
        self._operations: deque[tuple[Operation, Payload]] = deque()

    def __len__(self) -> int:
        return len(self._operations)

    def add(self, operation: Operation, payload: Payload) -> None:
        self._operations.append((operation, payload))

    def finish_oldest(self) -> Payload:
        """Waits for the oldest operation and returns what belongs to it."""
        self._operations[0][0].wait()
        return self._operations.popleft()[1]

    def operations(self) -> list[Operation]:
        """Those that have not been waited for. Any thread may call this."""
        return [operation for operation, _ in list(self._operations)]

    def cancel(self) -> None:
        """Cancels all. Any thread may call this."""
        for operation in self.operations():
            operation.cancel()

    def __enter__(self) -> UnderWay[Payload]:
        return self

    def __exit__(self, *args: object) -> None:
        self.cancel()
        while self._operations:
            try:
                self._operations[0][0].wait()
            except OSError:
                pass  # cancelled, or failed: the caller has the first failure already
            self._operations.popleft()
