"""What a snapshot asks of the objects that it is given, and what resume() returns."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Protocol

from .folder import Snapshot


class Stateful(Protocol):
    """An optimizer, a scheduler, or a GradScaler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


def bare(optimizer: Stateful | None) -> Stateful | None:
    """An optimizer out of what accelerate wraps it in."""
    wrapping = sys.modules.get("accelerate.optimizer")
    while wrapping is not None and isinstance(optimizer, wrapping.AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


@dataclass(frozen=True)
class Resumed:
    """What resume() has found."""

    snapshot: Snapshot
    extra: Any  # what take() was given

    __module__ = "tensorferry.snapshot"  # where users find it
