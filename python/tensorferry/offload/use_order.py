"""The order in which a model uses its units, which predicts the next uses."""

from __future__ import annotations

import bisect
import collections
from collections.abc import Container, Iterable, Iterator

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
        self._chosen: collections.deque[Unit] = collections.deque()  # what comes first, for sure

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
        self._chosen.clear()

    def choose(self, units: Iterable[Unit], of: Container[Unit]) -> None:
        """Says that these units are used next, whatever units `of` the same kind the last pass has
        used here."""
        self._chosen = collections.deque(units)
        while self._now < len(self._last) and self._last[self._now] in of:
            self._now += 1

    def record(self, unit: Unit, units: int) -> None:
        """Records the use of a unit of a model that has `units` units."""
        is_chosen = bool(self._chosen) and self._chosen[0] is unit
        if is_chosen:
            self._chosen.popleft()
        if not unit.recurs:
            return
        if self._trace and self._trace[-1] is unit:
            return
        if len(self._trace) >= max(_LONGEST_PASS, 8 * units):
            self.begin_pass()
        self._trace.append(unit)
        positions = self._positions.get(unit)
        if positions and not is_chosen:
            at = bisect.bisect_left(positions, self._now)
            self._now = positions[at if at < len(positions) else 0] + 1

    def next_use(self, unit: Unit) -> int:
        """Returns how many uses ahead the unit is needed."""
        if unit in self._chosen:
            return self._chosen.index(unit)
        later = len(self._chosen) - self._now
        positions = self._positions.get(unit)
        if not positions:
            return later + self._now + len(self._last) + 1
        at = bisect.bisect_left(positions, self._now)
        if at < len(positions):
            return positions[at] + later
        return positions[0] + len(self._last) + later

    def ahead(self) -> Iterator[tuple[Unit, int]]:
        """Yields the units in the order of the next uses, one pass long, each with how many uses
        ahead it is needed for the time after."""
        for ahead, unit in enumerate(self._chosen):
            yield unit, ahead + len(self._last)
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
