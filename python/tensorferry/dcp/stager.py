"""torch.distributed.checkpoint's AsyncStager: copies what async_save() writes later."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager

from .._memory.layout import page_up
from .._memory.mapped_weight import MappedWeight
from .._memory.pinned_pool import PinnedPool
from .._saving.stage import Copies

_log = logging.getLogger("tensorferry")

StateDict = dict[str, Any]


class Stager(AsyncStager):  # type: ignore[misc]  # mypy knows nothing of torch
    """Copies a state dict to page-locked memory for torch's async_save().

    You may change tensors as soon as async_save() returns. Tensors of GPUs are copied on a stream
    of their own. Weights on NVMe are not copied: nobody can change what state_dict() has of them.

    At most `stage_bytes` are page-locked, as many as needed if it is None. What does not fit is
    copied to ordinary memory, and the log says so. The memory serves the next save when this one
    has ended: keep the stager, and wait for a save before you begin another one. close() frees it.

    >>> import tensorferry.dcp, torch, torch.distributed.checkpoint as dcp
    >>> stager = tensorferry.dcp.Stager()
    >>> state = {"weight": torch.arange(6.0)}
    >>> writer = tensorferry.dcp.Writer("checkpoint")
    >>> saving = dcp.async_save(state, storage_writer=writer, async_stager=stager)
    >>> _ = state["weight"].zero_()
    >>> _ = saving.result()
    >>> dcp.load(state, storage_reader=tensorferry.dcp.Reader("checkpoint"))
    >>> state["weight"]
    tensor([0., 1., 2., 3., 4., 5.])
    >>> stager.close()
    """

    _synchronize_after_execute = False  # stage() returns when everything is copied

    def __init__(self, stage_bytes: int | None = None) -> None:
        if stage_bytes is not None and stage_bytes <= 0:
            raise ValueError(f"stage_bytes is {stage_bytes}; it must be above 0")
        self._stage_bytes = stage_bytes
        self._pool: PinnedPool | None = None

    def stage(self, state_dict: StateDict) -> StateDict:
        """Returns a copy, in memory of the CPU."""
        copying = _Copying(self._pool_for(_bytes_of(state_dict)))
        try:
            staged: StateDict = copying.of(state_dict)
        finally:
            copying.copies.finish()
        if copying.elsewhere_bytes:
            _log.info(
                "%d MiB of a state dict do not fit into the page-locked memory of the stager: they "
                "are copied to ordinary memory",
                -(-copying.elsewhere_bytes >> 20),
            )
        return staged

    def synchronize_staging(self) -> None:
        """Does nothing: stage() has copied everything."""

    def close(self) -> None:
        """Frees the memory, as soon as no save needs it."""
        self._pool = None

    def stats(self) -> dict[str, Any]:
        """Counts the page-locked memory: `buffer_bytes` and `buffer_bytes_used`."""
        if self._pool is None:
            return {"buffer_bytes": 0, "buffer_bytes_used": 0}
        return self._pool.stats()

    def _pool_for(self, needed: int) -> PinnedPool | None:
        if self._stage_bytes is not None:
            needed = min(needed, self._stage_bytes)
        pool = self._pool
        if needed and (pool is None or pool.stats()["buffer_bytes"] < needed):
            # A save that goes on holds what it needs of the old one.
            self._pool = pool = None
            self._pool = pool = PinnedPool(needed)
        return pool


class _Copying:
    def __init__(self, pool: PinnedPool | None) -> None:
        self._pool = pool
        self.copies = Copies()
        self.elsewhere_bytes = 0

    def of(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: self.of(one) for key, one in value.items()}
        if type(value) in (list, tuple):
            return type(value)(map(self.of, value))
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        return copy.deepcopy(value)

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, MappedWeight):
            return tensor
        if hasattr(tensor, "__tensor_flatten__"):
            return self._wrapped(tensor)
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not _plain(tensor):
            return copy.deepcopy(tensor.detach()).cpu()
        source = tensor.detach().resolve_conj().resolve_neg()
        place = self._place(source)
        self.copies.add(place, source)
        return place

    def _wrapped(self, tensor: Any) -> torch.Tensor:
        """Copies the tensors that a DTensor or the like consists of. Unlike DTensor.from_local() it
        leaves them on the CPU."""
        names, rest = tensor.__tensor_flatten__()
        inner = {name: getattr(tensor, name) for name in names}
        for name, part in inner.items():
            if isinstance(part, torch.Tensor):  # torch 2.13 counts the mesh of a DTensor too
                inner[name] = self._tensor(part)
        made: torch.Tensor = type(tensor).__tensor_unflatten__(
            inner, rest, tensor.shape, tensor.stride()
        )
        return made

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._pool is not None and tensor.nbytes:
            try:
                memory = self._pool.take(tensor.nbytes)
            except TimeoutError:
                self.elsewhere_bytes += tensor.nbytes
            else:
                return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
        return torch.empty(tensor.shape, dtype=tensor.dtype)


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta


def _bytes_of(value: Any) -> int:
    """What the copies of the tensors in it take, in whole pages."""
    if isinstance(value, Mapping):
        return sum(map(_bytes_of, value.values()))
    if type(value) in (list, tuple):
        return sum(map(_bytes_of, value))
    if not isinstance(value, torch.Tensor) or isinstance(value, MappedWeight):
        return 0
    if hasattr(value, "__tensor_flatten__"):
        return sum(_bytes_of(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    return page_up(value.nbytes)
