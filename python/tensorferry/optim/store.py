"""The states of an optimizer on the drive and in memory, and the buffers that they pass through."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .._memory.gpu_pool import GpuPool
from .._memory.waits import COPIES, DRIVE, Waits
from .kept import GpuWork

if TYPE_CHECKING:
    from torch import Tensor

    from .._core import Operation, SwapBuffer, SwapSpace
    from .._memory.reading import Reading
    from .._memory.stored_parameter import StoredParameter
    from .kept import KeptStates
    from .sub_groups import Shard, StateField, SubGroup


@dataclass
class Moved:
    """Bytes that a drive has moved."""

    read: int
    written: int


class StateStore:
    """Reads and writes the records of sub-groups, one buffer each, and remembers failed writes.

    The drive holds the states of the last step only while `spoiled` is None: otherwise that says
    why they cannot be used."""

    def __init__(self, space: SwapSpace, buffers_bytes: int, kept: KeptStates) -> None:
        self.space = space
        self.kept = kept
        self.spoiled: str | None = None
        self.writes: list[Operation | GpuWork] = []  # under way, oldest first
        self.buffers_bytes = buffers_bytes  # of all buffers together, on the device that steps
        self.waits = Waits()
        self.weight_bytes = Moved(0, 0)  # of weights on the drive, moved by steps
        self._gpu_pools: dict[torch.device, GpuPool] = {}

    @property
    def closed(self) -> bool:
        return self.space.closed

    # --- buffers ---

    def take(self, device: torch.device, nbytes: int) -> Tensor:
        """Returns a buffer on the device that steps, waiting until enough of them are free. What
        uses it must call note_computing()."""
        if device.type == "cpu":
            with self.waits.on(DRIVE, "wait for room"):
                return _tensor(self.space.take(nbytes))
        pool = self._pool(device)
        while (memory := pool.take_unnoted(nbytes, beyond=not self.writes)) is None:
            self._wait(self.writes[0], "room")
            del self.writes[0]  # not before: Ctrl-C must not lose one that has failed
        return memory

    def take_before(
        self, device: torch.device, nbytes: int, unfinished: Callable[[], Operation | None]
    ) -> Tensor | None:
        """Returns a buffer, or None if none frees up before `unfinished` returns no read any more.
        On a GPU it never waits."""
        if device.type != "cpu":
            self.writes = [
                one for one in self.writes if not (isinstance(one, GpuWork) and one.done())
            ]
            return self._pool(device).take_unnoted(nbytes)
        with self.waits.on(DRIVE, "wait for room"):
            while True:
                operation = unfinished()
                try:
                    timeout = 0 if operation is None else None
                    return _tensor(self.space.take(nbytes, timeout, until=operation))
                except TimeoutError:
                    if operation is None:
                        return None

    def note_computing(self, memory: Tensor) -> None:
        """Says that the current stream has got all of its work on a buffer. Others get the buffer
        only after that."""
        if not memory.is_cpu:
            self.writes.append(GpuWork(memory))

    def reading(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """Inside, reads into buffers on this device start at once."""
        if device.type == "cpu":
            return contextlib.nullcontext()
        return self._pool(device).reading()

    def _pool(self, device: torch.device) -> GpuPool:
        if device not in self._gpu_pools:
            self._gpu_pools[device] = GpuPool(device, self.buffers_bytes)
        return self._gpu_pools[device]

    # --- records ---

    def read(self, group: SubGroup, memory: Tensor) -> Operation | GpuWork | None:
        """Starts to bring in the record of a sub-group. Returns None if `memory` has it already."""
        if self.kept.has(group):
            return self.kept.read(group, memory)
        return self.space.get(group.key, memory[: group.record_bytes])

    def write(self, group: SubGroup, fields: list[StateField], memory: Tensor) -> None:
        """Starts to put a new record in the place of the old one."""
        group.fields = fields
        if not self.kept.admits(group):
            self.writes.append(self.space.put(group.key, memory[: group.record_bytes]))
            self.kept.forget(group)
            return
        copy = self.kept.keep(group, memory)
        if copy is not None:
            self.writes.append(copy)
        self.space.drop(group.key)

    @contextlib.contextmanager
    def all_on_drive(self, groups: Iterable[SubGroup]) -> Iterator[None]:
        """Inside, the drive has the records of all these sub-groups, to be mapped: also of those
        that stay in memory, where a copy might not fit."""
        written = [group for group in groups if self.kept.has(group)]
        try:
            for group in written:
                self.space.put(group.key, self.kept.record(group)).wait()
            yield
        finally:
            for group in written:
                self.space.drop(group.key)

    def read_weights(self, stored: StoredParameter, memory: Tensor, shard: Shard) -> list[Reading]:
        """Starts to bring in the values of a shard that the drive has. Returns the reads."""
        reads = stored.read(memory, shard.begin, shard.end)
        if reads:  # or they were in memory
            self.weight_bytes.read += shard.nbytes
        return reads

    def write_weights(self, stored: StoredParameter, memory: Tensor, shard: Shard) -> None:
        """Starts to write the values of a shard. settle() waits for that too."""
        self.writes += stored.write(memory, shard.begin, shard.end)
        self.weight_bytes.written += shard.nbytes

    def drop(self, group: SubGroup) -> None:
        """Forgets the record of a sub-group."""
        group.fields = []
        self.kept.forget(group)
        self.space.drop(group.key)

    def moved(self) -> Moved:
        """What drives have moved so far: states, gradients and, in steps, weights."""
        own = self.space.stats()
        return Moved(
            own["read_bytes"] + self.weight_bytes.read,
            own["written_bytes"] + self.weight_bytes.written,
        )

    # --- failures ---

    def settle(self) -> None:
        """Waits for all writes. Raises the first failure, and the states are spoiled then."""
        failed = None
        for operation in self.writes:
            try:
                self._wait(operation, "writes")
            except OSError as error:
                failed = failed or error
        self.writes = []  # not before: Ctrl-C must not lose one that has failed
        if failed is not None:
            self.spoil(
                "the drive did not take what the last step computed, so some states are those of "
                f"the step before ({failed})"
            )
            raise failed

    def _wait(self, operation: Operation | GpuWork, what: str) -> None:
        if isinstance(operation, GpuWork):
            with self.waits.on(COPIES, "wait for copies"):
                operation.wait()
        else:
            with self.waits.on(DRIVE, f"wait for {what}"):
                operation.wait()

    def spoil(self, why: str) -> None:
        """The states cannot be used from now on. The first reason stays."""
        self.spoiled = self.spoiled or why

    def check_usable(self) -> None:
        if self.closed:
            raise RuntimeError("this optimizer is closed")
        if self.spoiled is not None:
            raise RuntimeError(self.spoiled + "; load a checkpoint (load_state_dict)")

    def close(self) -> None:
        try:
            self.settle()
        finally:
            self.kept.close()
            self.space.close()


def _tensor(buffer: SwapBuffer) -> Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8)
