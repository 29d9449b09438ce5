"""What autograd keeps of weights on the drive for the backward pass: where they are."""

from dataclasses import dataclass

import torch

from .._memory.stored_parameter import Home


@dataclass(frozen=True)
class Place:
    """What autograd keeps of a weight: where it is."""

    unit: object  # that brings it
    home: Home
    version: int  # of the weight
    dtype: torch.dtype
    size: torch.Size
    stride: tuple
    offset: int


class SavedWeights:
    """Hooks of autograd: weights are saved as their places. What else is saved goes to the hooks
    that were there before, as those of activation checkpointing."""

    def __init__(self, residency, others):
        self.residency = residency
        self._others = others

    def pack(self, tensor):
        place = self.residency.place_of(tensor)
        if place is not None or self._others is None:
            return tensor if place is None else place
        return self._others[0](tensor)

    def unpack(self, packed):
        if isinstance(packed, Place):
            return self.residency.at(packed)
        return packed if self._others is None else self._others[1](packed)
