"""OffloadedActivations: what autograd saves goes to the drive and comes back."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch

from .._memory.graphs import outside_graphs
from .._memory.heap import note_block_freed
from .activation_store import ActivationStore
from .saved_storage import SavedActivation, Stretch
from .saved_tensors import ChainedHooks, Hooks, chain, current_hooks
from .saved_weights import SavedTensorHooks

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class OffloadedActivations:
    """Tensors on NVMe that autograd saves for the backward pass, as offload.activations() returns
    them. Lives until close(), or until nobody has it and no graph has tensors in it.

    >>> import tensorferry.offload, torch
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    >>> activations = tensorferry.offload.activations(nvme_path=".", max_cpu_bytes=4 << 20)
    >>> for step in range(2):
    ...     with activations:
    ...         loss = model(torch.ones(1024, 512)).sum()
    ...     loss.backward()
    >>> activations.close()
    """

    __module__ = "tensorferry.offload"  # where users find it

    def __init__(self, store: ActivationStore, keep_bytes: int) -> None:
        self._store = store
        self._keep_bytes = keep_bytes
        self._entered = Entered()

    @outside_graphs
    def __enter__(self) -> OffloadedActivations:
        """Makes autograd save tensors here, in this thread, until the end of the block."""
        if self._store.space.closed:
            raise RuntimeError("these activations are closed: call offload.activations() again")
        at_end = contextlib.ExitStack()
        before = current_hooks()
        owners = [getattr(pack, "__self__", None) for pack, _ in chain(before)]
        if not any(isinstance(o, ActivationHooks) and o.store is self._store for o in owners):
            hooks = ActivationHooks(self._store, self._keep_bytes, before)
            at_end.enter_context(torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack))
        self._entered.blocks.append(at_end)
        return self

    @outside_graphs
    def __exit__(self, *_: object) -> None:
        self._entered.blocks.pop().close()

    def stats(self) -> dict[str, Any]:
        """Returns what was read and written, as SwapSpace.stats() does, and since the beginning:

        - `saved_bytes`: bytes that autograd saved here; memory that it saved twice counts once.
        - `kept_bytes`: bytes that stayed where they are: parameters, small tensors, and what other
          hooks take.
        - `waited_seconds`: how long forward and backward passes waited for the drive.
        - `overflow_bytes`: bytes that a backward pass took beyond the limit, because it used more
          at once.
        """
        return self._store.stats()

    def close(self) -> None:
        """Removes the files. Graphs that still have tensors there cannot be used any more."""
        self._store.close()

    def __repr__(self) -> str:
        return f"<tensorferry.offload.OffloadedActivations: {self._store.space!r}>"


class Entered(threading.local):
    """The blocks that a thread is in, innermost last."""

    def __init__(self) -> None:
        self.blocks: list[contextlib.ExitStack] = []


class ActivationHooks(ChainedHooks):
    """Hooks of autograd. They save tensors in a store, and pass to the hooks that were set before
    what stays: weights on the drive, which those of offload.parameters() take, parameters and small
    tensors."""

    def __init__(self, store: ActivationStore, keep_bytes: int, others: Hooks | None) -> None:
        super().__init__(others)
        self.store = store
        self._keep_bytes = keep_bytes
        before = list(chain(others))
        owners = [getattr(pack, "__self__", None) for pack, _ in before]
        self._weights = [owner for owner in owners if isinstance(owner, SavedTensorHooks)]
        # Activation checkpointing around this block computes again what we would save.
        modules = [getattr(pack, "__module__", "") for pack, _ in before]
        self._is_computed_again = "torch.utils.checkpoint" in modules

    @outside_graphs
    def pack(self, tensor: torch.Tensor) -> Any:
        if self._is_computed_again or self._stays(tensor):
            self.store.note_kept(tensor.nbytes)
            return self.pack_other(tensor)
        saved = self.store.save(tensor)
        note_block_freed(tensor.nbytes)  # soon: the forward pass still holds it
        return saved

    @outside_graphs
    def unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, SavedActivation):
            return self.unpack_other(packed)
        tensor = packed.restored()
        note_block_freed(tensor.nbytes)  # soon: a gradient of this size
        return tensor

    def _stays(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor stays: somebody else keeps its memory, it is small, or it is more than
        its memory tells."""
        if type(tensor) not in _PLAIN or tensor.layout != torch.strided:
            return True
        if (
            tensor.device.type not in ("cpu", "cuda")
            or Stretch.of(tensor).nbytes < self._keep_bytes
        ):
            return True
        if tensor.is_conj() or tensor.is_neg() or torch._is_zerotensor(tensor):
            return True
        base = tensor if tensor._base is None else tensor._base
        if base.is_leaf and base.requires_grad:
            return True
        return any(weights.residency.find(tensor) is not None for weights in self._weights)
