"""`tensorferry checkpoint compare`: which tensors differ, and by how much."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from .dtypes import PAIRED, bits_of, torch_dtype
from .gathering import source_of
from .opening import open_checkpoint
from .tensors import Checkpoint, Tensor
from .text import Bar, plural, shown, size_text, table
from .windows import windows

_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


class Difference(NamedTuple):
    """Two tensors of one name that are not the same, bit by bit."""

    name: str
    what: str  # "only before", "only after", "dtype", "shape" or "values"
    before: str | None  # dtype and shape
    after: str | None
    elements: int | None = None  # whose bits differ
    of: int | None = None
    largest: float | None = None  # absolute difference; None if a NaN is among them
    at: list[int] | None = None  # where that is
    nan: int = 0  # elements that are NaN on one side, or are other NaNs


def compare(before: str, after: str, as_json: bool) -> tuple[int, Any]:
    """Returns the exit status, and what to print: a text, or an object for JSON."""
    left, right = open_checkpoint(before), open_checkpoint(after)
    found = list(_differences(left, right))
    if as_json:
        return int(bool(found)), _described(left, right, found)
    return int(bool(found)), _text(left, right, found)


def _differences(left: Checkpoint, right: Checkpoint) -> Iterator[Difference]:
    theirs = {tensor.name: tensor for tensor in right.tensors}
    pairs: list[tuple[Tensor, Tensor]] = []
    for tensor in left.tensors:
        other = theirs.pop(tensor.name, None)
        if other is None:
            yield Difference(tensor.name, "only before", _kind(tensor), None)
        elif (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
            what = "shape" if tensor.dtype == other.dtype else "dtype"
            yield Difference(tensor.name, what, _kind(tensor), _kind(other))
        elif tensor.bytes:
            pairs.append((tensor, other))
    for tensor in theirs.values():
        yield Difference(tensor.name, "only after", None, _kind(tensor))
    yield from _compared(pairs)


def _compared(pairs: list[tuple[Tensor, Tensor]]) -> Iterator[Difference]:
    """Reads both sides in the same windows."""
    ours = windows(source_of(pair[0]) for pair in pairs)
    theirs = windows(source_of(pair[1]) for pair in pairs)
    total = sum(pair[0].bytes for pair in pairs)
    values: _Values | None = None
    with Bar("Comparing", 2 * total) as bar:
        for mine, other in zip(ours, theirs):
            # A bytearray compares memory as memcmp does; a memoryview goes element by element.
            if bytearray(mine.memory) != other.memory:
                values = values or _Values(mine.owner)
                values.add(mine.begin, mine.memory, other.memory)
            bar.add(2 * len(mine.memory))
            if mine.last and values is not None:
                yield values.difference()
                values = None


class _Values:
    """Adds up how two tensors differ."""

    def __init__(self, tensor: Tensor) -> None:
        import torch

        self._torch = torch
        self._tensor = tensor
        self._dtype = None if tensor.dtype == PAIRED else torch_dtype(tensor.dtype)
        self._elements = 0
        self._nan = 0
        self._largest = -1.0
        self._at = 0

    def add(self, begin: int, mine: memoryview, other: memoryview) -> None:
        torch = self._torch
        if self._dtype is None:  # torch cannot compute with it: count bytes
            left, right = (torch.frombuffer(side, dtype=torch.uint8) for side in (mine, other))
            self._elements += int((left != right).sum()) * 8 // bits_of(self._tensor.dtype)
            return
        # Copies: a window may begin where no element may.
        left, right = (
            torch.frombuffer(side, dtype=torch.uint8).clone().view(self._dtype)
            for side in (mine, other)
        )
        places = _places(torch, left, right)
        self._elements += len(places)
        wide = torch.complex128 if self._dtype.is_complex else torch.float64
        distances = (left[places].to(wide) - right[places].to(wide)).abs()
        numbers = distances.isnan().logical_not()
        self._nan += int(numbers.logical_not().sum())
        distances, places = distances[numbers], places[numbers]
        if not len(places):
            return
        most = int(distances.argmax())
        if float(distances[most]) > self._largest:
            self._largest = float(distances[most])
            first = begin * 8 // bits_of(self._tensor.dtype)
            self._at = first + int(places[most])

    def difference(self) -> Difference:
        tensor = self._tensor
        known = self._largest >= 0
        return Difference(
            tensor.name,
            "values",
            _kind(tensor),
            _kind(tensor),
            self._elements,
            tensor.elements,
            self._largest if known else None,
            _position(self._at, tensor.shape) if known else None,
            self._nan,
        )


def _places(torch: Any, left: Any, right: Any) -> Any:
    """Where bits differ: a NaN equals itself, and 0 does not equal -0."""
    integers = getattr(torch, _INTEGERS[min(left.itemsize, 8)])
    count = len(left)
    different = left.view(torch.uint8).view(integers) != right.view(torch.uint8).view(integers)
    return different.view(count, -1).any(1).nonzero().flatten()


def _position(index: int, shape: tuple[int, ...]) -> list[int]:
    position: list[int] = []
    for size in reversed(shape):
        index, at = divmod(index, size)
        position.insert(0, at)
    return position


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {' × '.join(map(str, tensor.shape)) or 'scalar'}"


def _described(left: Checkpoint, right: Checkpoint, found: list[Difference]) -> dict[str, Any]:
    different = [one._asdict() for one in found]
    for one in different:
        if one["largest"] is not None and not math.isfinite(one["largest"]):
            one["largest"] = "infinity"  # JSON has no such number
    return {
        "before": left.path,
        "after": right.path,
        "equal": not found,
        "tensors": len({tensor.name for tensor in (*left.tensors, *right.tensors)}),
        "different": different,
        "objects_not_compared": sorted({one.name for one in (*left.objects, *right.objects)}),
    }


def _text(left: Checkpoint, right: Checkpoint, found: list[Difference]) -> str:
    names = {tensor.name for tensor in (*left.tensors, *right.tensors)}
    lines = []
    if found:
        titles = ("tensor", "differs in", "elements", "largest difference", "at")
        lines += [table(titles, [_row(one) for one in found], "elements"), ""]
        equal = len(names) - len(found)
        lines.append(
            f"{len(found)} of {plural(len(names), 'tensor')} differ; "
            f"{equal} {'is' if equal == 1 else 'are'} equal, bit by bit."
        )
    else:
        total = size_text(left.bytes)
        lines.append(f"Equal, bit by bit: {plural(len(names), 'tensor')}, {total}.")
    objects = sorted({one.name for one in (*left.objects, *right.objects)})
    if objects:
        lines.append(f"Objects that are not tensors were not compared: {', '.join(objects)}.")
    return "\n".join(lines)


def _row(one: Difference) -> tuple[str, ...]:
    name = shown(one.name)
    if one.what != "values":
        sides = one.before or one.after or ""
        if one.before and one.after:
            sides = f"{one.before} -> {one.after}"
        return name, f"{one.what}: {sides}", "", "", ""
    largest = "" if one.largest is None else f"{one.largest:.6g}"
    if one.nan:
        largest += (", " if largest else "") + f"{one.nan} with NaN"
    at = "" if one.at is None else str(one.at)
    return name, f"values of {one.before}", f"{one.elements} of {one.of}", largest, at
