"""Where the values of a weight are while they are not in memory: on the drive, in one of two kinds
of places. A swap space stores weights that may change; files of a checkpoint have those that
nobody changes (file_values.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch

from .._core import Operation, SwapSpace
from .layout import CUT, check_dense, page_up
from .reading import NeverBegun, Reading

# On the drive a parameter is cut into tensors of this many elements, so that an optimizer can step
# one after the other.
CHUNK = 512 * CUT


def cuts_of(numel: int) -> list[tuple[int, int]]:
    """Returns the elements at which a parameter is cut."""
    return [(at, min(at + CHUNK, numel)) for at in range(0, numel, CHUNK)]


class Values(Protocol):
    """The values of one weight on the drive."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    slot_bytes: int  # of memory that they take, whole pages
    lead: int  # bytes of that memory before the first value

    def get(self, slot: torch.Tensor, begin: int, end: int) -> Iterable[Reading]:
        """Starts to read the elements `begin` to `end`, whole cuts, into bytes of whole pages."""

    def put(self, slot: torch.Tensor, begin: int, end: int) -> Iterator[Operation]:
        """Starts to write the elements `begin` to `end`, whole cuts, from bytes of whole pages."""

    def check_writable(self) -> None:
        """Raises RuntimeError, with the name of the weight, if nobody may change it."""

    def watch(self, param: torch.nn.Parameter) -> None:
        """Makes the backward pass raise where it has a gradient for a weight that cannot change."""

    def view(self) -> torch.Tensor:
        """Returns the values, mapped from the drive."""


class SwappedValues:
    """The values of a weight in a swap space."""

    def __init__(self, param: torch.Tensor, key: str, space: SwapSpace) -> None:
        """The space stores them under `key`."""
        check_dense(param)
        self.dtype = param.dtype
        self.size = param.size()
        self.stride = param.stride()
        self.lead = 0
        self.key = key
        self.space = space
        self._numel = param.numel()
        self._nbytes = self._numel * self.dtype.itemsize
        self.slot_bytes = page_up(self._nbytes)
        self._cuts = cuts_of(self._numel)
        self._puts: dict[str, Operation | NeverBegun] = {}  # key -> the last write of that tensor

    def check_writable(self) -> None:
        pass

    def watch(self, param: torch.nn.Parameter) -> None:
        pass

    def get(self, slot: torch.Tensor, begin: int, end: int) -> Iterator[Reading]:
        for key, at, nbytes in self._pieces(begin, end):
            operation = self.space.get(key, slot[at : at + nbytes])
            yield Reading(self.size, operation, self._puts.get(key))

    def put(self, slot: torch.Tensor, begin: int, end: int) -> Iterator[Operation]:
        for key, at, nbytes in self._pieces(begin, end):
            try:
                operation = self._puts[key] = self.space.put(key, slot[at : at + nbytes])
            except BaseException as error:
                self._puts[key] = NeverBegun(error)
                raise
            yield operation

    def _pieces(self, begin: int, end: int) -> Iterator[tuple[str, int, int]]:
        """Yields (key, first byte, bytes) of the tensors on the drive that hold these elements."""
        size = self.dtype.itemsize
        for first, last in self._cuts:
            if first < begin or last > end:
                continue
            nbytes = page_up((last - first) * size)
            yield f"{self.key}/{first}", (first - begin) * size, nbytes

    def stored_keys(self) -> list[str]:
        """The keys of the tensors that hold its values, in their order."""
        return [key for key, _, _ in self._pieces(0, self._numel)]

    def settle(self) -> None:
        """Waits for its last writes, and raises the failure of one."""
        for operation in self._puts.values():
            operation.wait()

    def note_replaced(self) -> None:
        """Says that the space has got other tensors under its keys."""
        self._puts = {}

    def view(self) -> torch.Tensor:
        self.settle()
        pieces = self._pieces(0, self._numel)
        parts = [(key, 0, min(nbytes, self._nbytes - at)) for key, at, nbytes in pieces]
        if not parts:
            return torch.empty(self.size, dtype=self.dtype)
        elements = torch.frombuffer(self.space.view(parts), dtype=self.dtype)
        return elements.as_strided(self.size, self.stride)
