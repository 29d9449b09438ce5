"""Which weights are in memory: those in use, those needed next, and others as far as they fit."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Collection, Container, Iterable, Iterator

import torch

from .._core import PriorityScope
from .._memory.reading import OlderValues
from .._memory.spreading import spread
from .._memory.stored_parameter import StoredParameter
from .._memory.waits import DRIVE, Waits
from .._memory.weight_memory import WeightBuffer, WeightMemory
from .unit import Unit, Unwritten, each
from .use_order import UseOrder
from .victims import cheapest_stretch

_log = logging.getLogger("tensorferry")
# How long the memory of a unit that has gone may take to come back, if it must, and as a rule.
_RELEASE_SECONDS = 1.0
_SOON_SECONDS = 0.01
# What is read ahead at least: this share of the memory, and no more than this many bytes. It keeps
# the drive busy between two calls of modules. More would read more in each pass, because the rest
# of the memory is for units that stay from pass to pass.
_AHEAD_SHARE = 1 / 32
_AHEAD_BYTES = 32 << 20
# How many uses ahead to look for units that are missing.
_AHEAD_USES = 64
# How much more it costs to evict a unit that is to stay. It may still go where the memory is in
# pieces.
_STAYING_COST = 8


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
        self._staying: set[Unit] = set()  # from pass to pass
        self._ahead: set[Unit] = set()  # read ahead, and not used since
        self._late: set[Unit] = set()  # not in memory when they were chosen
        self._gathered: Unit | None = None  # what fetch_group() has fetched last
        self._ahead_bytes = min(int(memory.nbytes * _AHEAD_SHARE), _AHEAD_BYTES)
        self._misses = 0
        self._hits = 0
        self._overflows = 0
        self._part_bytes = 0  # of units that are parts, which somebody has used
        self._wasted_bytes = 0
        self._waits = Waits()

    def new_unit(self, is_part: bool = False, recurs: bool = True) -> Unit:
        """Makes a unit without weights. What it may be: see Unit."""
        unit = Unit(WeightBuffer(self._memory), self._unwritten, is_part, recurs)
        self.units.append(unit)
        self._owners[unit.buffer] = unit
        return unit

    def begin_pass(self) -> None:
        """Says that the whole model is called."""
        with self._lock:
            self._order.begin_pass()
            self._staying = set(self._choose_staying())

    def _choose_staying(self) -> list[Unit]:
        """Returns the units that stay from pass to pass. If each unit is used once in a pass, it
        does not matter for the bytes which ones do; if they are spread, the drive has something to
        read all the time. If a pass goes there and back, it is best to keep what was used last."""
        once = self._order.used_once()
        often = sum(unit.nbytes for unit in self._order.used_often())
        if sum(unit.nbytes for unit in once) <= often:
            return []
        largest = max(unit.nbytes for unit in once)
        moving = largest + max(largest, self._ahead_bytes)  # one in use, the next on its way
        return spread(once, lambda unit: unit.nbytes, max(self._memory.nbytes - often - moving, 0))

    # --- memory ---

    def _take(self, unit: Unit) -> torch.Tensor:
        """Returns memory for a unit, over the limit if need be."""
        evicted = False
        while True:
            memory = self._memory.take(unit.nbytes, _SOON_SECONDS if evicted else 0)
            if memory is not None:
                return memory
            try:
                idle = self._idle()
                writable = [other for other in idle if not other.has_failed()]
                if not (self._evict_stretch(writable, unit.nbytes) or self._evict_one(idle)):
                    back = self._take_back(unit)
                    return self._take_more(unit) if back is None else back
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
        evicted = False
        while True:
            memory = self._memory.take(unit.nbytes, _SOON_SECONDS if evicted else 0)
            if memory is not None:
                return memory
            # Memory with reads or writes under way is not free at once.
            settled = [u for u in self._idle() if u.buffer.is_settled() and u.forget_written()]
            if self._memory.addresses:
                evicted = self._evict_stretch(settled, unit.nbytes, later_than=ahead)
            else:
                evicted = self._evict_one(settled, later_than=ahead)
            if not evicted:
                return None

    def _idle(self) -> list[Unit]:
        return [unit for unit in self._resident() if unit.users == 0]

    def _resident(self) -> list[Unit]:
        """Returns the units that have memory; those that got it first come first."""
        return [self._owners[buffer] for buffer in self._memory.buffers.values()]

    def _evict_one(self, units: list[Unit], later_than: int = -1) -> bool:
        """Evicts the unit that is needed last, of those that are needed more than `later_than` uses
        from now. Returns False if there are none."""
        late = [unit for unit in units if self._order.next_use(unit) > later_than]
        victim = max(late, key=self._expendability, default=None)
        if victim is None:
            return False
        try:
            self._evict(victim)
        except (OSError, RuntimeError):  # it could not be written and stays: another may go
            if all(unit.has_failed() for unit in units):
                raise
        return True

    def _expendability(self, unit: Unit) -> tuple[bool, bool, int]:
        return not unit.has_failed(), unit not in self._staying, self._order.next_use(unit)

    def _evict_stretch(self, units: list[Unit], nbytes: int, later_than: int = -1) -> bool:
        """Evicts those of these units that leave `nbytes` bytes in one piece at the least cost, all
        of them needed more than `later_than` uses from now. Returns False if there are none."""
        costs = {
            unit: self._cost(unit, uses)
            for unit in units
            if (uses := self._order.next_use(unit)) > later_than
        }
        victims = cheapest_stretch(self._resident(), costs, self._memory.addresses, nbytes)
        for victim in victims:
            with contextlib.suppress(OSError, RuntimeError):  # it stays, and has failed from now on
                self._evict(victim)
        return bool(victims)

    def _cost(self, unit: Unit, uses: int) -> float:
        """Returns what it costs to evict a unit that is needed `uses` uses from now: half as much
        for a byte that is needed twice as late."""
        return unit.nbytes / (uses + 1) * (_STAYING_COST if unit in self._staying else 1)

    def _evict(self, unit: Unit) -> None:
        unit.check_written()
        if unit in self._ahead:
            self._ahead.discard(unit)
            self._wasted_bytes += unit.nbytes
        reads = unit.buffer.reads
        unit.buffer.forget()
        for _, read in reads:  # they hold the memory until they end
            with contextlib.suppress(OSError, OlderValues):  # nobody needs the values
                read.wait()

    def _take_back(self, unit: Unit) -> torch.Tensor | None:
        """Returns memory of units that have gone, if it suffices: threads that have read them may
        still have it."""
        held = sum(other.nbytes for other in self._resident())
        if held + unit.nbytes > self._memory.nbytes:
            return None
        return self._memory.take(unit.nbytes, _RELEASE_SECONDS)

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
        self._ahead.discard(unit)
        is_late = unit.memory is None or unit in self._late
        self._misses += is_late
        self._hits += not is_late
        self._late.discard(unit)
        with PriorityScope("urgent"):  # somebody waits
            if unit.memory is None:
                unit.begin(self._take(unit))
            with self._waits.on(DRIVE, "wait for weights"):
                unit.buffer.wait_for_first()  # other reads would take their share of the drive
        self._bring_ahead(self._order.next_use(unit))
        with PriorityScope("urgent"), self._waits.on(DRIVE, "wait for weights"):
            unit.buffer.wait()

    def _bring_ahead(self, latest: int) -> None:
        """Starts to read the next units that are missing by the order of the last pass. What is in
        use now is needed again `latest` uses from now.

        First it reads as much as keeps the drive busy, and a large unit before the small ones that
        come before it are used up. Then it reads whatever costs nothing: a unit for which none has
        to go but one that would give way in any case, because it is needed later than all that are
        in use until then."""
        waiting: dict[Unit, int] = {}
        for ahead, (coming, then) in enumerate(itertools.islice(self._order.ahead(), _AHEAD_USES)):
            if coming.memory is None:
                enough = max(self._ahead_bytes, coming.nbytes)
                is_enough = bool(waiting) and sum(waiting.values()) >= enough
                if is_enough and self._is_busy(waiting):
                    return
                memory = self._take_ahead(coming, max(ahead, latest - 1) if is_enough else ahead)
                if memory is None:
                    return
                coming.begin(memory)
                self._ahead.add(coming)
            if coming in self._ahead:
                waiting[coming] = coming.nbytes
            latest = max(latest, then)

    def _is_busy(self, waiting: Iterable[Unit]) -> bool:
        """Returns whether the drive has enough to do with these units. Reads share it evenly: with
        more of them, the one that is needed first would come later."""
        reading = [unit.nbytes for unit in waiting if not unit.buffer.is_settled()]
        return len(reading) > 1 and sum(reading) >= self._ahead_bytes

    # --- use ---

    def use(
        self, units: Iterable[Unit], at_end: contextlib.ExitStack, replacing: bool = False
    ) -> None:
        """Brings units in and shows their weights until the stack `at_end` closes. `replacing`: the
        caller is about to replace all their values."""
        for unit in units:
            self._enter(unit, replacing)
            at_end.callback(self._leave, unit)

    def choose(self, units: Collection[Unit], of: Container[Unit]) -> None:
        """Says that these units are used next, in this order, and starts to read them, instead of
        those that the last pass has used here, all of them `of` the same kind."""
        with self._lock:
            self._order.choose(units, of)
            self._late.update(unit for unit in units if unit.memory is None)
            self._bring_ahead(latest=0)

    @contextlib.contextmanager
    def using(self, unit: Unit) -> Iterator[torch.Tensor]:
        """Holds a unit that is a part in memory. Yields its memory."""
        with self._lock:
            unit.users += 1
            try:
                self._bring(unit)
                unit.buffer.note_use()
                self._part_bytes += sum(stored.nbytes for stored in unit.parameters)
            except BaseException:
                unit.users -= 1
                raise
        try:
            yield unit.buffer.held
        finally:
            with self._lock:
                unit.users -= 1
                self._give_up(unit)

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

    def fetch_group(self, unit: Unit) -> torch.Tensor:
        """The same for callers that ask for one weight of a unit after the other: memory over the
        limit stays until they ask for another unit."""
        with self._lock:
            if self._gathered is not None and self._gathered is not unit:
                self._give_up(self._gathered)
            self._gathered = unit
            unit.users += 1
            try:
                return self.fetch(unit)
            finally:
                unit.users -= 1

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
        whole = [unit for unit in self.units if not unit.is_part]
        only_here = [unit for unit in whole if unit.has_failed()]
        for unit in only_here:
            unit.users += 1  # so that the others do not evict it
        try:
            values = {unit: self.values_of(unit) for unit in whole}
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

    def forget_values(self) -> None:
        """Lets go of all memory, because the drive is about to get other values."""
        with self._lock:
            if any(unit.users > 0 for unit in self.units):
                raise RuntimeError(
                    "weights are in use: resume outside of gather() and of forward passes"
                )
            for unit in self.units:
                unit.forgo_writes()
                self._evict(unit)

    def parameters(self) -> Iterator[torch.Tensor | None]:
        """Yields all parameters."""
        return (stored.param for unit in self.units for stored in unit.parameters)

    def stats(self) -> dict[str, float]:
        return {
            "weight_bytes": sum(unit.nbytes for unit in self.units if not unit.is_part),
            "resident_bytes": sum(unit.nbytes for unit in self._resident()),
            "hits": self._hits,
            "misses": self._misses,
            "overflows": self._overflows,
            "expert_bytes": self._part_bytes,
            "wasted_bytes": self._wasted_bytes,
            "waited_seconds": self._waits.seconds(DRIVE),
        }
