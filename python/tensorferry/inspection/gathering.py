"""Puts together tensors whose bytes do not follow each other in files: columns, transposed ones."""

from __future__ import annotations

import math
import mmap
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .dtypes import bits_of
from .tensors import StoredBox, Tensor, row_major
from .windows import Source

if TYPE_CHECKING:
    from typing import Any

_ELEMENTS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}


def source_of(tensor: Tensor) -> Source:
    """How the bytes of a tensor are read, in the order of its elements."""
    if tensor.fill is not None:
        return Source(tensor, tensor.bytes, None, tensor.fill)
    stretches = tensor.stretches()
    if stretches is not None:
        return Source(tensor, tensor.bytes, stretches)
    gatherer = _Gatherer(tensor)
    return Source(tensor, tensor.bytes, None, gatherer.fill)


class _Box(NamedTuple):
    starts: list[int]
    sizes: list[int]


def _boxes(shape: Sequence[int], begin: int, end: int) -> Iterator[_Box]:
    """Boxes that have the elements from `begin` to `end`, in their order."""
    if begin >= end:
        return
    if not shape:
        yield _Box([], [])
        return
    inner = math.prod(shape[1:])
    first, first_at = divmod(begin, inner)
    last, last_at = divmod(end, inner)
    if first == last:
        for box in _boxes(shape[1:], first_at, last_at):
            yield _Box([first, *box.starts], [1, *box.sizes])
        return
    if first_at:
        for box in _boxes(shape[1:], first_at, inner):
            yield _Box([first, *box.starts], [1, *box.sizes])
        first += 1
    if first < last:
        yield _Box([first] + [0] * (len(shape) - 1), [last - first, *shape[1:]])
    for box in _boxes(shape[1:], 0, last_at):
        yield _Box([last, *box.starts], [1, *box.sizes])


class _Gatherer:
    """Copies elements out of files that are mapped; torch steps over what is between them."""

    def __init__(self, tensor: Tensor) -> None:
        import torch

        self._torch = torch
        self._tensor = tensor
        self._item_bytes = bits_of(tensor.dtype) // 8
        self._dtype = getattr(torch, _ELEMENTS[self._item_bytes])

    def fill(self, begin: int, memory: memoryview) -> None:
        """Fills the memory with the bytes of the tensor from `begin` on."""
        first = begin // self._item_bytes
        count = len(memory) // self._item_bytes
        target = self._torch.frombuffer(memory, dtype=self._dtype)
        at = 0
        with _Maps() as maps:
            for box in _boxes(self._tensor.shape, first, first + count):
                elements = math.prod(box.sizes)
                part = target[at : at + elements].view(box.sizes)
                for stored in self._tensor.boxes:
                    self._copy(stored, box, part, maps)
                at += elements

    def _copy(self, stored: StoredBox, box: _Box, target: Any, maps: _Maps) -> None:
        """Copies the elements that a stored box has of another."""
        inside = [
            (max(a, c), min(a + n, c + m))
            for a, n, c, m in zip(box.starts, box.sizes, stored.starts, stored.sizes)
        ]
        if any(begin >= end for begin, end in inside):
            return
        sizes = [end - begin for begin, end in inside]
        skipped = sum(
            (begin - start) * stride
            for (begin, _), start, stride in zip(inside, stored.starts, stored.strides)
        )
        span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, stored.strides))
        offset = stored.offset + skipped * self._item_bytes
        elements = tensor_over(maps.get(stored.path), self._dtype, offset, span)
        strides = row_major(box.sizes)
        first = sum(
            (begin - start) * stride
            for (begin, _), start, stride in zip(inside, box.starts, strides)
        )
        to = target.as_strided(sizes, strides, target.storage_offset() + first)
        to.copy_(elements.as_strided(sizes, stored.strides))


def tensor_over(memory: mmap.mmap, dtype: Any, offset: int, count: int) -> Any:
    """A tensor over memory that may be read-only. torch warns of that; nobody writes to this."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(memory, dtype=dtype, offset=offset, count=count)


class _Maps:
    """Files in memory, as long as one window takes: the pages do not add up."""

    def __init__(self) -> None:
        self._maps: dict[str, mmap.mmap] = {}

    def __enter__(self) -> _Maps:
        return self

    def __exit__(self, *args: object) -> None:
        self._maps.clear()  # tensors over them go with the last reference

    def get(self, path: str) -> mmap.mmap:
        if path not in self._maps:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._maps[path] = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
            finally:
                os.close(descriptor)
        return self._maps[path]
