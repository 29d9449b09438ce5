"""What a snapshot keeps of a model: weights on the drive stay where they are, those in memory and
the buffers are copied, and those in files of a checkpoint are named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .._core import SwapSpace
from .._memory.file_values import FileValues
from .._memory.layout import flat_as, local, page_up
from .._memory.snapshot_part import Differs, SavedPart, SnapshotPart, StoredTensor, compare
from .._memory.stored_parameter import StoredParameter, stored_parameter_of
from .._memory.values import SwappedValues
from .offloaded import whereabouts_in

# Reads a weight of a snapshot that this run has in memory.
ReadWeight = Callable[[str], Tensor]


def part_of(model: torch.nn.Module) -> SnapshotPart:
    """What a snapshot keeps of a model."""
    for weights in whereabouts_in(model):
        weights.settle()
    part = SnapshotPart({"tensors": {}, "stored": {}, "in_files": {}}, {"tensors": {}, "extra": {}})
    spaces: dict[int, tuple[SwapSpace, list[str]]] = {}
    numbers: dict[int, int] = {}
    for name, tensor in _tensors(model):
        part.layout["tensors"][name] = _described(tensor)
        stored = stored_parameter_of(tensor)
        if stored is None:
            part.memory["tensors"][name] = local(tensor)
        elif isinstance(stored.values, SwappedValues):
            values = stored.values
            values.settle()
            number = numbers.setdefault(id(values.space), len(numbers))
            spaces.setdefault(number, (values.space, []))[1].extend(values.stored_keys())
            part.layout["stored"][name] = {
                "space": number,
                "key": values.key,
                "stride": list(values.stride),
            }
        elif isinstance(stored.values, FileValues):
            part.layout["in_files"][name] = stored.values.describe()
    part.spaces = [spaces[number] for number in sorted(spaces)]
    part.memory["extra"] = {name: module.get_extra_state() for name, module in _with_extra(model)}
    return part


@torch.no_grad()
def resume(model: torch.nn.Module, saved: SavedPart, read: ReadWeight) -> None:
    """Takes over what part_of() has kept, in the place of all weights and buffers."""
    tensors = dict(_tensors(model))
    own = {name: _described(tensor) for name, tensor in tensors.items()}
    compare("tensor", saved.layout["tensors"], own)
    _check_files(tensors, saved)
    for weights in whereabouts_in(model):
        weights.forget_values()
    _attach(tensors, saved)
    on_drive = saved.layout["stored"].keys() | saved.layout["in_files"].keys()
    for name, tensor in tensors.items():
        stored = stored_parameter_of(tensor)
        if name in on_drive and stored is not None:
            continue
        values = read(name) if name in on_drive else saved.memory["tensors"][name]
        if stored is None:
            local(tensor).copy_(values)
        else:
            _write(stored, values)
    for name, module in _with_extra(model):
        module.set_extra_state(saved.memory["extra"][name])


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters, and the buffers that a state_dict() has."""
    yield from model.named_parameters()
    seen: set[Tensor] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            short = name.rpartition(".")[2]
            if short not in module._non_persistent_buffers_set and buffer not in seen:
                seen.add(buffer)
                yield name, buffer


def _with_extra(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    plain = torch.nn.Module.get_extra_state
    for name, module in model.named_modules():
        if type(module).get_extra_state is not plain:
            yield name, module


def _described(tensor: Tensor) -> dict[str, Any]:
    stored = stored_parameter_of(tensor)
    size = local(tensor).size() if stored is None else stored.size
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "size": list(size)}


def _check_files(tensors: dict[str, Tensor], saved: SavedPart) -> None:
    """Refuses a run whose frozen weights lie in other files."""
    for name, place in saved.layout["in_files"].items():
        stored = stored_parameter_of(tensors[name])
        if stored is None or not isinstance(stored.values, FileValues):
            raise Differs(
                f"{name} was read from {place[0][0]} and was not part of the snapshot: call "
                "offload.checkpoint() with these files first"
            )
        compare(f"the place of tensor {name}", place, stored.values.describe())


def _attach(tensors: dict[str, Tensor], saved: SavedPart) -> None:
    """Gives the swap spaces of this run the tensors of the snapshot, under the keys of this run."""
    given: list[dict[str, StoredTensor]] = [
        {tensor[0]: tensor for tensor in space.tensors} for space in saved.spaces
    ]
    wanted: dict[tuple[int, int], tuple[SwapSpace, list[StoredTensor]]] = {}
    attached = []
    for name, place in saved.layout["stored"].items():
        stored = stored_parameter_of(tensors[name])
        if stored is None:
            continue
        values = stored.values
        if not isinstance(values, SwappedValues):
            raise Differs(f"{name} is part of the snapshot, and this run reads it from a file")
        compare("strides of tensor", place["stride"], list(values.stride), name)
        space = values.space
        renamed = wanted.setdefault((place["space"], id(space)), (space, []))[1]
        for key in values.stored_keys():
            older = place["key"] + key.removeprefix(values.key)
            _, *where = given[place["space"]][older]
            renamed.append((key, *where))  # type: ignore[arg-type]
        attached.append((stored, values))
    for (number, _), (space, renamed) in wanted.items():
        space.attach(saved.spaces[number].files, renamed)
    for stored, values in attached:
        values.note_replaced()
        stored.note_replaced()


def _write(stored: StoredParameter, values: Tensor) -> None:
    """Writes the values of a weight that the snapshot has in memory."""
    elements = flat_as(values.to(stored.device), stored.stride)
    memory = torch.empty(page_up(stored.nbytes), dtype=torch.uint8, device=stored.device)
    memory[: stored.nbytes].view(stored.dtype).copy_(elements)
    for operation in stored.write(memory):
        operation.wait()
