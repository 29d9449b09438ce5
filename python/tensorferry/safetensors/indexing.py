"""What `get_slice(name)[index]` asks for: which rows and columns to read, and what to do with them.

Pure functions; nothing here reads. There are two sets of rules, as in safetensors: those of torch,
for tensors of torch, and a smaller one of its own for everything else.
"""

from __future__ import annotations

import operator

from .errors import PACKED_MISFIT, SafetensorError

TYPE_CHECKING = False  # as in typing, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, TypeAlias

    Range: TypeAlias = tuple[int, int]
    # What to read of each dimension, and the index of what was asked for in that.
    Box: TypeAlias = tuple[list[Range], tuple[Any, ...]]


def box_by_torch(index: Any, shape: Sequence[int]) -> Box | None:
    """Returns the box of an index by torch's rules, or None if torch itself has to look at it.

    None says nothing about whether the index is right.
    """
    items = index if isinstance(index, tuple) else (index,)
    taken = sum(item is not None and item is not Ellipsis for item in items)
    ellipses = sum(item is Ellipsis for item in items)
    if taken > len(shape) or ellipses > 1:
        return None
    ranges: list[Range] = []
    rest: list[Any] = []
    for item in items:
        if item is None:
            rest.append(None)
            continue
        if item is Ellipsis:
            for _ in range(len(shape) - taken):
                ranges.append((0, shape[len(ranges)]))
                rest.append(slice(None))
            continue
        found = _take(item, shape[len(ranges)])
        if found is None:
            return None
        ranges.append(found[0])
        rest.append(found[1])
    ranges.extend((0, size) for size in shape[len(ranges) :])
    return ranges, tuple(rest)


def _take(item: Any, size: int) -> tuple[Range, Any] | None:
    """Returns the range that one item of an index needs, and its index in that."""
    if type(item) is int:
        place = item + size if item < 0 else item
        return ((place, place + 1), 0) if 0 <= place < size else None
    if type(item) is slice:
        if not all(part is None or type(part) is int for part in (item.start, item.stop)):
            return None
        if item.step is not None and (type(item.step) is not int or item.step <= 0):
            return None
        taken = range(*item.indices(size))
        if not taken:
            return (0, 0), slice(None)
        return (taken[0], taken[-1] + 1), slice(None, None, taken.step)
    if type(item) is list:
        if not all(type(place) is int and -size <= place < size for place in item):
            return None
        places = [place + size if place < 0 else place for place in item]
        low, high = (min(places), max(places) + 1) if places else (0, 0)
        return (low, high), [place - low for place in places]
    return None


def box_by_safetensors(index: Any, shape: Sequence[int], bits: int) -> Box:
    """Returns the box of an index by safetensors' own rules. Raises what safetensors raises.

    `bits` are those of an element.
    """
    slices = _parse(index, shape)
    try:
        if len(slices) > len(shape):
            raise IndexError("more slicing indexes than dimensions in tensor")
        for dimension in reversed(range(len(slices))):
            _check(slices[dimension], dimension, shape[dimension])
        _check_bits(slices, shape, bits)
    except IndexError as error:
        shown = ", ".join(map(_shown, slices))
        raise SafetensorError(
            f"Error during slicing [{shown}] with shape {list(shape)}: {error}"
        ) from None
    ranges: list[Range] = []
    rest: list[Any] = []
    for item, size in zip(slices, shape):
        if isinstance(item, int):
            ranges.append((item, item + 1))
            rest.append(0)
        else:
            taken = range(*_ends(item, size), item.step)
            ranges.append((taken[0], taken[-1] + 1) if taken else (0, 0))
            rest.append(slice(None, None, item.step))
    ranges.extend((0, size) for size in shape[len(ranges) :])
    return ranges, tuple(rest)


def _parse(index: Any, shape: Sequence[int]) -> list[Any]:
    """Returns an int or a slice for each dimension that the index names."""
    if isinstance(index, list):
        if index:
            raise SafetensorError("Non empty lists are not implemented")
        return [slice(0, 0, 1)]
    items = index if isinstance(index, tuple) else (index,)
    ellipses = sum(item is Ellipsis for item in items)
    if ellipses > 1:
        raise SafetensorError("Only one ellipsis (...) is allowed in slice index")
    found: list[Any] = []
    for item in items:
        if item is Ellipsis:
            missing = max(len(shape) - (len(items) - 1), 0)
            found.extend(slice(None, None, 1) for _ in range(missing))
        elif isinstance(item, slice):
            found.append(slice(_bound(item.start), _bound(item.stop), _step(item.step)))
        else:
            found.append(_place(item, len(found), shape))
    return found


def _bound(value: Any) -> int | None:
    if value is None:
        return None
    bound = operator.index(value)
    if bound < 0:
        raise OverflowError("can't convert negative int to unsigned")
    return bound


def _step(value: Any) -> int:
    step = 1 if value is None else operator.index(value)
    if step <= 0:
        raise SafetensorError(f"Slice step must be a positive integer, got {step}")
    return step


def _place(item: Any, dimension: int, shape: Sequence[int]) -> int:
    try:
        place = operator.index(item)
    except TypeError:
        place = 1 << 31
    if not -(1 << 31) <= place < 1 << 31:
        raise SafetensorError(
            f"Unsupported slice index at position {dimension}: expected slice, int, or ellipsis"
        )
    size = shape[dimension] if dimension < len(shape) else 0
    if place < -size:
        raise SafetensorError(f"Invalid index {place} for dimension {dimension} of size {size}")
    return place + size if place < 0 else place


def _ends(item: Any, size: int) -> Range:
    if isinstance(item, int):
        return item, item + 1
    return item.start or 0, size if item.stop is None else item.stop


def _check(item: Any, dimension: int, size: int) -> None:
    begin, end = _ends(item, size)
    if begin >= size or end > size:
        asked = begin if begin >= size else max(end - 1, 0)
        raise IndexError(
            f"index {asked} out of bounds for tensor dimension #{dimension} of size {size}"
        )


def _check_bits(slices: list[Any], shape: Sequence[int], bits: int) -> None:
    """Refuses parts of packed tensors that begin or end inside a byte."""
    for dimension in reversed(range(len(shape))):
        size = shape[dimension]
        item = slices[dimension] if dimension < len(slices) else slice(None, None, 1)
        begin, end = _ends(item, size)
        step = 1 if isinstance(item, int) else item.step
        if (begin, end, step) != (0, size, 1):
            ends = (begin, end) if step == 1 else (begin, begin + 1, begin + step)
            if any(place * bits % 8 for place in ends):
                raise IndexError(PACKED_MISFIT)
            return
        bits *= size


def _shown(item: Any) -> str:
    if isinstance(item, int):
        return str(item)
    begin = "" if item.start is None else item.start
    end = "" if item.stop is None else item.stop
    return f"{begin}:{end}" + (f":{item.step}" if item.step != 1 else "")
