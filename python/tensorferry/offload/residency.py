"""Which weights are in memory: those in use, those that come next, others while there is room."""

import bisect
import contextlib
import logging
import threading

import torch

from .._memory.stored_parameter import OlderValues
from .._tracing import span
from .saved_weights import Place, SavedWeights
from .unit import Unit

_log = logging.getLogger("tensorferry")

# A pass is as long as that many uses at most; who never calls the whole model has no other.
_LONGEST_PASS = 1024


class Residency:
    """Decides which units are in memory. What is not in use gives way to what is needed sooner, by
    the order of the last pass."""

    def __init__(self, space, room=None):
        """`room` is the GpuPool for the weights, where they are on a GPU."""
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
