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
        self._places: dict[SubGroup, torch.device] = {}  # of those that stay
        self._memory: dict[SubGroup, Tensor] = {}  # also while a record is on its way there
        self._kept: set[SubGroup] = set()  # whose record memory has
        self._writes: dict[SubGroup, GpuWork] = {}  # the last one of a GPU into this memory
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    # --- the choice ---

    def choose(self, groups: Iterable[SubGroup]) -> None:
        """Chooses what stays. What has been chosen before is kept; more is added if there is room:
        for groups that are new, or because states take less than was thought."""
        groups = list(groups)
        before = len(self._places)
        self._places = {g: place for g in groups if (place := self._places.get(g)) is not None}
        for device in {group.device for group in groups if group.device.type != "cpu"}:
            self._choose_on(device, [group for group in groups if group.device == device])
        self._choose_on(torch.device("cpu"), groups)
        if len(self._places) > before:
            self._tell(groups)

    def _choose_on(self, place: torch.device, groups: list[SubGroup]) -> None:
        limit = self._limit(place, sum(_size(group) for group in groups))
        room = limit - sum(_size(g) for g, where in self._places.items() if where == place)
        others = [group for group in groups if group not in self._places and _size(group) > 0]
        for group in spread(others, _size, room):
            self._places[group] = place
        if place in self._portions:
            self._portions[place].hold(
                sum(_size(g) for g, where in self._places.items() if where == place)
            )

    def _limit(self, place: torch.device, total: int) -> int:
        limit = self._limits[place.type]
        if isinstance(limit, int):
            return limit
        if isinstance(limit, MemoryBudget):
            if place not in self._portions:
                self._portions[place] = limit.portion(place)
            return self._portions[place].room
        if limit != "auto":
            return int(total * _share(limit))
        if place not in self._auto:
            self._auto[place] = auto_bytes(place)
        return self._auto[place]

    def _tell(self, groups: list[SubGroup]) -> None:
        for place in sorted(set(self._places.values()), key=str):
            here = [group for group in self._places if self._places[group] == place]
            _log.info(
                "%d of %d sub-groups keep their states in memory (%s): %d of %d bytes",
                len(here),
                len(groups),
                place,
                sum(_size(group) for group in here),
                sum(_size(group) for group in groups),
            )

    # --- records ---

    def stays(self, group: SubGroup) -> bool:
        """Whether the record of a sub-group is to stay in memory."""
        return group in self._places

    def has(self, group: SubGroup) -> bool:
        """Whether memory has the record of a sub-group now."""
        return group in self._kept

    def record(self, group: SubGroup) -> Tensor:
        """The record of a sub-group that memory has now."""
        self._wait(group)
        return self._memory[group][: group.record_bytes]

    def memory(self, group: SubGroup, nbytes: int) -> Tensor:
        """The memory for the record of a sub-group that stays, with what it has kept so far."""
        held = self._memory.get(group)
        if held is not None and held.numel() >= nbytes:
            return held
        place = self._places[group]
        with torch.inference_mode(False):
            if place.type == "cpu" and group.device.type != "cpu":
                memory = torch.frombuffer(PinnedBuffer(nbytes), dtype=torch.uint8)
            else:
                memory = torch.empty(nbytes, dtype=torch.uint8, device=place)
        if held is not None:
            self._wait(group)
            memory[: held.numel()].copy_(held)
        self._memory[group] = memory
        return memory

    def lent(self, group: SubGroup, nbytes: int) -> Tensor | None:
        """The memory of a record that can be stepped where it stays; None if the record streams, or
        stays in other memory than that of its parameters."""
        if self._places.get(group) != group.device:
            return None
        return self.memory(group, nbytes)

    def read(self, group: SubGroup, memory: Tensor) -> GpuWork | None:
        """Starts to bring a record into other memory. Returns the copy, if that goes on."""
        record = self._memory[group]
        if record.data_ptr() == memory.data_ptr():
            return None
        self._wait(group)
        nbytes = group.record_bytes
        memory[:nbytes].copy_(record[:nbytes], non_blocking=True)
        return None if memory.is_cpu else GpuWork(memory)

    def keep(self, group: SubGroup, memory: Tensor) -> GpuWork | None:
        """Takes the record of a sub-group that stays. Returns the copy, if that goes on."""
        nbytes = group.record_bytes
        record = self.memory(group, nbytes)
        self._kept.add(group)
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
        self._kept.discard(group)
        self._memory.pop(group, None)

    @property
    def nbytes(self) -> int:
        """Bytes of the records that memory has now."""
        return sum(group.record_bytes for group in self._kept)

    def close(self) -> None:
        for group in list(self._memory):
            self.forget(group)
        for portion in self._portions.values():
            portion.close()

    def _wait(self, group: SubGroup) -> None:
        """Waits until the GPU has written the record of the last step."""
        if (copy := self._writes.pop(group, None)) is not None:
            copy.wait()

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


def _size(group: SubGroup) -> int:
    """Bytes of the record of a sub-group, or the most that it may take while some of its shards
    have no states yet."""
    known = {field.shard for field in group.fields}
    if known.issuperset(group.shards):
        return group.record_bytes
    return max(group.record_bytes, group.spare_bytes)
