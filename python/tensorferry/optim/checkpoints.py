"""How states on NVMe become a state_dict of torch's, and back, one sub-group at a time."""

from __future__ import annotations

import collections
import contextlib
import copy
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .._memory.buffers import letting_go
from .._memory.layout import distributed_like, flat_as, local, page_up
from .._memory.stored_parameter import stored_parameter_of
from .cut_masters import LOW, join
from .quantized_moments import NAMES, PACKED, pack_moments, unpack_moments
from .sub_groups import UNMAPPED, Group, Shard, StateField, SubGroup, SubGroups, record_bytes

if TYPE_CHECKING:
    from .store import StateStore

StateDict = dict[str, Any]
States = dict[Tensor, dict[str, Any]]  # of whole parameters


def pack(param_groups: list[Group], sub_groups: SubGroups, store: StateStore) -> StateDict:
    """A state_dict whose states are mapped from the drive."""
    numbers: dict[Tensor, int] = {}
    groups = []
    for group in param_groups:
        packed = {name: value for name, value in group.items() if name != "params"}
        for param in group["params"]:
            numbers.setdefault(param, len(numbers))
        packed["params"] = [numbers[param] for param in group["params"]]
        groups.append(packed)
    with store.all_on_drive(sub_groups), _whole_states(sub_groups, store) as whole:
        parts = _stored_states(sub_groups, whole)
        states = {
            n: _mapped_states(param, sub_groups, parts, store) for param, n in numbers.items()
        }
    return {
        "state": {number: own for number, own in states.items() if own},
        "param_groups": groups,
    }


class _StoredState(NamedTuple):
    """Where the drive has a state of a shard."""

    shard: Shard
    shape: tuple[int, ...]
    dtype: torch.dtype
    place: tuple[str, int, int]  # (key, offset, bytes)


StoredStates = dict[Tensor, dict[str, list[_StoredState]]]  # of each parameter and state


# The keys on the drive of states that records have in another form.
Whole = dict[tuple[Shard, str], str]


@contextlib.contextmanager
def _whole_states(sub_groups: SubGroups, store: StateStore) -> Iterator[Whole]:
    """Inside, the drive has all states as torch has them: also masters of which records have only
    the lower half, and moments that they have in 8 bits."""
    keys: Whole = {}
    try:
        for group in sub_groups:
            for field in group.fields:
                if field.name in UNMAPPED:
                    _write_whole(group, field, keys, store)
        yield keys
    finally:
        for key in keys.values():
            store.space.drop(key)


@letting_go()
def _write_whole(group: SubGroup, field: StateField, keys: Whole, store: StateStore) -> None:
    shard = field.shard
    names = _names(field)
    each = page_up(4 * shard.numel)
    end = page_up(field.nbytes)
    memory = store.take(group.device, end + len(names) * each)
    store.space.get(group.key, memory[: field.nbytes], field.offset).wait()
    packed = memory[: field.nbytes].view(field.dtype)
    whole = {}
    for name in names:
        whole[name] = memory[end : end + 4 * shard.numel].view(torch.float32)
        end += each
    if field.name == LOW:
        join(whole["master"], shard.values(), packed, shard.known_cut)
    else:
        unpack_moments(packed, whole)
    for name, state in whole.items():
        keys[shard, name] = key = f"whole/{len(keys)}"
        store.space.put(key, state).wait()


def _names(field: StateField) -> tuple[str, ...]:
    """What torch calls the states that a field has."""
    return {LOW: ("master",), PACKED: NAMES}.get(field.name, (field.name,))


def _stored_states(sub_groups: SubGroups, whole: Whole) -> StoredStates:
    parts: StoredStates = collections.defaultdict(lambda: collections.defaultdict(list))
    for group in sub_groups:
        for field in group.fields:
            shard = field.shard
            for name in _names(field):
                part = _StoredState(
                    shard, field.shape, field.dtype, (group.key, field.offset, field.nbytes)
                )
                if (key := whole.get((shard, name))) is not None:
                    part = _StoredState(
                        shard, shard.shape, torch.float32, (key, 0, 4 * shard.numel)
                    )
                parts[shard.param][name].append(part)
    return parts


def _mapped_states(
    param: Tensor, sub_groups: SubGroups, parts: StoredStates, store: StateStore
) -> dict[str, Any]:
    shards = sub_groups.shards[param]
    if not shards:
        return {}
    own = {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in shards[0].small.items()
    }
    for name, pieces in parts[param].items():
        view = store.space.view([piece.place for piece in pieces])
        first = pieces[0]
        tensor = torch.frombuffer(view, dtype=first.dtype)
        if first.shard.whole:
            tensor = tensor.view(first.shape)
        else:
            tensor = tensor.as_strided(first.shard.size, first.shard.stride)
        own[name] = distributed_like(tensor, param)
    return own


