"""How many bytes the drive moves for a step, and how many it takes in a day."""

from __future__ import annotations

import collections
import time
from typing import Any, NamedTuple

_STEPS = 16  # the pace is that of so many
_DAY_SECONDS = 24 * 60 * 60


class _Begun(NamedTuple):
    """The counts when a step began."""

    seconds: float
    read_bytes: int
    written_bytes: int


class Traffic:
    """The bytes of the last steps, each with what came before the next one: gradients too."""

    def __init__(self) -> None:
        self._steps: collections.deque[_Begun] = collections.deque(maxlen=_STEPS + 1)

    def begin_step(self, moved: dict[str, Any]) -> None:
        """Notes what the drive has moved before a step: `moved` is SwapSpace.stats()."""
        self._steps.append(_Begun(time.monotonic(), moved["read_bytes"], moved["written_bytes"]))

    def stats(self, parameters: int) -> dict[str, float]:
        """Bytes per parameter and step, and bytes written in a day at this pace; zeros before the
        second step begins. The first step, which reads nothing, is left out as soon as may be."""
        steps = list(self._steps)
        steps = steps[1:] if len(steps) > 2 else steps
        if len(steps) < 2 or parameters == 0:
            read = written = pace = 0.0
        else:
            first, last = steps[0], steps[-1]
            elements = parameters * (len(steps) - 1)
            read = (last.read_bytes - first.read_bytes) / elements
            written = (last.written_bytes - first.written_bytes) / elements
            seconds = max(last.seconds - first.seconds, 1e-9)
            pace = (last.written_bytes - first.written_bytes) / seconds * _DAY_SECONDS
        return {
            "read_bytes_per_parameter": read,
            "written_bytes_per_parameter": written,
            "written_bytes_per_day": pace,
        }
