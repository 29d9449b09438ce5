"""Models that torch's FSDP2 has sharded: each rank keeps its shards on its drive.

FSDP2 gathers the shards of a group of parameters in one collective, ahead of time or when a module
needs them. It asks each shard for its values then (stored_shard.py), so no hook of a module brings
weights in, and none holds them: what FSDP2 has copied may give way at once."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import Module, Parameter
from torch.utils.hooks import RemovableHandle

from .._core import SwapSpace
from .._memory.budget import MemoryBudget, Portion
from .._memory.buffers import NvmePath, open_space
from .._memory.gpu_pool import GpuPool
from .._memory.heap import map_large_blocks, note_block_freed
from .._memory.layout import PAGE, page_up
from .._memory.spreading import spread
from .._memory.weight_memory import WeightMemory
from .hooks import ModuleHooks, refuse_other_optimizers
from .modules import starts
from .move_out import MoveOut
from .offloaded import OffloadedParameters, check_model
from .residency import Residency
from .stored_shard import PaddedValues, ShardPlace, StoredShard
from .unit import Unit

_log = logging.getLogger("tensorferry")


class Group(NamedTuple):
    """Parameters that FSDP2 gathers together."""

    params: list[Any]  # torch's FSDPParam, in the order in which it asks for them
    modules: list[Module]  # that hold them, parents first
    policy: Any
    resharding: tuple[Any, Any]  # (mesh of the shards, mesh after the forward pass, if any)


def groups_in(model: Module) -> list[Group]:
    """Returns the groups of a model, in the order of its modules; none if FSDP2 has not sharded
    it. Gives up what FSDP2 has gathered."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not hasattr(fsdp, "FSDPModule"):
        return []
    sharded = [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]
    groups: dict[int, Group] = {}
    for module in sharded:
        module.reshard()
        for group in _groups_of(module._get_fsdp_state()):
            if id(group) not in groups and group.fsdp_params:
                holding = dict.fromkeys(m for p in group.fsdp_params for m in _holders(p))
                meshes = group.mesh_info, group.post_forward_mesh_info
                groups[id(group)] = Group(
                    group.fsdp_params, list(holding), group.offload_policy, meshes
                )
    return list(groups.values())


def _groups_of(state: Any) -> list[Any]:
    several = getattr(state, "_fsdp_param_groups", None)  # from torch 2.12 on
    one = getattr(state, "_fsdp_param_group", None)
    return list(several) if several is not None else [] if one is None else [one]


def _holders(fsdp_param: Any) -> Iterator[Module]:
    info = fsdp_param._module_info
    yield info.module
    yield from info.shared_modules


def _padded_bytes(fsdp_param: Any) -> int:
    numel: int = fsdp_param.padded_sharded_param_size.numel()
    return numel * int(fsdp_param.sharded_param.dtype.itemsize)


