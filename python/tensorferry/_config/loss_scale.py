"""The loss scale of fp16."""

from __future__ import annotations

from typing import Any


class LossScale:
    """The factor of a loss in fp16, chosen as DeepSpeed chooses it."""

    def __init__(
        self,
        static: float,
        power: int,
        window: int,
        hysteresis: int,
        consecutive: bool,
        least: float,
    ) -> None:
        """`static` is a fixed scale; with 0 the scale starts at 2**`power` and adapts."""
        self._dynamic = static == 0
        self.value = float(2**power) if self._dynamic else float(static)
        self._window = window
        self._patience = self._hysteresis = hysteresis
        self._consecutive = consecutive
        self._least = least
        self._count = 0
        self._overflow_at = -1

    def update(self, overflow: bool) -> None:
        """Adapts the scale after a step."""
        if not self._dynamic:
            return
        if overflow:
            if self._patience == 1 or self._hysteresis == 1:
                self.value = max(self.value / 2, self._least)
            else:
                self._patience -= 1
            self._overflow_at = self._count
        else:
            if self._consecutive:
                self._patience = self._hysteresis
            stable = self._count - self._overflow_at - 1
            if stable > 0 and stable % self._window == 0:
                if not self._consecutive:
                    self._patience = self._hysteresis
                self.value *= 2
        self._count += 1

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        vars(self).update(state_dict)
