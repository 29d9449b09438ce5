"""States that stay in memory: a tier above the drive.

Every step uses all states in turn, so what was used last is needed last. To keep what was used
recently would never help: the same sub-groups stay in memory for good, and the others stream. Those
that stay are spread over the step, so that the drive reads while torch computes them."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._core import PinnedBuffer
from .._memory.available import auto_bytes
from .._memory.budget import MemoryBudget, Portion
from .._memory.spreading import spread

if TYPE_CHECKING:
    from .sub_groups import SubGroup

_log = logging.getLogger("tensorferry")

# Bytes, a share of all states such as "50%", "auto", or what a budget has left.
Limit = int | str | MemoryBudget


def check_limit(name: str, limit: Limit) -> None:
    """Refuses what is not a limit."""
    if limit == "auto" or isinstance(limit, MemoryBudget):
        return
    if isinstance(limit, int) and limit >= 0:
        return
    if isinstance(limit, str) and re.fullmatch(r"\d+(\.\d+)?%", limit) and _share(limit) <= 1:
        return
    raise ValueError(
        f'{name} is {limit!r}: give a number of bytes, a share of all states such as "50%", '
        '"auto", or a MemoryBudget'
    )


def _share(limit: str) -> float:
    return float(limit[:-1]) / 100


class GpuWork:
    """What a stream of a GPU does with some memory, such as a copy between it and that of the
    system. It holds the memory until somebody has seen that it is done."""

    def __init__(self, memory: Tensor) -> None:
        """What the current stream has been given so far."""
        self._memory: Tensor | None = memory
        self._device = memory.device
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(memory.device))

    def done(self) -> bool:
        if self._event.query():
            self._memory = None
        return self._memory is None

    def wait(self) -> None:
        self._event.synchronize()
        self._memory = None

    def precede(self) -> None:
        """What the current stream is given from now on begins after it. Nobody waits here."""
        torch.cuda.current_stream(self._device).wait_event(self._event)
        self._memory = None

    def cancel(self) -> None:
        """It cannot be cancelled."""


class KeptStates:
    """The records of sub-groups that stay in memory, within a limit for the memory of the system
    and another for that of each GPU."""

    def __init__(self, max_cpu_bytes: Limit, max_gpu_bytes: Limit) -> None:
        check_limit("max_cpu_bytes", max_cpu_bytes)
        check_limit("max_gpu_bytes", max_gpu_bytes)
        self._limits = {"cpu": max_cpu_bytes, "cuda": max_gpu_bytes}
        self._auto: dict[torch.device, int] = {}  # what "auto" was found to be
        self._portions: dict[torch.device, Portion] = {}  # of budgets
        self._sizes: dict[SubGroup, int] = {}  # of all records, or the most that they may take
        self._places: dict[SubGroup, torch.device] = {}  # of those that stay
        self._memory: dict[SubGroup, Tensor] = {}  # of the records that memory has
        self._writes: dict[SubGroup, GpuWork] = {}  # the last one of a GPU into this memory
        self._reads: dict[SubGroup, GpuWork] = {}  # and the last one out of it
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    # --- the choice ---

    def choose(self, groups: Iterable[SubGroup]) -> None:
        """Chooses what stays. What has been chosen before is kept, as long as there is room for it;
        more is added for groups that are new, or because states take less than was thought."""
        self._sizes = {group: _size(group) for group in groups}
        before = len(self._places)
        self._places = {g: place for g in self._sizes if (place := self._places.get(g)) is not None}
        for device in {group.device for group in self._sizes if group.device.type != "cpu"}:
            self._choose_on(device)
        self._choose_on(torch.device("cpu"))
        if len(self._places) > before:
            self._tell()

    def _choose_on(self, place: torch.device) -> None:
        room = self._limit(place) - self._planned_bytes(place)
        own = [group for group, where in self._places.items() if where == place]
        while own and room < 0:
            room += self._sizes[own[-1]]
            del self._places[own.pop()]
        others = [
            group
            for group, size in self._sizes.items()
            if group not in self._places and size > 0 and _may_stay(group, place)
        ]
        for group in spread(others, self._sizes.__getitem__, room):
            self._places[group] = place
        self._note_planned(place)

    def admits(self, group: SubGroup) -> bool:
        """Whether the record of a sub-group, as it has become, is to stay in memory: not if it has
        grown beyond what was thought, and beyond the limit."""
        place = self._places.get(group)
        if place is None:
            return False
        if group.record_bytes > self._sizes[group]:
            self._sizes[group] = group.record_bytes
            if self._planned_bytes(place) > self._limit(place):
                del self._places[group]
            self._note_planned(place)
        return group in self._places

    def _planned_bytes(self, place: torch.device) -> int:
        return sum(self._sizes[g] for g, where in self._places.items() if where == place)

    def _note_planned(self, place: torch.device) -> None:
        if place in self._portions:
            self._portions[place].hold(self._planned_bytes(place))

    def _limit(self, place: torch.device) -> int:
        limit = self._limits[place.type]
        if isinstance(limit, int):
            return limit
        if isinstance(limit, MemoryBudget):
            if place not in self._portions:
                self._portions[place] = limit.portion(place)
            return self._portions[place].room
        if limit != "auto":
            total = sum(size for g, size in self._sizes.items() if _may_stay(g, place))
            return round(total * _share(limit))
        if place not in self._auto:
            self._auto[place] = auto_bytes(place)
        return self._auto[place]

    def _tell(self) -> None:
        for place in sorted(set(self._places.values()), key=str):
            here = [group for group, where in self._places.items() if where == place]
            _log.info(
                "%d of %d sub-groups keep their states in memory (%s): %d of %d bytes",
                len(here),
                len(self._sizes),
                place,
                self._planned_bytes(place),
                sum(self._sizes.values()),
            )

    # --- records ---

    def stays(self, group: SubGroup) -> bool:
        """Whether the record of a sub-group is to stay in memory."""
        return group in self._places

    def has(self, group: SubGroup) -> bool:
        """Whether memory has the record of a sub-group now."""
        return group in self._memory

    def record(self, group: SubGroup) -> Tensor:
        """The record of a sub-group that memory has now."""
        self._wait(group)
        return self._memory[group][: group.record_bytes]

    def lent(self, group: SubGroup, nbytes: int) -> Tensor | None:
        """The memory of a record that can be stepped where it stays; None if the record streams,
        needs more memory, or stays in other memory than that of its parameters."""
        held = self._memory.get(group)
        if held is None or held.numel() < nbytes or self._places.get(group) != group.device:
            return None
        return held

    def read(self, group: SubGroup, memory: Tensor) -> GpuWork | None:
        """Starts to bring a record into other memory. Returns the copy, if that goes on."""
        record = self._memory[group]
        if record.data_ptr() == memory.data_ptr():
            return None
        self._wait(group)
        nbytes = group.record_bytes
        memory[:nbytes].copy_(record[:nbytes], non_blocking=True)
        if memory.is_cpu:
            return None
        copy = self._reads[group] = GpuWork(memory)
        return copy

    def keep(self, group: SubGroup, memory: Tensor) -> GpuWork | None:
        """Takes the record of a sub-group that stays. Returns the copy, if that goes on."""
        nbytes = group.record_bytes
        record = self._memory.get(group)
        if record is None or record.numel() != nbytes or record.device != self._places[group]:
            del record
            self.forget(group)  # first: there may be no room for both
            record = self._memory[group] = self._new_memory(group, nbytes)
        if record.data_ptr() == memory.data_ptr():
            return None
        if memory.is_cpu or not record.is_cpu:
            record[:nbytes].copy_(memory[:nbytes])
            return None
        stream = self._stream(memory.device)
        stream.wait_stream(torch.cuda.current_stream(memory.device))
        with torch.cuda.stream(stream):
            record[:nbytes].copy_(memory[:nbytes], non_blocking=True)
            copy = self._writes[group] = GpuWork(memory)
        return copy

    def forget(self, group: SubGroup) -> None:
        """Frees the memory of a record."""
        self._wait(group)
        if (copy := self._reads.pop(group, None)) is not None:
            copy.wait()
        self._memory.pop(group, None)

    def nbytes(self, kind: str) -> int:
        """Bytes of the records that memory of a kind, "cpu" or "cuda", has now."""
        return sum(m.numel() for m in self._memory.values() if m.device.type == kind)

    def close(self) -> None:
        for group in list(self._memory):
            self.forget(group)
        for portion in self._portions.values():
            portion.close()

    def _new_memory(self, group: SubGroup, nbytes: int) -> Tensor:
        place = self._places[group]
        with torch.inference_mode(False):
            if place.type == "cpu" and group.device.type != "cpu":
                return torch.frombuffer(PinnedBuffer(nbytes), dtype=torch.uint8)
            return torch.empty(nbytes, dtype=torch.uint8, device=place)

    def _wait(self, group: SubGroup) -> None:
        """Waits until the GPU has written the record of the last step."""
        if (copy := self._writes.pop(group, None)) is not None:
            copy.wait()

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


def _may_stay(group: SubGroup, place: torch.device) -> bool:
    return place.type == "cpu" or group.device == place


def _size(group: SubGroup) -> int:
    """Bytes of the record of a sub-group, or the most that it may take while some of its shards
    have no states yet."""
    known = {field.shard for field in group.fields}
    if known.issuperset(group.shards):
        return group.record_bytes
    return max(group.record_bytes, group.spare_bytes)