def check_sharded(model: Module, groups: list[Group], keep_bytes: int) -> None:
    """Raises ValueError for what cannot be on the drive, with its name."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    names = {param: name for name, param in model.named_parameters()}
    known = set()
    for group in groups:
        first = names.get(group.params[0].sharded_param, "a parameter")
        if isinstance(group.policy, CPUOffloadPolicy):
            raise ValueError(
                f"{first} is sharded with CPUOffloadPolicy, which keeps shards in memory: leave "
                "offload_policy out of fully_shard() to have them on NVMe"
            )
        own, after = group.resharding
        if after is not None and after != own:
            raise ValueError(
                f"{first} is sharded with a number as reshard_after_forward, which keeps parts of "
                "gathered weights in memory: give True or False to fully_shard()"
            )
        for fsdp_param in group.params:
            local = fsdp_param.sharded_param._local_tensor
            known.add(fsdp_param.sharded_param)
            if hasattr(local, "fsdp_pre_all_gather"):
                raise ValueError(
                    f"{names.get(fsdp_param.sharded_param, first)} is a {type(local).__name__}, "
                    "which gathers its shards in its own way: it cannot go to NVMe"
                )
    for param, name in names.items():
        if param not in known and param.nbytes > keep_bytes:
            raise ValueError(
                f"{name} is not sharded, and the rest of the model is: call fully_shard() on the "
                "module that has it before its weights go to NVMe, without ignored_params"
            )


def split_shards(
    groups: list[Group], keep_bytes: int, limit: int | Portion
) -> tuple[set[Any], int]:
    """Returns (parameters that stay in memory, bytes of memory that the others pass through). What
    stays are the smallest and, within a portion of a budget, as many groups as fit."""
    room = limit if isinstance(limit, int) else limit.room
    kept = _smallest(groups, keep_bytes, room // 16)
    sizes = [
        sum(page_up(_padded_bytes(p)) for p in group.params if p not in kept) for group in groups
    ]
    if isinstance(limit, int):
        return kept, min(sum(sizes), max(room, max(sizes)))
    room -= sum(map(_padded_bytes, kept))
    if sum(sizes) <= room:
        return {p for group in groups for p in group.params}, 0
    if max(sizes) > room:
        raise ValueError(
            f"the budget has {room} bytes left for weights, and {max(sizes)} bytes of shards are "
            "gathered at once: raise it, or call fully_shard() on smaller modules"
        )
    # One group is in use, the next on its way.
    numbers = [number for number, size in enumerate(sizes) if size > 0]
    staying = spread(numbers, sizes.__getitem__, max(room - 2 * max(sizes), 0))
    passing = min(room, sum(sizes)) - sum(sizes[number] for number in staying)
    return kept | {p for number in staying for p in groups[number].params}, passing // PAGE * PAGE


def _smallest(groups: list[Group], keep_bytes: int, most: int) -> set[Any]:
    """Returns the parameters of up to `keep_bytes` that stay in memory, `most` bytes together, and
    those that leave nothing for this rank."""
    every = [p for group in groups for p in group.params]
    kept = {p for p in every if p.sharded_param._local_tensor.numel() == 0}
    total = 0
    for fsdp_param in sorted(every, key=_padded_bytes):
        total += _padded_bytes(fsdp_param)
        if _padded_bytes(fsdp_param) > keep_bytes or total > most:
            break
        kept.add(fsdp_param)
    return kept


class ShardHooks(ModuleHooks):
    """The hooks on a module whose weights FSDP2 gathers: only for passes and for state_dicts."""

    def _watch_calls(self, module: Module) -> list[RemovableHandle]:
        if not self._begins_pass:
            return []
        return [module.register_forward_pre_hook(self._note_pass, prepend=True)]

    def _note_pass(self, *_: object) -> None:
        if torch._C._current_graph_task_id() == -1:  # not computed again, in a backward pass
            self._residency.begin_pass()


class MoveShards:
    """Moves the shards of this rank to the drive, one group at a time."""

    def __init__(
        self,
        space: SwapSpace,
        residency: Residency,
        initialize: Callable[[Module], object] | None,
    ) -> None:
        self._space = space
        self._residency = residency
        self._initialize = initialize
        self._started: set[Module] = set()

    def run(self, groups: list[Group], kept: set[Any]) -> dict[Module, list[Unit]]:
        """Makes the units, one for each group, and returns which ones each module needs."""
        needs: dict[Module, list[Unit]] = {}
        for number, group in enumerate(groups):
            moving = [p for p in group.params if p not in kept]
            unit = self._move(f"{number}", group, moving)
            if unit is None:
                continue
            for fsdp_param in moving:
                for module in _holders(fsdp_param):
                    if unit not in needs.setdefault(module, []):
                        needs[module].append(unit)
        self._residency.settle()
        return needs

    def _move(self, key: str, group: Group, moving: list[Any]) -> Unit | None:
        fresh = self._materialise(group)
        unit = self._residency.new_unit() if moving else None
        if unit is not None:
            for index, fsdp_param in enumerate(moving):
                unit.add_stored(self._stored(unit, fsdp_param, f"{key}.{index}"))
            self._residency.adopt(unit, empty=())
        for start in starts(group.modules, fresh, self._initialize) if fresh else ():
            start()
        if unit is not None:
            unit.move_out()
        for fsdp_param in moving:
            note_block_freed(_padded_bytes(fsdp_param))
        return unit

    def _stored(self, unit: Unit, fsdp_param: Any, key: str) -> StoredShard:
        param: Parameter = fsdp_param.sharded_param
        local = fsdp_param.sharded_param._local_tensor
        values = PaddedValues(local, key, self._space, _padded_bytes(fsdp_param))
        residency = self._residency
        return StoredShard(
            param,
            values,
            unit.buffer,
            unit.nbytes,
            ShardPlace(fsdp_param),
            lambda: residency.fetch_group(unit),
        )

    def _materialise(self, group: Group) -> list[Module]:
        """Gives memory to what is on the meta device. Returns the modules that had some."""
        device = self._residency.device
        fresh = []
        for fsdp_param in group.params:
            old = fsdp_param.sharded_param
            if old.device.type != "meta":
                continue
            size = fsdp_param.padded_sharded_param_size
            padded = torch.zeros(size.numel(), dtype=old.dtype, device=device)
            local = padded[: fsdp_param.sharded_size.numel()].view(fsdp_param.sharded_size)
            new = Parameter(fsdp_param.to_sharded_dtensor(local), requires_grad=old.requires_grad)
            fsdp_param.sharded_param = new
            fsdp_param._sharded_param_data = padded
            fsdp_param._setattr_on_modules(new)
            fresh += list(_holders(fsdp_param))
        fresh = [module for module in dict.fromkeys(fresh) if module not in self._started]
        self._started.update(fresh)
        for module in fresh:
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type == "meta":
                    module._buffers[name] = torch.empty_like(buffer, device=device)
        return fresh


def offload_shards(
    model: Module,
    groups: list[Group],
    nvme_path: NvmePath,
    device: torch.device,
    max_bytes: int | MemoryBudget,
    keep_bytes: int,
    initialize: Callable[[Module], object] | None,
    handle_options: dict[str, Any],
) -> OffloadedParameters:
    """Moves the shards of a model to the drive, and makes FSDP2 ask for them there."""
    check_model(model)
    check_sharded(model, groups, keep_bytes)
    map_large_blocks()
    given = max_bytes if isinstance(max_bytes, int) else max_bytes.portion(device)
    portion = None if isinstance(given, int) else given
    kept, limit = split_shards(groups, keep_bytes, given)
    kept_bytes = sum(map(_padded_bytes, kept))
    if portion is not None:
        portion.hold(kept_bytes + limit)
        _log.info("%d bytes of shards stay in memory for good", kept_bytes)
    on_cpu = device.type == "cpu"
    space = open_space(nvme_path, page_up(limit) if on_cpu else PAGE, **handle_options)
    residency = Residency(WeightMemory(space, None if on_cpu else GpuPool(device, limit)))
    on_meta = any(param.device.type == "meta" for param in model.parameters())
    try:
        needs = MoveShards(space, residency, initialize).run(groups, kept)
    except BaseException as error:
        MoveOut(space, residency).undo(error, restore=not on_meta)
        with contextlib.suppress(OSError):
            space.close()
        raise
    weights = OffloadedParameters(
        model, space, residency, needs, kept_bytes, portion, hooks=ShardHooks
    )
    refuse_other_optimizers()
    return weights
