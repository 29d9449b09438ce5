"""A layer of a cache of transformers, with its keys and values on the drive."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from transformers.cache_utils import CacheLayerMixin

from .cache_memory import CacheMemory
from .cache_states import States


class NvmeLayer(CacheLayerMixin):
    """What DynamicLayer of transformers is, for keys and values that may be on the drive."""

    is_sliding = False
    is_croppable = True

    def __init__(self, memory: CacheMemory, number: int) -> None:
        self._memory = memory
        self._number = number
        self._states: States | None = None
        self.is_initialized = False

    @property
    def keys(self) -> torch.Tensor | None:
        """The keys, as a copy in memory."""
        return self.copies()[0]

    @property
    def values(self) -> torch.Tensor | None:
        """The values, as a copy in memory."""
        return self.copies()[1]

    def copies(self) -> list[Any]:
        """Returns copies of keys and values; None for each before the first tokens."""
        if self._states is None:
            return [None, None]
        return [view.clone() for view in self._memory.views(self._states)]

    @property
    def states(self) -> States | None:
        """Where its tokens are; None before the first ones."""
        return self._states

    @property
    def batch_size(self) -> int:
        return -1 if self._states is None else self._states.batch

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self._memory.check_usable()
        self.dtype, self.device = key_states.dtype, key_states.device
        self._states = self._memory.open(self._number, key_states, value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds the keys and values of new tokens. Returns those of all tokens, which are there
        until the next layer is called."""
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise RuntimeError(
                "NvmeCache keeps no gradients: call the model under torch.no_grad(), as generate() "
                "does"
            )
        if self._states is None:
            self.lazy_initialization(key_states, value_states)
        states = self._states
        assert states is not None
        states.check(key_states, value_states)
        keys, values = self._memory.add(states, (key_states, value_states))
        return keys, values

    def get_seq_length(self) -> int:
        return 0 if self._states is None else self._states.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        if self._states is not None:
            self._states.forget()
        self._states, self.is_initialized = None, False

    def crop(self, tokens_to_remove: int) -> None:
        """Removes tokens from the end: a negative number, as transformers has it."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}) is not supported: pass a negative number of tokens to "
                "remove from the end"
            )
        if self._states is not None and tokens_to_remove:
            self._memory.crop(self._states, max(self._states.length + tokens_to_remove, 0))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._select(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self._states is not None:
            self._select(torch.arange(self._states.batch).repeat_interleave(repeats))

    def _select(self, indices: torch.Tensor) -> None:
        """Takes these sequences of the batch. Unless they are all, in their order, the whole layer
        is read and written."""
        states = self._states
        if states is None or states.length == 0:
            return
        batch = torch.arange(states.batch, device=indices.device)
        if indices.dtype == torch.bool:
            indices = batch[indices]
        if torch.equal(indices, batch):
            return
        indices = indices.to(states.device)
        # Nobody holds the views when the new ones need memory.
        chosen = [view.index_select(0, indices) for view in self._memory.views(states)]
        self._memory.replace(states, chosen)

    def offload(self) -> NoReturn:
        raise RuntimeError("NvmeCache moves its layers itself: offload() is not supported")

    prefetch = offload
