"""One number of bytes that weights and the states of an optimizer share."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from .available import auto_bytes

if TYPE_CHECKING:
    import torch


class MemoryBudget:
    """One number of bytes for weights and states together, split where it helps most.

    Give it to offload.parameters() and then to an optimizer of tensorferry.optim, as
    `max_cpu_bytes` of both (for a model on a GPU: as `max_gpu_bytes`). Weights come first, because
    a byte of them saves more: a weight that stays in memory is neither read for forward and for
    backward nor written by the step. States take what the weights leave. `max_bytes` is a number,
    or "auto" for half of the memory that is left when the first of them asks.

    >>> import tensorferry
    >>> tensorferry.MemoryBudget(1 << 30)
    <tensorferry.MemoryBudget of 1073741824 bytes, 0 held>
    """

    __module__ = "tensorferry"  # where users find it

    def __init__(self, max_bytes: int | str) -> None:
        is_number = isinstance(max_bytes, int) and max_bytes > 0
        if not (is_number or max_bytes == "auto"):
            raise ValueError(
                f'max_bytes is {max_bytes!r}: give a number of bytes of at least 1, or "auto"'
            )
        self._max_bytes = max_bytes
        self._kind: str | None = None  # of the device whose memory it counts
        self._portions: weakref.WeakSet[Portion] = weakref.WeakSet()

    @property
    def max_bytes(self) -> int | str:
        """The number; "auto" until somebody has asked for memory."""
        return self._max_bytes

    @property
    def held_bytes(self) -> int:
        """What the holders have of it now."""
        return sum(portion.nbytes for portion in self._portions)

    def portion(self, device: torch.device) -> Portion:
        """Returns the part of a new holder, which is empty."""
        if self._kind not in (None, device.type):
            raise ValueError(
                f"this budget counts memory of {self._kind!r} already and cannot count memory of "
                f"{device}: make a MemoryBudget for each"
            )
        self._kind = device.type
        if isinstance(self._max_bytes, str):
            self._max_bytes = auto_bytes(device)
        portion = Portion(self, self._max_bytes)
        self._portions.add(portion)
        return portion

    def __repr__(self) -> str:
        return f"<tensorferry.MemoryBudget of {self._max_bytes} bytes, {self.held_bytes} held>"


class Portion:
    """What one holder has of a budget, until it closes it or ends."""

    def __init__(self, budget: MemoryBudget, most: int) -> None:
        self._budget = budget
        self._most = most
        self.nbytes = 0  # that it holds

    @property
    def room(self) -> int:
        """What this holder may have at most: all that the others leave."""
        return max(self._most - (self._budget.held_bytes - self.nbytes), 0)

    def hold(self, nbytes: int) -> None:
        """Says how much the holder has from now on."""
        self.nbytes = nbytes

    def close(self) -> None:
        self.hold(0)
