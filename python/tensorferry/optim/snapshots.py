"""What a snapshot keeps of an optimizer: its records stay where they are on the drive; what is only
in memory is copied."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._memory.layout import local
from .._memory.snapshot_part import SavedPart, SnapshotPart, compare
from .cut_masters import Cut
from .sub_groups import Group, Shard, StateField, SubGroup, SubGroups

if TYPE_CHECKING:
    from .store import StateStore


def part_of(
    name: str,
    param_groups: list[Group],
    sub_groups: SubGroups,
    store: StateStore,
    edited: set[Tensor],
) -> SnapshotPart:
    """`edited` are the parameters that somebody has changed since their masters were rounded to
    them. All writes must be done."""
    numbers = _numbers(param_groups)
    groups = list(sub_groups)
    kept = [group for group in groups if store.kept.has(group)]
    memory = {
        "param_groups": [_settings(group) for group in param_groups],
        "fields": [[_described(field, group) for field in group.fields] for group in groups],
        "small": [[_copied(shard.small) for shard in group.shards] for group in groups],
        "cuts": [[cut_out(shard.cut) for shard in group.shards] for group in groups],
        "whole": [[shard.stays_whole for shard in group.shards] for group in groups],
        "records": {group.key: store.kept.record(group) for group in kept},
        "edited": sorted(numbers[param] for param in edited),
    }
    keys = [group.key for group in groups if group.fields and not store.kept.has(group)]
    return SnapshotPart(_layout(name, param_groups, groups), memory, [(store.space, keys)])


def resume(
    name: str,
    saved: SavedPart,
    param_groups: list[Group],
    sub_groups: SubGroups,
    store: StateStore,
) -> Iterable[Tensor]:
    """Takes over what part_of() has kept. Returns the parameters that nobody has changed since
    their masters were rounded to them."""
    groups = list(sub_groups)
    compare("optimizer", saved.layout, _layout(name, param_groups, groups))
    memory = saved.memory
    store.spoiled = "a snapshot could not be resumed to the end"
    for group in groups:
        store.drop(group)
    for space in saved.spaces:
        store.space.attach(space.files, space.tensors)
    for group, fields, small, cuts, whole in zip(
        groups, *(memory[name] for name in ("fields", "small", "cuts", "whole"))
    ):
        group.fields = [_field(group, *one) for one in fields]
        for shard, own, cut, stays_whole in zip(group.shards, small, cuts, whole):
            shard.stays_whole = stays_whole
            shard.small = _placed(shard, own)
            shard.cut = cut_in(cut, group.device)
    store.kept.choose(groups)
    for group in groups:
        if (record := memory["records"].get(group.key)) is not None:
            store.write(group, group.fields, record)
    store.settle()
    for settings, own in zip(param_groups, memory["param_groups"]):
        settings.update(own)
    store.spoiled = None
    numbers = _numbers(param_groups)
    return [param for param, number in numbers.items() if number not in memory["edited"]]


def settings_of(saved: SavedPart) -> list[Group]:
    """The settings of the parameter groups in a snapshot."""
    groups: list[Group] = saved.memory["param_groups"]
    return groups


def _numbers(param_groups: list[Group]) -> dict[Tensor, int]:
    params = [param for group in param_groups for param in group["params"]]
    return {param: number for number, param in enumerate(params)}


def _settings(group: Group) -> Group:
    return copy.deepcopy({name: value for name, value in group.items() if name != "params"})


def _layout(name: str, param_groups: list[Group], groups: list[SubGroup]) -> dict[str, Any]:
    numbers = _numbers(param_groups)
    return {
        "optimizer": name,
        "groups": [len(group["params"]) for group in param_groups],
        "records": [[_shape(shard, numbers) for shard in group.shards] for group in groups],
    }


def _shape(shard: Shard, numbers: dict[Tensor, int]) -> dict[str, Any]:
    return {
        "parameter": numbers[shard.param],
        "dtype": _dtype_name(shard.param.dtype),
        "size": list(shard.size),
        "stride": list(shard.stride),
        "elements": [shard.begin, shard.end],
        "master": shard.master,
        "cuts_master": shard.cuts_master,
        "packs_moments": shard.packs_moments,
    }


def _described(field: StateField, group: SubGroup) -> tuple[int, str, int, list[int], str]:
    shard = group.shards.index(field.shard)
    return shard, field.name, field.offset, list(field.shape), _dtype_name(field.dtype)


def _field(
    group: SubGroup, shard: int, name: str, offset: int, shape: list[int], dtype: str
) -> StateField:
    return StateField(group.shards[shard], name, offset, tuple(shape), getattr(torch, dtype))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _placed(shard: Shard, small: dict[str, Any]) -> dict[str, Any]:
    """Small states where torch's optimizer wants them: step counts of fused ones on the device."""
    if not shard.group.get("fused"):
        return small
    device = local(shard.param).device
    return {n: v.to(device) if isinstance(v, Tensor) else v for n, v in small.items()}


def _copied(small: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for name, value in small.items()
    }


def cut_out(cut: Cut | None) -> dict[str, Any] | None:
    if cut is None:
        return None
    if isinstance(cut.listed, bytes):  # which torch does not load without running code
        listed: object = torch.empty(0, dtype=torch.uint8)
        if cut.listed:
            listed = torch.frombuffer(bytearray(cut.listed), dtype=torch.uint8)
    else:
        listed = cut.listed
    return {"digests": cut.digests, "listed": listed}


def cut_in(saved: dict[str, Any] | None, device: torch.device) -> Cut | None:
    if saved is None:
        return None
    listed = saved["listed"]
    if isinstance(listed, Tensor):
        return Cut(saved["digests"], ctypes.string_at(listed.data_ptr(), listed.numel()))
    positions, exact = (part.to(device) for part in listed)
    return Cut(saved["digests"].to(device), (positions, exact))
