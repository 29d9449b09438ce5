"""How a budget is split between weights that stay in memory for good and those that pass.

A pass uses all weights in turn, so it does not matter for its reads which ones stay. But the step
writes a weight on the drive each time, and one that stays it does not; nor does it store the upper
half of its master. So the budget is for weights that stay, but for what the others need to pass
through."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch.nn import Module, Parameter

from .._memory.layout import PAGE, page_up
from .._memory.spreading import spread

# What is read ahead while a unit is in use: the largest one, or so many bytes if that is more.
_AHEAD_SHARE = 1 / 32
_AHEAD_BYTES = 32 << 20


class Split(NamedTuple):
    """How the memory for weights is used."""

    kept: set[Parameter]  # stay in memory
    passing_bytes: int  # of memory that the others pass through

    @property
    def kept_bytes(self) -> int:
        return sum(param.nbytes for param in self.kept)


def split_budget(
    model: Module,
    owned: Mapping[Module, list[Parameter]],
    needed: Mapping[Module, Iterable[Module]],
    room: int,
) -> Split:
    """Chooses what stays within `room` bytes: all, or some modules, spread over the pass, those
    that are trained first. `owned` are the weights that each module owns, `needed` the modules
    whose weights each module needs. Raises ValueError if there is too little room for a pass."""
    everything = [param for params in owned.values() for param in params]
    if sum(param.nbytes for param in everything) <= room:
        return Split(set(everything), 0)
    sizes = {module: sum(page_up(p.nbytes) for p in params) for module, params in owned.items()}
    passing, large = _least_passing(model, sizes, needed, room)
    left = room - passing - sum(sizes[module] for module in large)
    chosen = [param for module in large for param in owned[module]]
    for is_trained in (True, False):
        alike = [
            module
            for module, own in owned.items()
            if own and module not in large and _is_trained(own) == is_trained
        ]
        for module in spread(alike, sizes.__getitem__, max(left, 0)):
            chosen += owned[module]
            left -= sizes[module]
    kept = sum(page_up(param.nbytes) for param in chosen)
    return Split(set(chosen), (min(room, sum(sizes.values())) - kept) // PAGE * PAGE)


def _least_passing(
    model: Module,
    sizes: Mapping[Module, int],
    needed: Mapping[Module, Iterable[Module]],
    room: int,
) -> tuple[int, set[Module]]:
    """Returns (bytes that a pass needs for weights that do not stay, modules that must stay then).
    Large weights that stay make it less: memory to pass through is for the largest of the
    others."""
    for most in sorted(set(sizes.values())):
        large = {module for module, size in sizes.items() if size > most}
        own = {m: sum(sizes[n] for n in needed[m] if n not in large) for m in needed}
        in_use = _most_at_once(model, own, {})
        ahead = max(most, min(int(room * _AHEAD_SHARE), _AHEAD_BYTES))
        if in_use + ahead + sum(sizes[module] for module in large) <= room:
            return in_use + ahead, large
    if in_use > room:  # with all of them on the drive
        raise ValueError(
            f"the budget has {room} bytes left for weights, and {in_use} bytes of them are in use "
            "at once: raise it, or make units smaller"
        )
    return room, set()


def _is_trained(params: list[Parameter]) -> bool:
    return any(param.requires_grad for param in params)


def _most_at_once(module: Module, own: Mapping[Module, int], known: dict[Module, int]) -> int:
    """Bytes of the weights that are in use at once while a module is called: its own, and those of
    whichever child it calls."""
    if module not in known:
        known[module] = 0
        below = [_most_at_once(child, own, known) for child in module.children()]
        known[module] = own.get(module, 0) + max(below, default=0)
    return known[module]
