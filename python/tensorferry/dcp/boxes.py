"""Which bytes of a stored tensor a box of it has, and where they go in a target tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .stored_tensor import StoredTensor, contiguous

# Stretches this long are read one by one, whatever is between them.
_LONG_BYTES = 16 << 10
# Shorter ones as well, down to this length, if less than half of the bytes are needed.
_SHORT_BYTES = 4 << 10


class Run(NamedTuple):
    """Bytes that follow each other in the storage and in the target."""

    source: int
    target: int
    bytes: int


class Box(NamedTuple):
    """A part of a stored tensor: `lengths` elements from `offsets` on, in each dimension."""

    stored: StoredTensor
    offsets: Sequence[int]
    lengths: Sequence[int]

    @property
    def item_bytes(self) -> int:
        return int(self.stored.dtype.itemsize)

    @property
    def bytes(self) -> int:
        return math.prod(self.lengths) * self.item_bytes

    @property
    def whole(self) -> bool:
        """Whether its bytes are all those of the storage, each once."""
        return self.bytes == self.stored.bytes == self.span() and self.first() == 0

    @property
    def in_file_order(self) -> bool:
        """Whether elements that come later are later in the storage."""
        return self.stored.stride == contiguous(self.stored.size)

    @property
    def one_run(self) -> bool:
        """Whether its bytes follow each other in the storage."""
        return self.in_file_order and self.span() == self.bytes

    def first(self) -> int:
        """The first byte, counted from the start of the storage. The box is not empty."""
        steps = zip(self.offsets, self.stored.stride)
        element = self.stored.storage_offset + sum(offset * stride for offset, stride in steps)
        return element * self.item_bytes

    def span(self) -> int:
        """How many bytes lie from its first to its last byte."""
        steps = zip(self.lengths, self.stored.stride)
        elements = 1 + sum((length - 1) * stride for length, stride in steps)
        return elements * self.item_bytes

    def runs(self, target_stride: Sequence[int]) -> Iterator[Run] | None:
        """Returns the stretches to read straight into a target; None if they are too short.

        Reading all from first() on, span() bytes, is better then.
        """
        dims, run_bytes = self._outer(target_stride)
        dense = run_bytes < _SHORT_BYTES or 2 * self.bytes > self.span()
        if dims and run_bytes < _LONG_BYTES and dense:
            return None
        return self._runs(target_stride, dims, run_bytes)

    def all_runs(self, target_stride: Sequence[int]) -> Iterator[Run]:
        """Returns the stretches, however short they are."""
        return self._runs(target_stride, *self._outer(target_stride))

    def _outer(self, target_stride: Sequence[int]) -> tuple[int, int]:
        """How many dimensions are outside of a stretch, and how many bytes a stretch has."""
        stride, lengths = self.stored.stride, self.lengths
        block, dims = 1, len(lengths)
        while dims and (
            lengths[dims - 1] == 1 or stride[dims - 1] == target_stride[dims - 1] == block
        ):
            block *= lengths[dims - 1]
            dims -= 1
        return dims, block * self.item_bytes

    def _runs(self, target_stride: Sequence[int], dims: int, run_bytes: int) -> Iterator[Run]:
        first = self.first()
        if not dims:
            yield Run(first, 0, run_bytes)
            return
        for index in itertools.product(*map(range, self.lengths[:dims])):
            source = sum(at * stride for at, stride in zip(index, self.stored.stride))
            target = sum(at * stride for at, stride in zip(index, target_stride))
            yield Run(first + source * self.item_bytes, target * self.item_bytes, run_bytes)
