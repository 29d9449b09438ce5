"""Which weights are in memory: those in use, those needed next, and others as far as they fit."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Collection, Iterable

import torch

from .._memory.reading import OlderValues
from .._memory.stored_parameter import StoredParameter
from .._memory.weight_memory import WeightBuffer, WeightMemory
from .._tracing import span
from .unit import Unit, Unwritten, each
from .use_order import UseOrder

_log = logging.getLogger("tensorferry")
# How long the memory of a unit that has gone may take to come back.
_RELEASE_SECONDS = 1.0


class Residency:
    """Decides which units are in memory. A unit that nobody uses gives way to one that is needed
    sooner, by the order of the last pass."""

    def __init__(self, memory: WeightMemory) -> None:
        self.units: list[Unit] = []
        self.device = memory.device
        self._memory = memory
        self._owners: dict[WeightBuffer, Unit] = {}
        self._unwritten = Unwritten()
        self._order = UseOrder()
        self._lock = threading.RLock()
        self._window_bytes = min(max(memory.nbytes * 2 // 5, 1 << 20), 256 << 20)
        self._misses = 0
        self._hits = 0
        self._overflows = 0

    def new_unit(self) -> Unit:
        """Makes a unit without weights."""
        unit = Unit(WeightBuffer(self._memory), self._unwritten)
        self.units.append(unit)
        self._owners[unit.buffer] = unit
        return unit

    def begin_pass(self) -> None:
        """Says that the whole model is called."""
        with self._lock:
            self._order.begin_pass()

    # --- memory ---

    def _take(self, unit: Unit) -> torch.Tensor:
        """Returns memory for a unit, over the limit if need be."""
        evicted = False
        while True:
            if (memory := self._memory.take(unit.nbytes)) is not None:
                return memory
            try:
                if not self._evict_one(self._idle()):
                    return self._take_more(unit)
            except (OSError, RuntimeError):
                # The memory of a unit that has gone may still be with the thread that has read it.
                memory = self._memory.take(unit.nbytes, _RELEASE_SECONDS if evicted else 0)
                if memory is None:
                    raise
                return memory
            evicted = True

    def _take_ahead(self, unit: Unit, ahead: int) -> torch.Tensor | None:
        """Returns memory for a unit that is needed `ahead` uses from now, or None if units that are
        needed sooner hold all of it."""
        while True:
            if (memory := self._memory.take(unit.nbytes)) is not None:
                return memory
            # Memory with reads or writes under way is not free at once.
            settled = [u for u in self._idle() if u.buffer.is_settled() and u.forget_written()]
            if not self._evict_one(settled, later_than=ahead):
                return None

    def _idle(self) -> list[Unit]:
        return [unit for unit in self.units if unit.memory is not None and unit.users == 0]

    def _evict_one(self, units: list[Unit], later_than: int = -1) -> bool:
        """Evicts the unit that is needed last, if that is more than `later_than` uses from now.
        Returns False if there is none."""
        victim = max(units, key=self._expendability, default=None)
        if victim is None or self._order.next_use(victim) <= later_than:
            return False
        try:
            self._evict(victim)
        except (OSError, RuntimeError):  # it could not be written and stays: another may go
            if all(unit.has_failed() for unit in units):
                raise
        return True

    def _expendability(self, unit: Unit) -> tuple[bool, int]:
        return not unit.has_failed(), self._order.next_use(unit)

    def _evict(self, unit: Unit) -> None:
        unit.check_written()
        reads = unit.buffer.reads
        unit.buffer.forget()
        for _, read in reads:  # they hold the memory until they end
            with contextlib.suppress(OSError, OlderValues):  # nobody needs the values
                read.wait()

    def _take_more(self, unit: Unit) -> torch.Tensor:
        """Returns memory when all of it is in use, or held by autograd or by writes under way."""
        if self._unwritten:
            with contextlib.suppress(OSError, RuntimeError):  # the next use of the unit raises it
                self.settle()
            if (memory := self._memory.take(unit.nbytes)) is not None:
                return memory
        if self._overflows == 0:
            _log.warning(
                "the weights in use at once exceed their memory limit: took %d bytes more; raise "
                "max_cpu_bytes (on a GPU: max_gpu_bytes) or name smaller units",
                unit.nbytes,
            )
        self._overflows += 1
        unit.buffer.over_limit = True
        return self._memory.take_over_limit(unit.nbytes)

    def _bring(self, unit: Unit) -> None:
        """Brings a unit in, and starts to read the next ones."""
        self._order.record(unit, len(self.units))
        if unit.memory is None:
            self._misses += 1
            unit.begin(self._take(unit))
        else:
            self._hits += 1
        self._bring_ahead()
        with span("wait for weights"):
            unit.buffer.wait()

    def _bring_ahead(self) -> None:
        """Starts to read the units that the last pass needed next: only as many as keep the drive
        busy, since the rest of the memory is for units that stay from pass to pass."""
        window = self._window_bytes
        for ahead, unit in enumerate(self._order.ahead()):
            window -= unit.nbytes
            if unit.memory is None:
                memory = self._take_ahead(unit, ahead)
                if memory is None:
                    return
                unit.begin(memory)
            if window <= 0:
                return

    # --- use ---

    def use(
        self, units: Iterable[Unit], at_end: contextlib.ExitStack, replacing: bool = False
    ) -> None:
        """Brings units in and shows their weights until the stack `at_end` closes. `replacing`: the
        caller is about to replace all their values."""
        for unit in units:
            self._enter(unit, replacing)
            at_end.callback(self._leave, unit)

    def adopt(self, unit: Unit, empty: Collection[torch.nn.Parameter]) -> None:
        """Gives a new unit memory and the values of its parameters; those in `empty` have none."""
        unit.adopt(self._take(unit), empty)

    def _enter(self, unit: Unit, replacing: bool = False) -> None:
        with self._lock:
            unit.users += 1
            if unit.users > 1:
                return
            try:
                self._bring(unit)
                # In inference mode autograd does not tell which values are replaced.
                if not replacing or torch.is_inference_mode_enabled():
                    unit.buffer.check_newest()
                unit.show()
            except BaseException:
                unit.users -= 1
                raise

    def _leave(self, unit: Unit) -> None:
        with self._lock:
            unit.users -= 1
            if unit.users == 0:
                unit.hide()
                self._give_up(unit)

    def _give_up(self, unit: Unit) -> None:
        """Lets go of memory over the limit as soon as nobody uses it."""
        if unit.users == 0 and unit.buffer.over_limit:
            unit.check_written()
            unit.buffer.forget()

    def find(self, tensor: torch.Tensor) -> tuple[Unit, StoredParameter] | None:
        """Returns the weight that a tensor is, or is a view of; None for other tensors."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return None
        if tensor.device != self.device or tensor.layout != torch.strided:
            return None
        buffer = self._memory.buffers.get(tensor.untyped_storage().data_ptr())
        if buffer is None:
            return None
        unit = self._owners[buffer]
        return unit, unit.parameter_at(tensor.storage_offset() * tensor.dtype.itemsize)

    def fetch(self, unit: Unit) -> torch.Tensor:
        """Brings a unit in and returns its memory."""
        with self._lock:
            unit.users += 1  # so that reading ahead does not evict it
            try:
                self._bring(unit)
                unit.buffer.check_newest()
                unit.buffer.note_use()
                return unit.buffer.held
            finally:
                unit.users -= 1
                self._give_up(unit)

    def values_of(self, unit: Unit) -> list[torch.Tensor]:
        """Returns copies of the weights of a unit."""
        if unit.buffer.settled() is not None:
            unit.buffer.check_newest()
            return unit.copies()
        with contextlib.ExitStack() as at_end:
            self.use([unit], at_end)
            return unit.copies()

    def values(self) -> dict[Unit, list[torch.Tensor]]:
        """Returns copies of all weights. After this call no unit needs to be written."""
        only_here = [unit for unit in self.units if unit.has_failed()]
        for unit in only_here:
            unit.users += 1  # so that the others do not evict it
        try:
            values = {unit: self.values_of(unit) for unit in self.units}
        finally:
            for unit in only_here:
                unit.users -= 1
        for unit in self.units:
            unit.forgo_writes()
        return values

    # --- writes ---

    def write_changed(self, units: Iterable[Unit]) -> None:
        """Starts to write those of these units that somebody has changed since they were shown."""
        with self._lock:
            for unit in units:
                if unit.shown and unit.is_changed():
                    unit.write_back()
                    unit.note_versions()

    def write_all(self, units: Collection[Unit]) -> None:
        """Starts to write the weights that these units show, also changes that autograd missed."""

        def write(unit: Unit) -> None:
            unit.note_versions()
            unit.write_back()

        self.note_changes(units)  # after Ctrl-C, _leave() writes the units that are missing
        with self._lock:
            each(write, units)

    def note_changes(self, units: Iterable[Unit]) -> None:
        """Says that the weights of these units have changed: _leave() writes them."""
        with self._lock:
            for unit in units:
                unit.note_change()

    def note_write(self, tensor: torch.Tensor) -> None:
        """Says that a tensor has changed: if it is (a view of) a weight, _leave() writes it."""
        if (found := self.find(tensor)) is not None:
            self.note_changes([found[0]])

    def settle(self) -> None:
        """Waits until all values are on the drive."""
        with self._lock:
            self._unwritten.settle()

    def stats(self) -> dict[str, int]:
        return {
            "weight_bytes": sum(unit.nbytes for unit in self.units),
            "resident_bytes": sum(unit.nbytes for unit in self.units if unit.memory is not None),
            "hits": self._hits,
            "misses": self._misses,
            "overflows": self._overflows,
        }
