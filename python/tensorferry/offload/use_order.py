"""The order in which a model uses its units, which predicts the next uses."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from .unit import Unit

# A pass ends after this many uses, for programs that never call the whole model.
_LONGEST_PASS = 1024


class UseOrder:
    """Records the uses of a pass, forward and backward, and expects the next pass to be alike."""

    def __init__(self) -> None:
        self._last: list[Unit] = []  # the uses of the last pass
        self._positions: dict[Unit, list[int]] = {}  # of each unit in the last pass
        self._gaps: list[int] = []  # uses from each one of the last pass to the next of its unit
        self._now = 0  # position of this pass in the last one
        self._trace: list[Unit] = []  # the uses of this pass

    def begin_pass(self) -> None:
        if self._trace:
            self._last, self._trace = self._trace, []
            self._positions = {}
            for at, unit in enumerate(self._last):
                self._positions.setdefault(unit, []).append(at)
            self._gaps = [0] * len(self._last)
            for positions in self._positions.values():
                following = [*positions[1:], positions[0] + len(self._last)]
                for at, then in zip(positions, following):
                    self._gaps[at] = then - at
        self._now = 0

    def record(self, unit: Unit, units: int) -> None:
        """Records the use of a unit of a model that has `units` units."""
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
        """Returns how many uses ahead the unit is needed."""
        positions = self._positions.get(unit)
        if not positions:
            return len(self._last) + 1
        at = bisect.bisect_left(positions, self._now)
        if at < len(positions):
            return positions[at] - self._now
        return positions[0] + len(self._last) - self._now

    def ahead(self) -> Iterator[tuple[Unit, int]]:
        """Yields the units in the order of the next uses, one pass long, each with how many uses
        ahead it is needed for the time after."""
        count = len(self._last)
        for ahead in range(count):
            at = (self._now + ahead) % count
            yield self._last[at], ahead + self._gaps[at]

    def used_once(self) -> list[Unit]:
        """Returns the units that the last pass used once."""
        return [unit for unit, positions in self._positions.items() if len(positions) == 1]

    def used_often(self) -> list[Unit]:
        """Returns the units that the last pass used more than once."""
        return [unit for unit, positions in self._positions.items() if len(positions) > 1]
