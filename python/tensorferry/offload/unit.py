"""The weights of one module, which are read, shown and written together."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from .._core import Operation
from .._memory.stored_parameter import StoredParameter
from .._memory.values import Values
from .._memory.weight_memory import WeightBuffer


class Unit:
    """The weights of a module. They lie in one buffer and are read, shown and written together."""

    def __init__(
        self,
        buffer: WeightBuffer,
        unwritten: Unwritten,
        is_part: bool = False,
        recurs: bool = True,
    ) -> None:
        """The unit adds itself to `unwritten` when its memory becomes newer than the drive.
        `is_part`: another unit has its weights, too. `recurs`: what uses it in a pass is expected
        to use it in the next."""
        self.is_part = is_part
        self.recurs = recurs
        self.buffer = buffer
        self.parameters: list[StoredParameter] = []
        self.nbytes = 0
        self.users = 0  # how many callers need it in memory
        self.shown = False  # whether its parameters have its memory
        self.moved = False  # whether they have ever had it
        self._versions: list[int | None] = []  # of its parameters when they were shown
        self._is_changed = False  # whether all of it is known to have changed since
        self._writes: list[Operation] = []  # from its memory, until they have succeeded
        self._failure: Exception | None = None  # of a write that could not begin
        self._unwritten = unwritten

    def add(self, param: torch.nn.Parameter | None, values: Values) -> None:
        """Adds a parameter, or a part of one, whose values are on the drive."""
        self.add_stored(StoredParameter(param, values, self.buffer, self.nbytes))

    def add_stored(self, stored: StoredParameter) -> None:
        """The same for one that lies in its buffer, from byte `nbytes` on."""
        self.nbytes += stored.values.slot_bytes
        self.parameters.append(stored)

    def parameter_at(self, offset: int) -> StoredParameter:
        """Returns the parameter at this byte of its memory."""
        return next(stored for stored in reversed(self.parameters) if stored.offset <= offset)

    @property
    def memory(self) -> torch.Tensor | None:
        """Its memory, also while reads fill it; None if it has none."""
        return self.buffer.memory

    # --- reading ---

    def begin(self, memory: torch.Tensor) -> None:
        """Starts to read its weights into `memory`."""
        self._check_failure()
        self.buffer.hold(memory)
        try:
            with self.buffer.reading():
                for stored in self.parameters:
                    for read in stored.load(memory):
                        self.buffer.reads.append((stored.offset, read))
        except BaseException:
            self.buffer.forget()
            raise

    # --- what its parameters show ---

    def show(self) -> None:
        """Gives its parameters their values in its memory."""
        self.check_written()  # memory must not change while it is written
        for stored in self.parameters:
            stored.check_unchanged()
            stored.watch()
        self.buffer.note_use()
        try:
            for stored in self.parameters:
                stored.show(stored.of(self.buffer.held))
        except BaseException:
            self.show_nothing()
            raise
        self.note_versions()
        self.shown = True

    def hide(self) -> None:
        """Starts to write its weights if they have changed, and takes them from its parameters."""
        try:
            if self.is_changed():
                self.write_back()
        finally:
            self.show_nothing()

    def show_nothing(self) -> None:
        """Takes the values from its parameters."""
        self.shown = False
        for stored in self.parameters:
            stored.show(stored.absent)

    def adopt(self, memory: torch.Tensor, empty: Collection[torch.nn.Parameter]) -> None:
        """The first time: copies the values of its parameters to `memory` and shows them there. The
        parameters in `empty` have no values yet."""
        self.buffer.hold(memory)
        self.users = 1
        with torch.no_grad():
            for stored in self.parameters:
                own = None if stored.param in empty else stored.own_values()
                if own is not None:
                    stored.of(memory).copy_(own)
            for stored in self.parameters:  # only when all are copied
                stored.show(stored.of(memory))
        self.moved = True

    def move_out(self) -> None:
        """After adopt(): starts to write the values to the drive."""
        self.users = 0
        try:
            self.write_back()
        finally:
            self.show_nothing()

    def copies(self) -> list[torch.Tensor]:
        """Returns copies of the values in its memory."""
        return [stored.of(self.buffer.held).clone() for stored in self.parameters]

    def end(self, values: Sequence[torch.Tensor] | None = None) -> None:
        """Gives its parameters these values, or none, and forgets them."""
        for stored, value in zip(self.parameters, values or ()):
            stored.restore(value)
        for stored in self.parameters:
            stored.end()
        self.buffer.forget()

    # --- changes ---

    def note_versions(self) -> None:
        """Says that the present values of its parameters need not be written."""
        self._versions = [stored.version for stored in self.parameters]
        self._is_changed = False

    def note_change(self) -> None:
        """Says that all its weights have changed, also where autograd has not seen it."""
        self._is_changed = True
        for stored in self.parameters:
            stored.note_change()

    def is_changed(self) -> bool:
        return bool(self._changed())

    def _changed(self) -> set[StoredParameter]:
        """Returns the parameters that somebody has changed since they were shown."""
        if self._is_changed:
            return set(self.parameters)
        shown = zip(self.parameters, self._versions)
        changed = {stored for stored, version in shown if stored.version != version}
        memory = self.buffer.held
        return changed | {stored for stored in self.parameters if stored.is_elsewhere(memory)}

    # --- writing ---

    def check_writable(self) -> None:
        """Raises RuntimeError, with a name, if nobody may change one of its weights."""
        for stored in self.parameters:
            stored.values.check_writable()

    def write_back(self) -> None:
        """Starts to write the values that its parameters show."""
        try:
            for stored in self._changed():
                stored.values.check_writable()
        except RuntimeError:
            self.buffer.forget()  # the next use reads the values as they are
            raise
        # Until all writes are under way: after Ctrl-C the drive has older values.
        self._failure = RuntimeError("weights were written only in part: load a checkpoint")
        self._unwritten.add(self)
        for stored in self._changed():
            self.buffer.note_newest(stored.offset)
        for stored in self.parameters:
            if stored.is_elsewhere(self.buffer.held):
                stored.collect(self.buffer.held)
        self._write()

    def _write(self) -> None:
        self.forgo_writes()  # newer values replace theirs
        try:
            for stored in self.parameters:
                if not self.buffer.has_older(stored.offset):
                    for write in stored.save(self.buffer.held):
                        self._writes.append(write)
        except BaseException as error:
            if isinstance(error, OSError):
                self._failure = copy.copy(error)  # without its frames
            else:
                self._failure = RuntimeError(
                    f"weights were written only in part ({error!r}): load a checkpoint"
                )
            raise
        finally:
            self._unwritten.add(self)

    def forget_written(self) -> bool:
        """Returns whether all its writes have succeeded; then it lets go of them."""
        if self.has_failed() or not all(write.done() for write in self._writes):
            return False
        self._wait_written()
        return True

    def has_failed(self) -> bool:
        """Returns whether its memory is newer than the drive and could not be written."""
        return self._failure is not None or any(
            write.done() and write.exception() is not None for write in self._writes
        )

    def check_written(self) -> None:
        """Waits until the drive has the values of its memory, and repeats failed writes once. Until
        then its memory must stay: the drive has older values."""
        try:
            self._wait_written()
        except (OSError, RuntimeError):
            if self.memory is None:
                raise
            self._write()
            self._wait_written()

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise copy.copy(self._failure)

    def _wait_written(self) -> None:
        self._check_failure()
        for write in self._writes:
            write.wait()
        self._writes = []

    def forgo_writes(self) -> None:
        """Says that the values of its memory need not reach the drive any more."""
        for write in self._writes:
            with contextlib.suppress(OSError):
                write.wait()
        self._writes, self._failure = [], None


class Unwritten:
    """The units whose memory may be newer than the drive, by the order of their last writes."""

    def __init__(self) -> None:
        self._units: list[Unit] = []

    def __bool__(self) -> bool:
        return bool(self._units)

    def add(self, unit: Unit) -> None:
        """Adds a unit, and removes those whose writes have succeeded."""
        others = [
            other for other in self._units if other is not unit and not other.forget_written()
        ]
        self._units = [*others, unit]

    def settle(self) -> None:
        """Waits until the drive has the values of all of them."""
        each(Unit.check_written, self._units)


def each(function: Callable[[Unit], None], units: Iterable[Unit]) -> None:
    """Calls the function for every unit, even if some fail; then raises the first failure."""
    failure = None
    for unit in units:
        try:
            function(unit)
        except (OSError, RuntimeError) as error:
            failure = failure or error
    if failure is not None:
        raise failure
