"""What a snapshot asks of the objects that it is given."""

from __future__ import annotations

from typing import Any, Protocol


class Stateful(Protocol):
    """An optimizer, a scheduler, or a GradScaler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...
