"""What autograd keeps of weights for the backward pass: which they are, not their values."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from .._memory.graphs import outside_graphs
from .._memory.stored_parameter import StoredParameter
from .residency import Residency
from .saved_tensors import ChainedHooks, Hooks, chain, current_hooks
from .unit import Unit


@dataclass(frozen=True)
class SavedWeight:
    """Stands for a weight, or a view of one, that the backward pass needs."""

    unit: Unit  # to bring in
    stored: StoredParameter
    version: int | None  # of the weight
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def save_weights(residency: Residency, at_end: contextlib.ExitStack) -> None:
    """Makes autograd save a SavedWeight for each weight, until the stack `at_end` closes."""
    before = current_hooks()
    for pack, _ in chain(before):
        owner = getattr(pack, "__self__", None)
        if isinstance(owner, SavedTensorHooks) and owner.residency is residency:
            return  # autograd calls ours already
    hooks = SavedTensorHooks(residency, before)
    at_end.enter_context(torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack))


class SavedTensorHooks(ChainedHooks):
    """Hooks of autograd. They save weights as SavedWeights and pass other tensors to the hooks that
    were set before, such as those of activation checkpointing."""

    def __init__(self, residency: Residency, others: Hooks | None) -> None:
        super().__init__(others)
        self.residency = residency

    @outside_graphs
    def pack(self, tensor: torch.Tensor) -> Any:
        if (found := self.residency.find(tensor)) is not None:
            unit, stored = found
            return SavedWeight(
                unit,
                stored,
                stored.version,
                tensor.dtype,
                tensor.size(),
                tensor.stride(),
                tensor.storage_offset(),
            )
        return self.pack_other(tensor)

    @outside_graphs
    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, SavedWeight):
            return self._restored(packed)
        return self.unpack_other(packed)

    def _restored(self, saved: SavedWeight) -> torch.Tensor:
        if saved.version != saved.stored.version:
            raise RuntimeError(
                f"this backward pass needs a weight of shape {tuple(saved.stored.size)} that was "
                "changed since its forward pass, for example by optimizer.step(): call backward() "
                "before you change weights"
            )
        elements = self.residency.fetch(saved.unit).view(saved.dtype)
        return elements.as_strided(saved.size, saved.stride, saved.offset)
