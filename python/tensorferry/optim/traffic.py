"""How many bytes the drive moves for a step, how many it takes in a day, and who waited for it."""

from __future__ import annotations

import collections
import time
from typing import NamedTuple

from .._memory.waits import COPIES, DRIVE, STEP, Waits
from .store import Moved

_STEPS = 16  # the pace is that of so many
_DAY_SECONDS = 24 * 60 * 60


class _Begun(NamedTuple):
    """The counts when a step began."""

    seconds: float
    read_bytes: int
    written_bytes: int
    waited: float  # for the drive
    copying: float  # waited for copies of a GPU
    stepping: float


class Traffic:
    """The bytes of the last steps, each with what came before the next one: gradients too."""

    def __init__(self) -> None:
        self._steps: collections.deque[_Begun] = collections.deque(maxlen=_STEPS + 1)

    def begin_step(self, moved: Moved, waits: Waits) -> None:
        """Notes what the drive has moved before a step, and what was waited for."""
        self._steps.append(
            _Begun(
                time.monotonic(),
                moved.read,
                moved.written,
                waits.seconds(DRIVE),
                waits.seconds(COPIES),
                waits.seconds(STEP),
            )
        )

    def stats(self, parameters: int) -> dict[str, float]:
        """Bytes per parameter and step, and bytes written in a day at this pace; zeros before the
        second step begins. The first step, which reads nothing, is left out as soon as possible."""
        steps = self._counted()
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

    def seconds(self) -> dict[str, float]:
        """The time from step to step, and what of it went where; zeros before the second step."""
        steps = self._counted()
        count = max(len(steps) - 1, 1)
        first, last = (steps[0], steps[-1]) if steps else (_NOTHING, _NOTHING)
        return {
            "iteration_seconds": (last.seconds - first.seconds) / count,
            "waited_drive_seconds": (last.waited - first.waited) / count,
            "waited_copies_seconds": (last.copying - first.copying) / count,
            "step_seconds": (last.stepping - first.stepping) / count,
        }

    def _counted(self) -> list[_Begun]:
        steps = list(self._steps)
        return steps[1:] if len(steps) > 2 else steps


_NOTHING = _Begun(0.0, 0, 0, 0.0, 0.0, 0.0)
