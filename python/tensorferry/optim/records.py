"""The records of sub-groups before their first step, and after each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .cut_masters import LOW
from .load import Load
from .quantized_moments import NAMES, PACKED, packed_bytes
from .sub_groups import Shard, StateField


def first_states(load: Load) -> list[StateField]:
    """Makes Adam's states before its first step, as torch does, but in the buffer: memory from
    elsewhere, taken and given back for each sub-group, adds up in the heap."""
    made = {}
    for shard in load.active:
        names = [*NAMES, *(["max_exp_avg_sq"] if shard.group["amsgrad"] else [])]
        like = torch.empty(shard.shape, dtype=shard.dtype, device="meta")
        made[shard] = dict.fromkeys(names, like)
        if shard.packs_moments:
            made[shard] = {PACKED: like.new_empty(packed_bytes(shard.numel), dtype=torch.uint8)}
        if shard.cuts_master:
            made[shard] = {LOW: like.to(torch.int16), **made[shard]}
        elif shard.master:
            made[shard] = {"master": like, **made[shard]}
    fields = load.group.lay_out(made)
    for field in fields:
        state = field.of(load.record).zero_()
        if field.name == "master":
            state.copy_(load.values(field.shard))
    return fields


def large_states(shard: Shard, tensor: Tensor, state: dict[str, Any]) -> dict[str, Tensor]:
    """Keeps the small states in memory and returns those that go to the drive."""
    large = {"master": tensor} if shard.master else {}
    shard.small = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dim() > 0:
            large[name] = value
        else:
            shard.small[name] = value
    return large


def collected(
    memory: Tensor, fields: list[StateField], size: int, states: dict[Shard, dict[str, Tensor]]
) -> Tensor:
    """Memory with all states in their fields: the buffer itself if it is large enough."""
    begin = memory.data_ptr()
    end = begin + memory.numel()
    if size > memory.numel():
        memory = torch.empty(size, dtype=torch.uint8, device=memory.device)
    for field in fields:  # a state that moves within the buffer may overwrite others
        source = states[field.shard][field.name]
        moves = source.data_ptr() != memory.data_ptr() + field.offset
        if moves and begin <= source.data_ptr() < end:
            states[field.shard][field.name] = source.clone()
    for field in fields:
        target = field.of(memory)
        source = states[field.shard][field.name]
        if source.data_ptr() != target.data_ptr():
            target.copy_(source)
    return memory