def unpack(state_dict: StateDict, param_groups: list[Group], sub_groups: SubGroups) -> States:
    """The states of a state_dict by parameter. Refuses those that cannot be of these groups."""
    saved = state_dict["param_groups"]
    if len(saved) != len(param_groups):
        raise ValueError("loaded state dict has a different number of parameter groups")
    for group, other in zip(param_groups, saved):
        if len(group["params"]) != len(other["params"]):
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of "
                "optimizer's group"
            )
    numbers = itertools.chain.from_iterable(other["params"] for other in saved)
    params = itertools.chain.from_iterable(group["params"] for group in param_groups)
    by_number = dict(zip(numbers, params))
    states = {
        by_number[number]: state
        for number, state in state_dict["state"].items()
        if number in by_number
    }
    _check_shapes(states, sub_groups)
    return states


def _check_shapes(states: States, sub_groups: SubGroups) -> None:
    for param, state in states.items():
        shards = sub_groups.shards[param]
        for name, value in state.items():
            if not shards or shards[0].whole or _is_small(shards[0], name, value):
                continue
            if local(value).shape != local(param).shape:
                raise ValueError(
                    f"state '{name}' has shape {tuple(value.shape)}, its parameter "
                    f"{tuple(param.shape)}"
                )


@torch.no_grad()
@letting_go()
def import_states(states: States, sub_groups: SubGroups, store: StateStore) -> None:
    """Writes states of whole parameters to the drive, or to the memory that keeps them, one
    sub-group at a time."""
    store.kept.choose(sub_groups)
    for group in sub_groups:
        pieces = {}
        for shard in group.shards:
            if own := _piece(shard, states.get(shard.param, {})):
                pieces[shard] = own
        _write_pieces(group, pieces, store)
    store.settle()


def _write_pieces(
    group: SubGroup, pieces: dict[Shard, dict[str, Tensor]], store: StateStore
) -> None:
    # This call frees its buffer before the next one takes one: there may be only one.
    if not pieces:
        store.drop(group)
        return
    fields = group.lay_out(pieces)
    nbytes = record_bytes(fields)
    memory = store.take(torch.device("cpu"), nbytes)
    for field in fields:
        field.of(memory).copy_(pieces[field.shard][field.name])
    store.write(group, fields, memory)


def _piece(shard: Shard, state: dict[str, Any]) -> dict[str, Tensor]:
    """A shard's part of the states of its parameter. The small ones stay with the shard."""
    shard.small = {}
    own = {}
    for name, value in state.items():
        if name == "master" and not shard.master:
            continue
        if isinstance(value, Tensor):
            value = _as_stepped(shard, name, local(value))
        if _is_small(shard, name, value):
            shard.small[name] = copy.deepcopy(value)
        else:
            own[name] = value
    if shard.master and "master" not in own and state:
        own["master"] = _values_of(shard).float()
    own = dict(sorted(own.items(), key=lambda item: item[0] != "master"))  # that one first
    if shard.packs_moments and own.keys() >= set(NAMES):
        pack_moments(own)
    return own


def _values_of(shard: Shard) -> Tensor:
    home = stored_parameter_of(shard.param)
    if home is None:
        return shard.values()
    memory = torch.empty(page_up(shard.nbytes), dtype=torch.uint8)
    for operation in home.read(memory, shard.begin, shard.end):
        operation.wait()
    return shard.shaped(memory[: shard.nbytes].view(shard.param.dtype))


def _is_small(shard: Shard, name: str, value: object) -> bool:
    """Whether a state stays in memory."""
    if not isinstance(value, Tensor) or name == "step":
        return True
    return value.dim() == 0 and (shard.whole or local(shard.param).dim() > 0)


def _as_stepped(shard: Shard, name: str, value: Tensor) -> Tensor:
    """A whole state from a file as the step needs it: in the dtype that torch would give it, and
    only the part of this shard."""
    dtype = value.dtype
    device = None
    if name == "step":
        if shard.group.get("fused"):
            dtype, device = torch.float32, local(shard.param).device
    elif shard.param.is_floating_point():
        dtype = shard.dtype
    if not _is_small(shard, name, value) and not shard.whole:
        value = flat_as(value, shard.stride)[shard.begin : shard.end]
    return value.to(device=device, dtype=dtype)
