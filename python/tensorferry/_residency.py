"""Which weights are in memory: those in use, those that come next, others while there is room."""

import bisect
import logging
import threading

import torch

from ._subgroups import page_up
from ._tracing import span

_log = logging.getLogger("tensorferry")


class Unit:
    """The parameters of a module: they come and go together, in one stretch of memory."""

    def __init__(self, residency):
        self.residency = residency
        self.homes = []
        self.nbytes = 0
        self.memory = None  # while it is there, or on its way
        self.operations = []  # that bring it
        self.users = 0
        residency.units.append(self)

    def add(self, home):
        home.offset = self.nbytes
        self.nbytes += page_up(home.nbytes)
        self.homes.append(home)

    def settled_memory(self):
        """Its memory, if all bytes are there."""
        if self.memory is None or not all(operation.done() for operation in self.operations):
            return None
        self.wait()
        return self.memory

    def wait(self):
        operations, self.operations = self.operations, []
        try:
            for operation in operations:
                operation.wait()
        except BaseException:
            self.forget()
            raise

    def begin(self, memory):
        """Starts to bring it into memory."""
        self.memory = memory
        self.residency.by_storage[memory.untyped_storage().data_ptr()] = self
        for home in self.homes:
            # Not through home.read(): the memory it would find is the one to be filled.
            for key, at, nbytes in home._pieces(0, home.numel):
                at += home.offset
                self.operations.append(home.space.get(key, memory[at : at + nbytes]))

    def forget(self):
        """Lets go of its memory, which is free when nobody else holds it."""
        if self.memory is None:
            return
        self.residency.by_storage.pop(self.memory.untyped_storage().data_ptr(), None)
        self.memory = None
        self.operations = []

    def show(self):
        for home in self.homes:
            home.param.data = home.of(self.memory)

    def hide(self):
        for home in self.homes:
            home.param.data = home.absent

    def bring_out(self):
        """The first time: from where the parameters are to the drive."""
        self.memory = self.residency.take(self)
        self.residency.by_storage[self.memory.untyped_storage().data_ptr()] = self
        with torch.no_grad():
            for home in self.homes:
                home.of(self.memory).copy_(home.param)
        self.write_back()
        self.hide()

    def write_back(self):
        for home in self.homes:
            for key, at, nbytes in home._pieces(0, home.numel):
                at += home.offset
                self.residency.writes.append(home.space.put(key, self.memory[at : at + nbytes]))
        self.residency.forget_done_writes()

    def end(self, restore):
        if restore:
            self.residency.enter(self)
            for home in self.homes:
                home.param.data = home.of(self.memory).clone()
        for home in self.homes:
            home.leave()
        self.forget()


class Residency:
    """Decides which units are in memory. What is not in use gives way to what is needed sooner, by
    the order of the last pass."""

    def __init__(self, space):
        self.space = space
        self.units = []
        self.by_storage = {}  # first address of its memory -> unit
        self.writes = []
        self._lock = threading.RLock()
        self._order = []  # units in the order of the last pass, forward and backward
        self._positions = {}  # unit -> where it is in that order
        self._now = 0
        self._trace = []  # of this pass
        self._window_bytes = min(max(space.stats()["buffer_bytes"] // 4, 1 << 20), 256 << 20)
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

    def take(self, unit, sooner_than=None):
        """Memory for a unit. With `sooner_than` only room of what is needed later than that many
        steps ahead is taken, and None comes back where there is not enough."""
        while True:
            try:
                buffer = self.space.take(unit.nbytes, 0)
                return torch.frombuffer(buffer, dtype=torch.uint8)
            except TimeoutError:
                pass
            victims = (u for u in self.units if u.memory is not None and u.users == 0)
            victim = max(victims, key=self._next_use, default=None)
            if victim and (sooner_than is None or self._next_use(victim) > sooner_than):
                victim.forget()
                continue
            if sooner_than is not None:
                return None
            return self._take_more(unit)

    def _take_more(self, unit):
        """All that is left is in use, or held by autograd or by writes under way."""
        if self.writes:
            self.settle()
            try:
                buffer = self.space.take(unit.nbytes, 0)
                return torch.frombuffer(buffer, dtype=torch.uint8)
            except TimeoutError:
                pass
        if self._overflows == 0:
            _log.warning(
                "weights in use at once need more than max_cpu_bytes: %d bytes more are taken",
                unit.nbytes,
            )
        self._overflows += 1
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

    def enter(self, unit):
        with self._lock:
            unit.users += 1
            if unit.users > 1:
                return
            try:
                self._bring(unit)
                unit.show()
            except BaseException:
                unit.users -= 1
                raise

    def leave(self, unit):
        with self._lock:
            if unit.users == 0:  # it never came
                return
            unit.users -= 1
            if unit.users == 0:
                unit.hide()

    def pack(self, tensor):
        """What autograd keeps of a weight: where it is."""
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return tensor
        unit = self.by_storage.get(tensor.untyped_storage().data_ptr())
        if unit is None:
            return tensor
        return unit, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        unit, dtype, size, stride, offset = packed
        with self._lock:
            unit.users += 1  # it must not give way to what comes after it
            try:
                self._bring(unit)
                return unit.memory.view(dtype).as_strided(size, stride, offset)
            finally:
                unit.users -= 1

    # --- writes ---

    def forget_done_writes(self):
        self.writes = [w for w in self.writes if not w.done() or w.exception() is not None]

    def settle(self):
        writes, self.writes = self.writes, []
        for operation in writes:
            operation.wait()

    def stats(self):
        return {
            "weight_bytes": sum(unit.nbytes for unit in self.units),
            "resident_bytes": sum(unit.nbytes for unit in self.units if unit.memory is not None),
            "hits": self._hits,
            "misses": self._misses,
            "overflows": self._overflows,
        }
