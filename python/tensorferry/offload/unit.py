"""The weights of one module, which come and go together."""

import contextlib
import copy

import torch

from .._memory.layout import page_up
from .._memory.stored_parameter import OlderValues


class Unit:
    """The parameters of a module: they come and go together, in one stretch of memory."""

    def __init__(self, residency):
        self.residency = residency
        self.homes = []
        self.nbytes = 0
        self.memory = None  # while it is there, or on its way
        self.beyond = False  # is that memory beyond the limit?
        self.operations = []  # (home, operation) that bring it
        self._older = {}  # home -> how it failed to be written, where its memory has older values
        self.writes = []  # of what its memory holds, until they are known to be good
        self.failure = None  # of a write that could not even begin
        self.users = 0
        self.shown = False  # do its parameters have its memory?
        self.moved = False  # have they ever had it?
        self._versions = []  # of its parameters when they were shown
        self._is_changed = False  # is all of it known to have changed since?
        residency.units.append(self)

    def add(self, home):
        home.offset = self.nbytes
        self.nbytes += page_up(home.nbytes)
        self.homes.append(home)

    def home_at(self, offset):
        """The home of the parameter that has this byte of its memory."""
        return next(home for home in reversed(self.homes) if home.offset <= offset)

    def settled_memory(self):
        """Its memory, if all bytes are there."""
        if self.memory is None or not self.is_settled():
            return None
        self.wait()
        return self.memory

    def is_settled(self):
        return all(operation.done() for _, operation in self.operations)

    def wait(self):
        try:
            for home, operation in self.operations:
                try:
                    operation.wait()
                except OlderValues as error:
                    self._older[home] = error.with_traceback(None)
        except BaseException:
            self.forget()
            raise
        self.operations = []

    def check_newest(self, *homes):
        """Refuses to use memory that has other values than were last computed, of these or of all
        homes."""
        for home, error in self._older.items():
            if not homes or home in homes:
                raise OlderValues(str(error)) from error.__cause__

    def begin(self, memory):
        """Starts to bring it into memory."""
        self._check_failure()
        self.hold(memory)
        try:
            with self.residency.reading():
                for home in self.homes:
                    # Not through home.read(): the memory it would find is the one to be filled.
                    for key, at, nbytes in home._pieces(0, home.numel):
                        at += home.offset
                        self.operations.append((home, home.get(key, memory[at : at + nbytes])))
        except BaseException:
            self.forget()
            raise

    def hold(self, memory):
        self.memory = memory
        self.residency.by_storage[memory.untyped_storage().data_ptr()] = self

    def forget(self):
        """Lets go of its memory, which is free when nobody else holds it."""
        if self.memory is None:
            return
        self.residency.by_storage.pop(self.memory.untyped_storage().data_ptr(), None)
        if self.residency.room is not None:
            self.residency.room.note_end(self.nbytes)
        self.memory = None
        self.beyond = False
        self.operations = []
        self._older = {}

    def show(self):
        self.check_written()  # what is being written must not change
        for home in self.homes:
            home.check_unchanged()
        self.residency.note_use(self.memory)
        try:
            for home in self.homes:
                home.show(home.of(self.memory))
        except BaseException:
            self.take_away()
            raise
        self.note_versions()
        self.shown = True

    def note_versions(self):
        """What is in the parameters now need not be written."""
        self._versions = [home.version for home in self.homes]
        self._is_changed = False

    def note_change(self):
        """All that it shows has changed, also where autograd has not seen it."""
        self._is_changed = True
        for home in self.homes:
            if home.version is not None:
                torch.autograd.graph.increment_version(home.param)

    def is_changed(self):
        return bool(self._changed())

    def hide(self):
        try:
            if self.is_changed():
                self.write_back()
        finally:
            self.take_away()

    def take_away(self):
        self.shown = False
        for home in self.homes:
            home.show(home.absent)

    def bring_in(self, empty):
        """The first time: from where the parameters are, if they have values, to its memory."""
        self.hold(self.residency.take(self))
        self.users = 1
        with torch.no_grad():
            for home in self.homes:
                if home.param not in empty:
                    home.of(self.memory).copy_(home.param)
            for home in self.homes:  # not before all are there
                home.param.data = home.of(self.memory)
        self.moved = True

    def bring_out(self):
        """And from there to the drive."""
        self.users = 0
        try:
            self.write_back()
        finally:
            self.take_away()

    def write_back(self):
        """Starts to write the values that its parameters show."""
        # Until they are all under way: Ctrl-C may come, and the drive has older ones.
        self.failure = RuntimeError("weights are half written")
        self.residency.note_writes(self)
        for home in self._older.keys() & self._changed():
            del self._older[home]
        for home in self.homes:
            if home.is_elsewhere(self.memory):
                home.collect(self.memory)
        self._write()

    def _changed(self):
        """The homes of what somebody has changed, as far as is known."""
        if self._is_changed:
            return set(self.homes)
        shown = zip(self.homes, self._versions)
        changed = {home for home, version in shown if home.version != version}
        return changed | {home for home in self.homes if home.is_elsewhere(self.memory)}

    def _write(self):
        for operation in self.writes:  # newer values follow: what becomes of these is no matter
            with contextlib.suppress(OSError):
                operation.wait()
        self.writes, self.failure = [], None
        try:
            for home in self.homes:
                if home in self._older:
                    continue
                for key, at, nbytes in home._pieces(0, home.numel):
                    at += home.offset
                    self.writes.append(home.put(key, self.memory[at : at + nbytes]))
        except BaseException as error:
            if isinstance(error, OSError):
                self.failure = copy.copy(error)  # without the frames that it comes from
            else:
                self.failure = RuntimeError(f"weights are half written: {error!r}")
            raise
        finally:
            self.residency.note_writes(self)

    def is_written(self):
        return all(operation.done() for operation in self.writes)

    def forget_written(self):
        """Lets go of what its writes have used, if they are all done and good."""
        if self.has_failed() or not self.is_written():
            return False
        self._wait_written()
        return True

    def has_failed(self):
        """Whether its memory is newer than the drive and could not be written."""
        return self.failure is not None or any(
            operation.done() and operation.exception() is not None for operation in self.writes
        )

    def check_written(self):
        """Waits until what its memory holds is on the drive. What has failed is tried once more:
        until it is good the memory stays, since the drive has older values."""
        try:
            self._wait_written()
        except (OSError, RuntimeError):
            if self.memory is None:
                raise
            self._write()
            self._wait_written()

    def _check_failure(self):
        if self.failure is not None:
            raise copy.copy(self.failure)

    def _wait_written(self):
        self._check_failure()
        for operation in self.writes:
            operation.wait()
        self.writes = []

    def forgo_writes(self):
        """What its memory holds need not reach the drive any more."""
        for operation in self.writes:
            with contextlib.suppress(OSError):
                operation.wait()
        self.writes, self.failure = [], None

    def values(self):
        """Copies of its parameters' values."""
        if (memory := self.settled_memory()) is not None:
            self.check_newest()
            return [home.of(memory).clone() for home in self.homes]
        self.residency.enter(self)
        try:
            return [home.of(self.memory).clone() for home in self.homes]
        finally:
            self.residency.leave(self)

    def end(self, values=None):
        """Its parameters get these values, or have none any more."""
        for home, value in zip(self.homes, values or ()):
            home.show(value)
        for home in self.homes:
            home.leave()
        self.forget()
