"""The torch optimizer that computes: it is handed one sub-group at a time."""

from __future__ import annotations

import collections
from typing import Any

import torch
from torch import Tensor

from .supported import ADAM, ELEMENTWISE, plain_step


class Stepper:
    """Lends a torch optimizer the tensors and states of one sub-group at a time."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        kind = type(optimizer)
        self._optimizer = optimizer
        self._step = plain_step(kind)
        self.name = kind.__name__
        self.needs_whole = kind not in ELEMENTWISE
        self.kind = kind
        self.is_adam = kind in ADAM

    def step(
        self, groups: list[dict[str, Any]], states: dict[Tensor, dict[str, Any]]
    ) -> dict[Tensor, dict[str, Any]]:
        """Steps the tensors of these groups. Returns their states, some of which may be new."""
        own_groups = self._optimizer.param_groups
        self._optimizer.state = states
        self._optimizer.param_groups = groups
        try:
            self._step(self._optimizer)
            return self._optimizer.state
        finally:  # the buffer that these lie in is free only when nobody holds them
            self.reset(own_groups)

    def reset(self, param_groups: list[dict[str, Any]]) -> None:
        """Takes the states away and gives the optimizer the groups of the user, which schedulers
        reach through it."""
        self._optimizer.state = collections.defaultdict(dict)
        self._optimizer.param_groups = param_groups

    def retire(self) -> None:
        """The optimizer itself refuses to step from now on."""
        self._optimizer.step = _refuse


def _refuse(*_: object) -> None:
    raise RuntimeError(
        "the states of this optimizer are on NVMe: call step() of what offload() returned"
    )
