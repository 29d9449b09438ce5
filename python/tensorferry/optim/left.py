"""How much of each parameter is left to step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from .sub_groups import SubGroup


class Left:
    """The sub-groups that have a part of a parameter, and how many of them are not stepped."""

    def __init__(self, params: Mapping[SubGroup, Iterable[Tensor]]) -> None:
        """`params` are those of each sub-group."""
        self._groups: dict[Tensor, list[SubGroup]] = {}
        self._count: dict[Tensor, int] = {}
        self._params = {group: list(own) for group, own in params.items()}
        for group, own in self._params.items():
            for param in own:
                self._groups.setdefault(param, []).append(group)
                self._count[param] = self._count.get(param, 0) + 1

    @property
    def params(self) -> Collection[Tensor]:
        """All parameters, also those of which nothing is left."""
        return self._groups.keys()

    def groups_of(self, param: Tensor) -> list[SubGroup]:
        """The sub-groups of a parameter, also those that are stepped."""
        return self._groups.get(param, [])

    def has(self, param: Tensor) -> bool:
        """Returns whether a part of a parameter is left."""
        return self._count.get(param, 0) > 0

    def note_stepped(self, group: SubGroup) -> list[Tensor]:
        """Says that a sub-group is stepped. Returns the parameters of which nothing is left now."""
        for param in self._params[group]:
            self._count[param] -= 1
        return [param for param in self._params[group] if self._count[param] == 0]
