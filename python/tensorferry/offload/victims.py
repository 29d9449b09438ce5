"""Which units give way to one that needs memory."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping

from .unit import Unit


def cheapest_stretch(
    resident: Iterable[Unit], costs: Mapping[Unit, float], memory: range, nbytes: int
) -> list[Unit]:
    """Returns the units that give way to one of `nbytes` bytes at the least cost. They lie side by
    side, with nothing between them but free memory. Returns none if there are no such units.

    `memory` are the addresses in which `resident` units lie, `costs` those that may go. If the
    cheapest unit went, and then the next, there would soon be enough bytes, but not in one piece.
    Where the cost does not decide, the first of `resident` go."""
    places = [(unit.buffer.held.data_ptr(), unit) for unit in resident]
    ages = {unit: age for age, (_, unit) in enumerate(places)}
    inside = sorted((place for place in places if place[0] in memory), key=lambda place: place[0])

    def cost(units: list[Unit]) -> tuple[float, int]:
        return sum(costs[unit] for unit in units), max(ages[unit] for unit in units)

    return min(_stretches(inside, costs, memory, nbytes), key=cost, default=[])


def _stretches(
    places: list[tuple[int, Unit]], going: Container[Unit], memory: range, nbytes: int
) -> Iterator[list[Unit]]:
    """Yields the shortest stretch from each place on. `places` are (address, unit), in order."""
    begins = [*(address for address, _ in places), memory.stop]
    ends = [memory.start, *(address + unit.nbytes for address, unit in places)]
    for first, free_from in enumerate(ends):
        stretch: list[Unit] = []
        for number in range(first, len(begins)):
            if begins[number] - free_from >= nbytes:
                if stretch:
                    yield stretch
                break
            if number == len(places) or places[number][1] not in going:
                break
            stretch.append(places[number][1])
