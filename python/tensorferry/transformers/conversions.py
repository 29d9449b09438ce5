"""What transformers makes of the tensors of a checkpoint: other names, stacks of experts, and
whatever else its conversions compute."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from .._memory.file_values import Stored, cut, merged
from ..offload.in_place import Source
from ..offload.stored_files import StoredFiles

# Parts of a weight that are shorter than this are not worth a read each, if they are many.
_PART_BYTES = 16 << 10
_PARTS = 64


class NotScattered(Exception):
    """A tensor that is more than bytes of files one after the other."""


class Group(NamedTuple):
    """Tensors of which one conversion makes one or several weights."""

    converter: Any
    tensors: dict[str, list[str]]  # pattern -> names in the files


def converted_sources(files: StoredFiles, model: Any, mapping: Sequence[Any]) -> dict[str, Source]:
    """Returns where each tensor of a model comes from, by its name there."""
    sources: dict[str, Source] = {}
    groups: dict[str, Group] = {}
    for stored, name, converter, pattern in _named(files, model, mapping):
        if converter is None:
            if name in sources:
                raise ValueError(f"{stored} and {sources[name].names[0]} both become {name}")
            sources[name] = Source((stored,), functools.partial(files.stored, stored))
        else:
            group = groups.setdefault(name, Group(converter, {}))
            group.tensors.setdefault(pattern, []).append(stored)
    for name, group in groups.items():
        sources.update(_sources_of(files, model, name, group))
    return sources


def _named(
    files: StoredFiles, model: Any, mapping: Sequence[Any]
) -> Iterator[tuple[str, str, Any, str]]:
    """Yields (name in the files, name in the model, conversion or None, its pattern)."""
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    for stored in sorted(files.tensors, key=dot_natural_key):
        name, pattern = rename_source_key(stored, renamings, converters, prefix, state)
        if name not in state and stored in state:  # as transformers does it
            name, pattern = rename_source_key(stored, [], [], prefix, state)
        yield stored, name, by_pattern.get(pattern), pattern


def _sources_of(files: StoredFiles, model: Any, name: str, group: Group) -> dict[str, Source]:
    names = tuple(stored for pattern in group.tensors.values() for stored in pattern)
    stored = {one: files.stored(one) for one in names}
    convert = functools.partial(_converted, model, name, group)
    try:
        made = convert(lambda one: Lying(stored[one]))
        found = {target: tensor.stored for target, tensor in made.items()}
    except NotScattered:
        made = convert(lambda one: torch.empty(stored[one].size, device="meta"))
        found = {
            target: _computed(convert, stored, target, tensor) for target, tensor in made.items()
        }
    return {target: Source(names, functools.partial(_same, one)) for target, one in found.items()}


def _same(stored: Stored) -> Stored:
    return stored


def _converted(
    model: Any, name: str, group: Group, tensor_of: Callable[[str], torch.Tensor]
) -> dict[str, Any]:
    """Runs a conversion of transformers. Returns what it makes, by names in the model."""
    converter = group.converter
    found: dict[str, Any] = {
        pattern: [tensor_of(stored) for stored in names] for pattern, names in group.tensors.items()
    }
    for operation in converter.operations:
        found = operation.convert(
            found,
            source_patterns=converter.source_patterns,
            target_patterns=converter.target_patterns,
            full_layer_name=name,
            model=model,
            config=model.config,
            missing_keys=None,
        )
    name = name.replace("*.", "0.")
    pattern = next((pattern for pattern in found if pattern in name), None)
    before, _, after = name.partition(pattern) if pattern is not None else ("", "", "")
    return {
        before + target + after: tensor[0] if isinstance(tensor, list) else tensor
        for target, tensor in found.items()
    }


def _computed(
    convert: Callable[[Callable[[str], torch.Tensor]], dict[str, Any]],
    stored: dict[str, Stored],
    target: str,
    like: torch.Tensor,
) -> Stored:
    """Returns a tensor that is computed of others at each read."""
    stretches = tuple(stretch for one in stored.values() for stretch in one.stretches)
    dtype = next(iter(stored.values())).dtype
    if any(one.dtype != dtype for one in stored.values()):
        raise ValueError(f"{target} would be made of tensors of several dtypes")
    if any(one.stride != _row_major(one.size) for one in stored.values()):
        raise ValueError(f"{target} would be made of tensors that are not contiguous")
    lengths = [one.size.numel() for one in stored.values()]

    def make(read: torch.Tensor) -> torch.Tensor:
        parts = read.view(dtype).split(lengths)
        given = {name: part.view(stored[name].size) for name, part in zip(stored, parts)}
        made: torch.Tensor = convert(given.__getitem__)[target]
        return made

    return Stored(dtype, like.size(), _row_major(like.size()), stretches, make)


class Lying(torch.Tensor):
    """A tensor in files, without its values. Stacks and concatenations of such tensors are again
    bytes of files; whatever else torch is to do with one raises NotScattered."""

    stored: Stored

    @staticmethod
    def __new__(cls, stored: Stored) -> Lying:
        made: Lying = torch.Tensor._make_wrapper_subclass(
            cls, stored.size, dtype=stored.dtype, device="meta"
        )
        made.stored = stored
        if stored.make is not None or stored.stride != _row_major(stored.size):
            raise NotScattered
        return made

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.stack:
            return _stacked(*args, **(kwargs or {}))
        if function is torch.cat:
            return _joined(*args, **(kwargs or {}))
        if function in (torch.chunk, torch.Tensor.chunk):
            return _chunked(*args, **(kwargs or {}))
        if function is torch.split:
            return _split(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if name == "contiguous":
            return args[0]
        if name in ("__get__", "size", "dim", "ndimension", "stride", "numel", "__len__"):
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        raise NotScattered(name)

    @classmethod
    def __torch_dispatch__(cls, operator: Any, *_: object) -> Any:
        raise NotScattered(str(operator))


def _stacked(tensors: Sequence[Lying], dim: int = 0) -> Lying:
    dim %= tensors[0].dim() + 1

    def unsqueezed(tensor: Lying) -> Lying:
        size = torch.Size([*tensor.size()[:dim], 1, *tensor.size()[dim:]])
        return Lying(tensor.stored._replace(size=size, stride=_row_major(size)))

    return _joined([unsqueezed(tensor) for tensor in tensors], dim)


def _joined(tensors: Sequence[Lying], dim: int = 0) -> Lying:
    dim %= tensors[0].dim()
    first = tensors[0].stored
    if any(not isinstance(t, Lying) or t.stored.dtype != first.dtype for t in tensors):
        raise NotScattered
    outer = math.prod(first.size[:dim])
    lengths = [tensor.stored.nbytes // max(outer, 1) for tensor in tensors]
    if outer * len(tensors) > _PARTS and outer > 1 and min(lengths) < _PART_BYTES:
        raise NotScattered
    parts = [cut(tensor.stored.stretches, length) for tensor, length in zip(tensors, lengths)]
    stretches = merged(
        [stretch for number in range(outer) for part in parts for stretch in part[number]]
    )
    size = list(first.size)
    size[dim] = sum(tensor.size(dim) for tensor in tensors)
    whole = torch.Size(size)
    return Lying(Stored(first.dtype, whole, _row_major(whole), stretches))


def _chunked(tensor: Lying, chunks: int, dim: int = 0) -> list[Lying]:
    return _split(tensor, -(-tensor.size(dim) // chunks), dim)


def _split(tensor: Lying, sizes: int | Sequence[int], dim: int = 0) -> list[Lying]:
    dim %= tensor.dim()
    whole = tensor.stored
    if isinstance(sizes, int):
        count = whole.size[dim]
        sizes = [min(sizes, count - at) for at in range(0, count, sizes)]
    outer = math.prod(whole.size[:dim])
    unit = whole.nbytes // max(outer * whole.size[dim], 1)  # bytes of one index of the dimension
    if outer > _PARTS and unit * min(sizes) < _PART_BYTES:
        raise NotScattered
    rows = [cut(row, unit) for row in cut(whole.stretches, unit * whole.size[dim])]
    made, at = [], 0
    for length in sizes:
        parts = [part for row in rows for index in row[at : at + length] for part in index]
        size = torch.Size([*whole.size[:dim], length, *whole.size[dim + 1 :]])
        made.append(Lying(Stored(whole.dtype, size, _row_major(size), merged(parts))))
        at += length
    return made


def _row_major(size: torch.Size) -> tuple[int, ...]:
    stride: tuple[int, ...] = torch.empty(size, device="meta").stride()
    return stride
