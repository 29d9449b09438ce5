"""What stays in memory, of things that are used in turn: some that are spread evenly, so that the
drive reads the others while torch computes with these."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from typing import TypeVar

Item = TypeVar("Item", bound=Hashable)


def spread(items: Collection[Item], size: Callable[[Item], int], room: int) -> list[Item]:
    """Returns as many of the items as there is room for, spread evenly."""
    total = sum(size(item) for item in items)
    chosen: dict[Item, None] = {}
    due, taken = 0.0, 0
    for item in items:
        nbytes = size(item)
        due += nbytes * min(room / total, 1.0) if total else 0.0
        if taken + nbytes <= room and taken + nbytes / 2 <= due:
            chosen[item] = None
            taken += nbytes
    for item in items:  # what is left for want of evenness
        if item not in chosen and taken + size(item) <= room:
            chosen[item] = None
            taken += size(item)
    return list(chosen)
