"""Moving the weights of a model to the drive, one module at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

from torch.nn import Module, Parameter

from .._core import SwapSpace
from .._memory.values import SwappedValues
from .._notes import add_note
from .modules import materialise, starts, units_of
from .residency import Residency
from .unit import Unit


class MoveOut:
    """Moves the weights that modules own to the drive, and back if that fails."""

    def __init__(
        self,
        space: SwapSpace,
        residency: Residency,
        initialize: Callable[[Module], object] | None = None,
    ) -> None:
        self._space = space
        self._residency = residency
        self._initialize = initialize
        self._made: dict[Parameter, Parameter] = {}  # one on the meta device -> the real one
        self._units: dict[Parameter, Unit] = {}

    def run(
        self, modules: Iterable[tuple[Module, list[Module]]], owners: dict[Module, list[Parameter]]
    ) -> dict[Module, list[Unit]]:
        """Makes the units and returns which ones each module needs.

        `modules` are pairs: a module, and the modules whose weights come with it. `owners` are the
        weights that each module owns."""
        needs: dict[Module, list[Unit]] = {}
        for number, (module, subtree) in enumerate(modules):
            self._move(f"{number}", subtree, owners[module])
            for part in subtree:
                if needed := units_of([part], self._units):
                    needs.setdefault(part, needed)
            if needed := units_of(subtree, self._units):
                needs[module] = needed
        self._residency.settle()
        return needs

    def _move(self, key: str, subtree: list[Module], owned: list[Parameter]) -> None:
        made = self._made
        fresh = [part for part in subtree if materialise(part, made, self._residency.device)]
        unit = self._residency.new_unit() if owned else None
        if unit is not None:
            for index, param in enumerate(made.get(param, param) for param in owned):
                unit.add(param, SwappedValues(param, f"{key}.{index}", self._space))
                self._units[param] = unit
            self._residency.adopt(unit, empty={made[param] for param in owned if param in made})
        self._start(subtree, fresh)
        if unit is not None:
            unit.move_out()

    def _start(self, subtree: list[Module], fresh: list[Module]) -> None:
        """Gives fresh modules their first values."""
        with contextlib.ExitStack() as at_end:
            # They may share weights with modules that were moved before.
            self._residency.use(units_of(fresh, self._units), at_end)
            for start in starts(subtree, fresh, self._initialize):
                start()

    def undo(self, error: BaseException, restore: bool) -> None:
        """Ends all units after an error. With `restore` their weights come back into memory."""
        # First those in memory: their values may be nowhere else, and must not be evicted.
        for unit in sorted(self._residency.units, key=lambda unit: unit.memory is None):
            unit.forgo_writes()  # they may have caused the error
            try:
                unit.end(self._residency.values_of(unit) if restore and unit.moved else None)
            except OSError:
                unit.end()
                add_note(error, "some weights could not be read back: load the model again")
