"""Which weights are in memory: those in use, those that come next, others while there is room."""

import bisect
import contextlib
import copy
import logging
import threading

import torch

from ._homes import OlderValues
from ._saved_weights import Place, SavedWeights
from ._subgroups import page_up
from ._tracing import span

_log = logging.getLogger("tensorferry")

# A pass is as long as that many uses at most; who never calls the whole model has no other.
_LONGEST_PASS = 1024


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


class Residency:
    """Decides which units are in memory. What is not in use gives way to what is needed sooner, by
    the order of the last pass."""

    def __init__(self, space, room=None):
        """`room` is the GpuRoom for the weights, where they are on a GPU."""
        self.space = space
        self.room = room
        self.device = torch.device("cpu") if room is None else room.device
        self.units = []
        self.by_storage = {}  # first address of its memory -> unit
        self._writing = []  # units whose memory may be newer than the drive
        self._lock = threading.RLock()
        self._order = []  # units in the order of the last pass, forward and backward
        self._positions = {}  # unit -> where it is in that order
        self._now = 0
        self._trace = []  # of this pass
        memory = space.stats()["buffer_bytes"] if room is None else room.nbytes
        self._window_bytes = min(max(memory * 2 // 5, 1 << 20), 256 << 20)
        self._misses = 0
        self._hits = 0
        self._overflows = 0

    # --- passes ---

    def begin_pass(self):
        with self._lock:
            if self._trace:
                self._order, self._trace = self._trace, []
                self._positions = {}
                for at, unit in enumerate(self._order):
                    self._positions.setdefault(unit, []).append(at)
            self._now = 0

    def _record(self, unit):
        if self._trace and self._trace[-1] is unit:
            return
        if len(self._trace) >= max(_LONGEST_PASS, 8 * len(self.units)):
            self.begin_pass()
        self._trace.append(unit)
        positions = self._positions.get(unit)
        if positions:
            at = bisect.bisect_left(positions, self._now)
            self._now = positions[at if at < len(positions) else 0] + 1

    def _next_use(self, unit):
        """How many steps ahead it is needed."""
        positions = self._positions.get(unit)
        if not positions:
            return len(self._order) + 1
        at = bisect.bisect_left(positions, self._now)
        if at < len(positions):
            return positions[at] - self._now
        return positions[0] + len(self._order) - self._now

    # --- memory ---

    def reading(self):
        return contextlib.nullcontext() if self.room is None else self.room.reading()

    def note_use(self, memory):
        if self.room is not None:
            self.room.note_use(memory)

    def take(self, unit, sooner_than=None):
        """Memory for a unit. With `sooner_than` only room of what is needed later than that many
        steps ahead is taken, and None comes back where there is not enough."""
        while True:
            if (memory := self._take_free(unit.nbytes)) is not None:
                return memory
            victims = [u for u in self.units if u.memory is not None and u.users == 0]
            if sooner_than is not None:  # what is on its way is not free at once
                victims = [u for u in victims if u.is_settled() and u.forget_written()]
            victim = max(victims, key=self._expendability, default=None)
            if victim and (sooner_than is None or self._next_use(victim) > sooner_than):
                try:
                    self._evict(victim)
                except (OSError, RuntimeError):  # what cannot be written stays: others may go
                    if all(u.has_failed() for u in victims):
                        raise
                continue
            if sooner_than is not None:
                return None
            return self._take_more(unit)

    def _expendability(self, unit):
        return not unit.has_failed(), self._next_use(unit)

    def _take_free(self, nbytes):
        if self.room is not None:
            try:
                return self.room.take(nbytes)
            except torch.OutOfMemoryError:
                return None
        try:
            buffer = self.space.take(nbytes, 0)
        except TimeoutError:
            return None
        with torch.inference_mode(False):  # autograd may want it later
            return torch.frombuffer(buffer, dtype=torch.uint8)

    def _evict(self, unit):
        unit.check_written()
        operations = unit.operations
        unit.forget()
        for _, operation in operations:  # until then the memory is not free
            with contextlib.suppress(OSError, OlderValues):  # nobody needs it any more
                operation.wait()

    def _take_more(self, unit):
        """All that is left is in use, or held by autograd or by writes under way."""
        if self._writing:
            with contextlib.suppress(OSError, RuntimeError):  # it is said where it is used
                self.settle()
            if (memory := self._take_free(unit.nbytes)) is not None:
                return memory
        if self._overflows == 0:
            _log.warning(
                "weights in use at once need more memory than they were given: %d bytes more are "
                "taken; raise max_cpu_bytes (on a GPU max_gpu_bytes) or name smaller units",
                unit.nbytes,
            )
        self._overflows += 1
        unit.beyond = True
        if self.room is not None:
            return self.room.take(unit.nbytes, beyond=True)
        with torch.inference_mode(False):
            return torch.empty(unit.nbytes, dtype=torch.uint8)

    def _bring(self, unit):
        self._record(unit)
        if unit.memory is None:
            self._misses += 1
            unit.begin(self.take(unit))
        else:
            self._hits += 1
        self._bring_ahead()
        with span("wait for weights"):
            unit.wait()

    def _bring_ahead(self):
        """Starts to bring what the last pass needed next. Only so far that the drive has always
        something to do: the rest of the memory is for what stays from pass to pass."""
        count = len(self._order)
        window = self._window_bytes
        for ahead in range(count):
            unit = self._order[(self._now + ahead) % count]
            window -= unit.nbytes
            if unit.memory is None:
                memory = self.take(unit, sooner_than=ahead)
                if memory is None:
                    return
                unit.begin(memory)
            if window <= 0:
                return

    # --- use ---

    def enter(self, unit, replacing=False):
        """`replacing`: all of it is about to get other values."""
        with self._lock:
            unit.users += 1
            if unit.users > 1:
                return
            try:
                self._bring(unit)
                # In inference mode nobody knows what of it is replaced.
                if not replacing or torch.is_inference_mode_enabled():
                    unit.check_newest()
                unit.show()
            except BaseException:
                unit.users -= 1
                raise

    def leave(self, unit):
        with self._lock:
            unit.users -= 1
            if unit.users == 0:
                unit.hide()
                self._give_up(unit)

    def _give_up(self, unit):
        """Memory beyond the limit is for those alone who use it now."""
        if unit.users == 0 and unit.beyond:
            unit.check_written()
            unit.forget()

    def place_of(self, tensor):
        """Where a weight is, or a view of one; None for other tensors."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return None
        if tensor.device != self.device or tensor.layout != torch.strided:
            return None
        unit = self.by_storage.get(tensor.untyped_storage().data_ptr())
        if unit is None:
            return None
        home = unit.home_at(tensor.storage_offset() * tensor.dtype.itemsize)
        return Place(
            unit,
            home,
            home.version,
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            tensor.storage_offset(),
        )

    def at(self, place):
        """The weight that is at a place, brought in."""
        if place.version != place.home.version:
            raise RuntimeError(
                f"a weight of shape {tuple(place.home.size)} that this backward pass needs has "
                "been changed since its forward pass, as by a step of the optimizer"
            )
        unit = place.unit
        with self._lock:
            unit.users += 1  # it must not give way to what comes after it
            try:
                self._bring(unit)
                unit.check_newest()
                self.note_use(unit.memory)
                elements = unit.memory.view(place.dtype)
                return elements.as_strided(place.size, place.stride, place.offset)
            finally:
                unit.users -= 1
                self._give_up(unit)

    def saved_weights(self):
        """The hooks under which autograd saves places of weights; None where they are in force."""
        others = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if others is not None:
            owner = getattr(others[0], "__self__", None)
            if isinstance(owner, SavedWeights) and owner.residency is self:
                return None
        return SavedWeights(self, others)

    # --- writes ---

    def note_writes(self, unit):
        with self._lock:
            others = [u for u in self._writing if u is not unit and not u.forget_written()]
            self._writing = [*others, unit]

    def write_changed(self, units):
        """Starts to write those of them that are shown and that somebody has changed."""
        with self._lock:
            for unit in units:
                if unit.shown and unit.is_changed():
                    unit.write_back()
                    unit.note_versions()

    def write_all(self, units):
        """Starts to write what they show, whether autograd has seen a change or not."""
        def write(unit):
            unit.note_versions()
            unit.write_back()

        self.note_changes(units)  # where Ctrl-C keeps one from being written now, leaving does it
        with self._lock:
            self._each(write, units)

    def note_changes(self, units):
        """What they show has changed: who leaves them writes it."""
        with self._lock:
            for unit in units:
                unit.note_change()

    def note_write(self, tensor):
        """Somebody has changed it; the same, if it is a weight or a view of one."""
        if (place := self.place_of(tensor)) is not None:
            self.note_changes([place.unit])

    def settle(self):
        """Waits until the drive has all values."""
        with self._lock:
            self._each(Unit.check_written, self._writing)

    def _each(self, function, units):
        """Calls it with all of them, whichever fails; raises the first failure at the end."""
        failure = None
        for unit in units:
            try:
                function(unit)
            except (OSError, RuntimeError) as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def stats(self):
        return {
            "weight_bytes": sum(unit.nbytes for unit in self.units),
            "resident_bytes": sum(unit.nbytes for unit in self.units if unit.memory is not None),
            "hits": self._hits,
            "misses": self._misses,
            "overflows": self._overflows,
        }
