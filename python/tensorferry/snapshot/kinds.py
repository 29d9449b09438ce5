"""What a snapshot asks of the objects that it is given, and what resume() returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from .folder import Snapshot


class Stateful(Protocol):
    """An optimizer, a scheduler, or a GradScaler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


@dataclass(frozen=True)
class Resumed:
    """What resume() has found."""

    snapshot: Snapshot
    extra: Any  # what take() was given

    __module__ = "tensorferry.snapshot"  # where users find it
