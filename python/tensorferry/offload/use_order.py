"""The order in which units are used, from which the next uses are foretold."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from .unit import Unit

# A pass is as long as that many uses at most; who never calls the whole model has no other.
_LONGEST_PASS = 1024


class UseOrder:
    """Records the uses of a pass, forward and backward, and expects the next pass to be alike."""

    def __init__(self) -> None:
        self._last: list[Unit] = []  # uses of the last pass
        self._positions: dict[Unit, list[int]] = {}  # where a unit is in it
        self._now = 0  # how far this pass is in it
        self._trace: list[Unit] = []  # uses of this pass

    def begin_pass(self) -> None:
        if self._trace:
            self._last, self._trace = self._trace, []
            self._positions = {}
            for at, unit in enumerate(self._last):
                self._positions.setdefault(unit, []).append(at)
        self._now = 0

    def record(self, unit: Unit, units: int) -> None:
        """Notes a use of one of so many units."""
        if self._trace and self._trace[-1] is unit:
            return
        if len(self._trace) >= max(_LONGEST_PASS, 8 * units):
            self.begin_pass()
        self._trace.append(unit)
        positions = self._positions.get(unit)
        if positions:
            at = bisect.bisect_left(positions, self._now)
            self._now = positions[at if at < len(positions) else 0] + 1

    def next_use(self, unit: Unit) -> int:
        """How many uses ahead the unit is needed."""
        positions = self._positions.get(unit)
        if not positions:
            return len(self._last) + 1
        at = bisect.bisect_left(positions, self._now)
        if at < len(positions):
            return positions[at] - self._now
        return positions[0] + len(self._last) - self._now

    def ahead(self) -> Iterator[Unit]:
        """The units in the order in which they are needed next, through one pass."""
        count = len(self._last)
        for ahead in range(count):
            yield self._last[(self._now + ahead) % count]
