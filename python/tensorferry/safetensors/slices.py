"""Parts of tensors: which bytes an index needs, and what to make of them."""

from __future__ import annotations

import math

from .indexing import box_by_safetensors, box_by_torch
from .serialization import BITS

TYPE_CHECKING = False  # as in typing, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, NamedTuple

    from .indexing import Range
    from .opened import Info, OpenFile

    class _Selection(NamedTuple):
        info: Info
        ranges: list[Range] | None  # of its dimensions, which are read; None: all
        shape: list[int]  # of what is read
        offset: int  # in the file
        bytes: int
        finish: Callable[[Any], Any]  # makes of it what was asked for

else:
    from collections import namedtuple

    _Selection = namedtuple("_Selection", "info ranges shape offset bytes finish")

# Runs of fewer bytes cost more than the bytes between them.
_RUN_BYTES_MIN = 512


class Selection(_Selection):
    """What an index asks for of a tensor."""

    __slots__ = ()

    def read_into(self, memory: Any) -> tuple[Any, ...]:
        """Returns the read of it, for a file."""
        if self.ranges is None:
            return self.info.name, memory
        return self.info.name, memory, self.ranges


def whole_of(info: Info, shape: list[int], finish: Callable[[Any], Any]) -> Selection:
    """Returns all of a tensor, which gets this shape."""
    return Selection(info, None, shape, info.offset, info.bytes, finish)


class SafeSlice:
    """A tensor of a file before it is read. Index it to read what you need of it."""

    def __init__(self, file: OpenFile, info: Info, torch_indexes: bool) -> None:
        self._file = file
        self._info = info
        self._torch_indexes = torch_indexes

    def get_shape(self) -> list[int]:
        """Returns the shape of the whole tensor."""
        return list(self._info.shape)

    def get_dtype(self) -> str:
        """Returns the name of its dtype in files: "F32"."""
        return self._info.dtype

    def __getitem__(self, index: Any) -> Any:
        return self._file.read_selection(
            selection_of(self._file, self._info, index, self._torch_indexes)
        )


def selection_of(file: OpenFile, info: Info, index: Any, torch_indexes: bool) -> Selection:
    """Returns what to read for an index of a tensor. Raises what torch or safetensors raises."""
    shape = info.shape
    if not torch_indexes:
        ranges, rest = box_by_safetensors(index, shape, BITS[info.dtype])
    else:
        box = box_by_torch(index, shape)
        if box is None:
            # torch finds what is wrong with the index, if anything is, before we read.
            import torch

            torch.empty((), dtype=torch.uint8, device="cpu").expand(shape)[index]
            return whole_of(info, shape, lambda tensor: file.finished(tensor[index]))
        ranges, rest = box
    whole = [(0, size) for size in shape]
    # Checksums are of whole tensors.
    wider = whole if file.verify else _widened(ranges, shape, BITS[info.dtype])

    def finish(tensor: Any) -> Any:
        return _cut(file, tensor, wider, ranges, rest)

    if wider == whole:
        return whole_of(info, shape, finish)
    sizes = [end - begin for begin, end in wider]
    length = math.prod(sizes) * BITS[info.dtype] // 8
    row_bytes = math.prod(shape[1:]) * BITS[info.dtype] // 8
    first = wider[0][0] if length else 0
    return Selection(info, wider, sizes, info.offset + first * row_bytes, length, finish)


def _cut(
    file: OpenFile, tensor: Any, wider: list[Range], ranges: list[Range], rest: tuple[Any, ...]
) -> Any:
    """Returns these ranges of a tensor of wider ones, with the rest of the index applied."""
    if wider != ranges:
        tensor = tensor[tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(ranges, wider))]
    if any(item != slice(None) for item in rest):
        tensor = tensor[rest if file.by_torch else (*rest, ...)]  # no scalar of NumPy's
    if file.by_torch:
        return file.finished(tensor.contiguous())
    return tensor if tensor.flags.c_contiguous else tensor.copy()


def _widened(ranges: list[Range], shape: Sequence[int], bits: int) -> list[Range]:
    """Returns the ranges to read: whole rows where a part of each would be many short runs."""
    wider = list(ranges)
    run_bits = bits
    for dimension in reversed(range(len(shape))):
        begin, end = wider[dimension]
        run_bits *= end - begin
        if (begin, end) == (0, shape[dimension]):
            continue
        above = math.prod(end - begin for begin, end in wider[:dimension])
        if above > 1 and run_bits < 8 * _RUN_BYTES_MIN:
            run_bits = run_bits // max(end - begin, 1) * shape[dimension]
            wider[dimension] = (0, shape[dimension])
        else:
            break
    return wider
