"""What a checkpoint has, whatever its format: tensors, and where their bytes are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .dtypes import bits_of


class Unusable(Exception):
    """A checkpoint or an argument that the command cannot use. The text says what to do."""


class Stretch(NamedTuple):
    """Bytes that follow each other in a file."""

    path: str
    offset: int
    bytes: int


class StoredBox(NamedTuple):
    """A box of a tensor, and where its elements are in a file."""

    path: str
    offset: int  # of its first element
    starts: tuple[int, ...]  # of the box in the tensor
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # in elements


class Tensor(NamedTuple):
    name: str
    dtype: str  # of dtypes.py
    shape: tuple[int, ...]
    boxes: tuple[StoredBox, ...]
    checksum: str | None  # of all its bytes: "crc32:..." or "xxh3:..."
    # Fills memory with its bytes from the given one on, if it is in no file.
    fill: Callable[[int, memoryview], None] | None = None

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return (self.elements * bits_of(self.dtype) + 7) // 8

    def stretches(self) -> list[Stretch] | None:
        """Where its bytes are, in their order; None if its elements have to be gathered."""
        if not self.elements:
            return []
        found, row = [], 0
        row_bits = math.prod(self.shape[1:]) * bits_of(self.dtype)
        for box in sorted(self.boxes, key=lambda box: box.starts):
            if box.starts[:1] != (row,)[: len(self.shape)] or any(box.starts[1:]):
                return None
            if box.sizes[1:] != self.shape[1:] or not dense(box):
                return None
            rows = box.sizes[0] if box.sizes else 1
            found.append(Stretch(box.path, box.offset, (rows * row_bits + 7) // 8))
            row += rows
        return found


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of elements that follow each other."""
    strides = [1] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def dense(box: StoredBox) -> bool:
    """Whether the elements of a box follow each other in the file."""
    usual = row_major(box.sizes)
    return all(
        size == 1 or stride == wanted for size, stride, wanted in zip(box.sizes, box.strides, usual)
    )


def unpaired(box: StoredBox) -> StoredBox:
    """Returns a box of pairs, which torch counts as one element each, by its single elements.

    It is no scalar. If pairs of a row do not follow each other, elements have no place of their
    own: then the box is not dense.
    """
    *outer, last = box.strides
    return box._replace(
        starts=(*box.starts[:-1], 2 * box.starts[-1]),
        sizes=(*box.sizes[:-1], 2 * box.sizes[-1]),
        strides=(*(2 * step for step in outer), 1 if last == 1 or box.sizes[-1] == 1 else 0),
    )


class StoredObject(NamedTuple):
    """Something in a checkpoint that is not a tensor."""

    name: str
    kind: str  # "int", "a sparse tensor"


class Check(NamedTuple):
    """Bytes of a file, and the checksums that they should have."""

    name: str  # of the tensor, or of what it is else
    place: Stretch
    crc32: int | None = None
    xxh3: tuple[int, ...] = ()  # of each 16 MiB

    @property
    def has_checksum(self) -> bool:
        return self.crc32 is not None or bool(self.xxh3)


@dataclass
class Checkpoint:
    path: str
    format: str  # "safetensors", "torch" or "dcp"
    tensors: list[Tensor]
    # What verifying reads. Raises OSError for damage that shows before a byte of a tensor is read.
    checks: Callable[[], Iterator[Check]]
    objects: list[StoredObject] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.bytes for tensor in self.tensors)

    @property
    def files(self) -> list[str]:
        """The files that have tensors."""
        return sorted({box.path for tensor in self.tensors for box in tensor.boxes})
