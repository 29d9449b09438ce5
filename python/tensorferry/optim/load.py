"""A sub-group on its way into memory, and while it is stepped there."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from .._memory.reading import Reading
from .kept import GpuWork
from .sub_groups import Shard, StateField, SubGroup

if TYPE_CHECKING:
    from .._core import Operation

Work = tuple[SubGroup, list[Shard]]  # a sub-group, and those of its shards that have a gradient
Until = Callable[[], "Operation | None"]  # returns a read to wait for, or None


@dataclasses.dataclass
class Load:
    """A sub-group on its way into a buffer: the record of its states, then the values that are on
    the drive too, then gradients."""

    group: SubGroup
    active: list[Shard]  # those that have a gradient
    record: Tensor
    stored_values: dict[Shard, Tensor]  # memory for the values of weights on the drive
    gradients: dict[Shard, Tensor]  # memory for those on the drive
    buffer: Tensor | None  # None if all of it stays in memory
    operations: list[Operation | Reading | GpuWork] = dataclasses.field(default_factory=list)

    def unfinished(self) -> Operation | None:
        """A read of the drive that is not done yet."""
        reads = (one for one in self.operations if not isinstance(one, GpuWork))
        reading = next((one for one in reads if not one.done()), None)
        return reading.operation if isinstance(reading, Reading) else reading

    def is_there(self) -> bool:
        """Whether nothing of it is on its way any more."""
        return all(operation.done() for operation in self.operations)

    def wait(self) -> None:
        """Waits until the drive has brought it. What the current stream of a GPU is given from now
        on waits for copies."""
        for operation in self.operations:
            if isinstance(operation, GpuWork):
                operation.precede()
            else:
                operation.wait()

    def cancel(self) -> None:
        """Ends it before it has arrived."""
        for operation in self.operations:
            operation.cancel()
            with contextlib.suppress(OSError):
                operation.wait()

    def values(self, shard: Shard) -> Tensor:
        if shard not in self.stored_values:
            return shard.values()
        memory = self.stored_values[shard][: shard.nbytes]
        return shard.shaped(memory.view(shard.param.dtype))


@dataclasses.dataclass
class Record:
    """A record in memory, and its states there."""

    memory: Tensor
    fields: list[StateField]
    states: list[Tensor]  # of each field

    def has(self, states: dict[Shard, dict[str, Tensor]]) -> bool:
        """Whether these are its states, all of them and no others."""
        if sum(map(len, states.values())) != len(self.fields):
            return False
        own = zip(self.fields, self.states)
        return all(states[field.shard].get(field.name) is state for field, state in own)


@dataclasses.dataclass
class Stepping:
    """A sub-group while the optimizer has its tensors."""

    load: Load
    record: Record
    states: dict[Shard, dict[str, Tensor]]  # that go to the drive
    tensors: dict[Shard, Tensor] = dataclasses.field(default_factory=dict)  # that are stepped
    # What stands for states in the record.
    packed: dict[Shard, dict[str, Tensor]] = dataclasses.field(default_factory=dict)
