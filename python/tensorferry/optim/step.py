"""One step of an optimizer whose states live on NVMe.

A step goes through the sub-groups. While it computes one, the drive reads the next ones and writes
the last ones.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._memory.buffers import letting_go
from .._memory.heap import note_freed
from .._memory.layout import page_up
from .._memory.stored_parameter import StoredParameter, stored_parameter_of
from .._memory.waits import DRIVE, STEP
from .._notes import add_note
from .cut_masters import LOW, Cutting, begin_cut, join
from .load import Load, Record, Stepping, Until, Work
from .masters import follow
from .quantized_moments import NAMES, PACKED, pack_moments, unpack_moments
from .records import collected, first_states, large_states
from .stored_gradient import entry_of
from .sub_groups import UNMAPPED, Group, Shard, SubGroup, SubGroups, record_bytes

if TYPE_CHECKING:
    from .gradients import GradientStore
    from .stepper import Stepper
    from .store import StateStore


_log = logging.getLogger("tensorferry")


class Scratch:
    """Memory that sub-groups need only while they are computed, one after the other: for gradients
    in fp32, for masters of which the record has only the lower half, for moments that it has in 8
    bits."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._end = 0

    @staticmethod
    def bytes_for(count: int) -> int:
        return page_up(4 * count)

    def begin(self) -> None:
        """Frees all that was taken so far."""
        self._end = 0

    def take(self, count: int) -> Tensor:
        """Returns memory for so many elements in fp32."""
        begin, self._end = self._end, self._end + self.bytes_for(count)
        return self.memory[begin : begin + 4 * count].view(torch.float32)


@dataclasses.dataclass(frozen=True)
class Pace:
    """How far a step may run ahead of its computation and of its writes."""

    loads: int  # sub-groups in buffers at a time
    waits_for_writes: bool  # or lets the last ones go on behind the next forward pass


class Step:
    """Steps the sub-groups once, with what the optimizer hands it.

    `edited` are the parameters that somebody has changed since their masters were rounded to them;
    `scale` multiplies the gradients, in fp32 where there are masters. Its caller may change it
    afterwards."""

    def __init__(
        self,
        sub_groups: SubGroups,
        store: StateStore,
        stepper: Stepper,
        gradients: GradientStore | None,
        pace: Pace,
        edited: set[Tensor],
        scale: float | Tensor | None,
    ) -> None:
        self._sub_groups = sub_groups
        self._store = store
        self._stepper = stepper
        self._gradients = gradients
        self._pace = pace
        self._edited = edited
        self._scale = _own(scale)
        self._scratch: dict[torch.device, Scratch] = {}
        self._changed: dict[Shard, int | Tensor] = {}  # blocks of weights, since the last step
        self._changes: list[tuple[Group, Group]] = []  # (group, settings that the step changed)
        self._settings: dict[int, Group] = {}  # of each group, for all sub-groups the same
        self._held: dict[Tensor, Tensor] = {}  # gradients of parameters that have none any more
        self._work: collections.deque[Work] = collections.deque()  # that is left, in its order
        self._loads: collections.deque[Load] = collections.deque()  # of the first of it
        self._takes_memory = False
        self._done = 0
        self._total = 0
        self._params: set[Tensor] = set()  # that have changed
        self.begun = False  # has anything changed?
        self._ended = False  # in the middle

    def run(self, param_groups: list[Group]) -> set[Tensor]:
        """Makes the step. Returns the parameters that it has changed."""
        self.begin(
            param_groups, [(g, active) for g in self._sub_groups if (active := active_shards(g))]
        )
        return self.finish()

    def begin(self, param_groups: list[Group], work: list[Work]) -> None:
        """Gets ready to step these sub-groups, in this order."""
        self.take_settings(param_groups)
        self._takes_memory = self._needs_memory(param_groups)
        self._work.extend(work)
        self._total = len(work)
        with self._failing():
            self._take_scratch(work)

    def take_settings(self, param_groups: list[Group]) -> None:
        """Steps with the learning rates and other settings of now, whatever becomes of them."""
        self._changes = [(group, {}) for group in param_groups]
        self._settings = {id(group): _copied(group) for group in param_groups}

    @property
    def next_group(self) -> SubGroup | None:
        """The sub-group that compute_next() steps."""
        return self._work[0][0] if self._work else None

    def is_next_loaded(self) -> bool:
        """Returns whether compute_next() would not wait."""
        return bool(self._loads) and self._loads[0].is_there()

    def load_ahead(self) -> None:
        """Begins to load the next sub-groups, as far as there are free buffers. Never waits."""
        with self._failing(), letting_go():
            self._begin_ahead(waits=False)

    def compute_next(self) -> None:
        """Steps the next sub-group, and begins to load those after it."""
        self._compute_some(together=False)

    def _compute_some(self, *, together: bool) -> None:
        """Steps the next sub-group, `together` with those after it that one call can step too."""
        with self._failing():
            with letting_go():
                self._begin_ahead(waits=True)
                together = together and not (self._takes_memory or self._scratch)
                count = _count_in_memory(self._loads) if together else 1
                # Nobody else may hold a load: its buffer is free when its writes are done.
                self._compute([self._loads.popleft() for _ in range(count)])
            for group, active in [self._work.popleft() for _ in range(count)]:
                self._done += 1
                self._params.update(shard.param for shard in active)
                if self._takes_memory:
                    note_freed(group.spare_bytes)

    def expect(self, work: list[Work], scale: float | Tensor | None) -> None:
        """Says what is left to step, which may be other shards than was thought, and the factor of
        its gradients, if that was not known before."""
        self._scale = self._scale if scale is None else _own(scale)
        same = 0
        for load, (group, active) in zip(self._loads, work):
            if load.group is not group or load.active != active:
                break
            same += 1
        while len(self._loads) > same:
            self._loads.pop().cancel()
        self._total += len(work) - len(self._work)
        self._work = collections.deque(work)

    def finish(self) -> set[Tensor]:
        """Steps the sub-groups that are left. Returns the parameters that the step has changed."""
        while self._work:
            self._compute_some(together=True)
        self.end(waits_for_writes=self._pace.waits_for_writes)
        return self._params

    def end(self, *, waits_for_writes: bool) -> None:
        """Says that nothing is left to step."""
        with self._failing():
            for group, changes in self._changes:
                group.update(changes)
            for scratch in self._scratch.values():
                self._store.note_computing(scratch.memory)
            if waits_for_writes:
                self._store.settle()
        self._scratch.clear()
        self._ended = True

    # --- what is left for later ---

    @property
    def loading(self) -> list[SubGroup]:
        """The sub-groups that come next, because they are in memory or on their way."""
        return [load.group for load in self._loads]

    def prefer(self, groups: Collection[SubGroup]) -> None:
        """Steps these before all others whose states are not on their way yet."""
        first: list[Work] = []
        others: list[Work] = []
        for number, work in enumerate(self._work):
            preferred = number < len(self._loads) or work[0] in groups
            (first if preferred else others).append(work)
        self._work = collections.deque([*first, *others])

    def hold_gradient(self, param: Tensor) -> None:
        """Keeps the gradient that a parameter has now, for the step."""
        with self._failing():
            self._held[param] = _dense(param.grad)

    def let_gradient_go(self, param: Tensor) -> None:
        self._held.pop(param, None)

    def abandon(self, error: BaseException) -> None:
        """Ends the step in the middle, because of `error`, which gets a note on what that means."""
        if self._ended:
            return
        self._ended = True
        if self.begun:  # said first of all: another Ctrl-C may come while the writes finish
            self._store.spoil(
                f"a step ended after {self._done} of {self._total} sub-groups ({error}): "
                "parameters and states belong to different steps"
            )
        for load in self._loads:
            for operation in load.operations:
                operation.cancel()
        self._loads.clear()
        self._work.clear()
        if any(group.device.type == "cuda" for group in self._sub_groups):
            torch.cuda.synchronize()  # it may still compute in the buffer of the one that failed
        self._scratch.clear()
        self._held.clear()
        try:
            self._store.settle()
        except OSError:  # the store remembers it
            pass
        if self._store.spoiled is not None:
            add_note(error, self._store.spoiled + "; load a checkpoint before you go on")

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.abandon(error)
            raise

    def _needs_memory(self, param_groups: list[Group]) -> bool:
        """Whether computing takes memory besides the buffers. torch's fused Adam does not."""
        fused = self._stepper.is_adam and all(group.get("fused") for group in param_groups)
        return not fused or (self._sub_groups.needs.masters and self._gradients is not None)

    # --- loading ---

    def _begin_ahead(self, *, waits: bool) -> None:
        """Begins to load the first sub-group, and those after it that find a free buffer before the
        first has arrived, or at once if it must not wait."""
        loads = self._loads
        buffers = sum(load.buffer is not None for load in loads)
        while len(loads) < len(self._work) and (not loads or buffers < self._pace.loads > 1):
            until = (loads[0].unfinished if loads else None) if waits else _nothing
            load = self._begin(*self._work[len(loads)], until)
            if load is None:
                break
            loads.append(load)
            buffers += load.buffer is not None

    def _begin(self, group: SubGroup, active: list[Shard], until: Until | None) -> Load | None:
        """Takes a buffer and starts to fill it. Returns None if no buffer frees up before `until`
        returns no read any more."""
        known = {field.shard for field in group.fields}
        # States that are new make a new record in the place of the old one.
        spare = 0 if known.issuperset(active) else group.spare_bytes
        record_bytes = page_up(max(group.record_bytes, spare))
        kept = self._store.kept.lent(group, record_bytes)
        end = record_bytes if kept is None else 0
        record, values, gradients = slice(0, end), {}, {}
        for shard in active:
            if stored_parameter_of(shard.param) is not None:
                values[shard] = slice(end, end := end + page_up(shard.nbytes))
            if self._is_stored(shard):
                itemsize = max(shard.dtype.itemsize, shard.param.dtype.itemsize)
                gradients[shard] = slice(end, end := end + page_up(shard.numel * itemsize))
        memory = kept if kept is not None and end == 0 else self._take(group.device, end, until)
        if memory is None:
            return None
        load = Load(
            group,
            active,
            memory[record] if kept is None else kept,
            {shard: memory[part] for shard, part in values.items()},
            {shard: memory[part] for shard, part in gradients.items()},
            buffer=memory if end > 0 else None,
        )
        self._start_reads(load, known)
        return load

    def _take(self, device: torch.device, nbytes: int, until: Until | None) -> Tensor | None:
        if until is None:
            return self._store.take(device, nbytes)
        return self._store.take_before(device, nbytes, until)

    def _start_reads(self, load: Load, known: set[Shard]) -> None:
        with self._store.reading(load.group.device):
            if load.group.fields:
                operation = self._store.read(load.group, load.record)
                load.operations += [] if operation is None else [operation]
            if self._gradients is not None:
                for shard, memory in load.gradients.items():
                    load.operations += self._gradients.read(shard, memory)
        # Outside: values that are in memory are copied by the stream that computes.
        for shard, memory in load.stored_values.items():
            if not (shard.master and shard in known) or shard.param in self._edited:
                load.operations += self._store.read_weights(_stored(shard), memory, shard)

    def _is_stored(self, shard: Shard) -> bool:
        return self._gradients is not None and self._gradients.has(shard)

    # --- computing ---

    def _take_scratch(self, work: list[tuple[SubGroup, list[Shard]]]) -> None:
        """Takes what the sub-groups need while they are computed: before they take buffers, so that
        those leave room for it."""
        most: dict[torch.device, int] = collections.defaultdict(int)
        for group, active in work:
            whole = {field.shard for field in group.fields if field.name == "master"}
            nbytes = sum(self._scratch_bytes(shard, shard in whole) for shard in active)
            most[group.device] = max(most[group.device], nbytes)
        for device, nbytes in most.items():
            if nbytes > 0:
                self._scratch[device] = Scratch(self._store.take(device, nbytes))

    def _scratch_bytes(self, shard: Shard, has_master: bool) -> int:
        """Bytes for a shard whose record has all of its master, or not."""
        tensors = int(shard.cuts_master and not has_master)
        tensors += int(shard.master and not self._is_stored(shard))
        tensors += len(NAMES) if shard.packs_moments else 0
        return tensors * Scratch.bytes_for(shard.numel)

    def _compute(self, loads: list[Load]) -> None:
        """Steps these sub-groups by one call of the optimizer."""
        groups: dict[int, Group] = {}
        lent: dict[Tensor, dict[str, Any]] = collections.defaultdict(dict)
        stepping = [self._lend(load, groups, lent) for load in loads]
        self.begun = True
        with self._store.waits.on(STEP, f"{self._stepper.name} step"):
            stepped = self._stepper.step(list(groups.values()), lent)
        self._note_changes(groups)
        for one in stepping:
            self._take_back(one, stepped)

    def _lend(
        self, load: Load, groups: dict[int, Group], lent: dict[Tensor, dict[str, Any]]
    ) -> Stepping:
        """Adds the tensors and states of a sub-group to those that the optimizer gets."""
        with self._store.waits.on(DRIVE, "wait for states"):
            load.wait()
        if (scratch := self._scratch.get(load.group.device)) is not None:
            scratch.begin()
        is_first = not load.group.fields and self._stepper.is_adam
        fields = first_states(load) if is_first else load.group.fields
        record = Record(load.record, fields, [field.of(load.record) for field in fields])
        one = Stepping(load, record, {shard: {} for shard in load.group.shards})
        for field, state in zip(fields, record.states):
            one.states[field.shard][field.name] = state
        for shard in load.active:
            own = one.states[shard]
            packed = one.packed[shard] = {n: own.pop(n) for n in UNMAPPED if n in own}
            tensor = self._stepped(load, shard, own, packed.get(LOW), is_first)
            one.tensors[shard] = tensor
            tensor.grad = self._gradient(load, shard)
            if PACKED in packed:
                own |= self._whole_moments(load, shard, packed[PACKED], is_first)
            lent[tensor] = {**shard.small, **own}
            if is_first:
                device = tensor.device if shard.group.get("fused") else None
                lent[tensor]["step"] = torch.tensor(0.0, dtype=torch.float32, device=device)
            settings = self._settings[id(shard.group)]
            group = groups.setdefault(id(shard.group), {**settings, "params": []})
            group["params"].append(tensor)
        return one

    def _take_back(self, one: Stepping, stepped: dict[Tensor, dict[str, Any]]) -> None:
        """Starts to store what the optimizer has made of a sub-group."""
        load, states = one.load, one.states
        for shard, tensor in one.tensors.items():
            tensor.grad = None
            states[shard] = large_states(shard, tensor, stepped[tensor])
            if shard.master:
                load.values(shard).copy_(tensor)
            if shard.packs_moments:
                pack_moments(states[shard], one.packed[shard].get(PACKED))
        self._cut_masters(one)
        self._write(one)

    def _cut_masters(self, one: Stepping) -> None:
        """Replaces masters in the states by their lower halves. Waits once for a GPU: for whether
        too many elements are listed, and how many blocks of weights were changed."""
        states = one.states
        cuts: dict[Shard, Cutting] = {}
        lows: dict[Shard, Tensor] = {}
        for shard, packed in one.packed.items():
            if shard.cuts_master and not shard.stays_whole:
                master = states[shard]["master"]
                low = packed.get(LOW)
                if low is None:
                    low = torch.empty(shard.shape, dtype=torch.int16, device=master.device)
                lows[shard] = low
                cuts[shard] = begin_cut(master, one.load.values(shard), low)
        changed, self._changed = self._changed, {}
        counts = _on_host([*changed.values(), *(cutting.excess for cutting in cuts.values())])
        for shard, blocks in zip(changed, counts):
            if blocks > 0:
                shard.stays_whole = True
                _log.warning(
                    "a parameter of shape %s was changed since the last step: its master in fp32 "
                    "begins anew there, and all of it is stored from now on",
                    tuple(shard.size),
                )
        for (shard, cutting), excess in zip(cuts.items(), counts[len(changed) :]):
            shard.cut = None if shard.stays_whole else cutting.end(excess)
            if shard.cut is not None:
                del states[shard]["master"]
                states[shard] = {LOW: lows[shard], **states[shard]}

    def _stepped(
        self,
        load: Load,
        shard: Shard,
        states: dict[str, Tensor],
        low: Tensor | None,
        is_first: bool,
    ) -> Tensor:
        """The tensor that the optimizer steps: the values, or the master, taken out of `states` or
        made of its lower half."""
        values = load.values(shard)
        if not shard.master:
            return values
        if low is not None:
            master = self._scratch_for(load, shard)
            if is_first:
                master.copy_(values)
            else:
                self._changed[shard] = join(master, values, low, shard.known_cut)
            return master
        if "master" not in states:
            return values.float()
        master = states.pop("master")
        # Where a digest would notice a change of the weights, a whole master does it too.
        if (shard.param in self._edited or shard.cuts_master) and not is_first:
            follow(master, values)
        return master

    def _whole_moments(
        self, load: Load, shard: Shard, packed: Tensor, is_first: bool
    ) -> dict[str, Tensor]:
        """The moments in fp32 that the record has in 8 bits."""
        moments = {name: self._scratch_for(load, shard) for name in NAMES}
        if is_first:
            for moment in moments.values():
                moment.zero_()
        else:
            unpack_moments(packed, moments)
        return moments

    def _scratch_for(self, load: Load, shard: Shard) -> Tensor:
        return self._scratch[load.group.device].take(shard.numel)

    def _gradient(self, load: Load, shard: Shard) -> Tensor:
        """The gradient of a shard, in the dtype that is stepped."""
        stored = self._gradients if self._is_stored(shard) else None
        if stored is not None:
            gradient = shard.shaped(stored.result(shard, load.gradients[shard]))
        else:
            held = self._held.get(shard.param)
            gradient = shard.cut_like(_dense(shard.param.grad) if held is None else held)
        if gradient.dtype != shard.dtype:
            if stored is not None:
                gradient = gradient.clone()  # it lies where the result goes
                memory = load.gradients[shard][: shard.numel * shard.dtype.itemsize]
                target = memory.view(shard.dtype)
            else:
                target = self._scratch_for(load, shard)
            gradient = shard.shaped(target).copy_(gradient)
        if self._scale is not None:
            gradient.mul_(self._scale)
        return gradient

    def _note_changes(self, groups: dict[int, Group]) -> None:
        """Optimizers may count in their groups. All sub-groups begin with the group as it was
        before the step, so all must come to the same."""
        for group, changes in self._changes:
            before = self._settings[id(group)]
            for name, value in groups.get(id(group), {}).items():
                if name == "params" or (name in before and value is before[name]):
                    continue
                if name in changes and not _is_same(changes[name], value):
                    raise RuntimeError(
                        f"{self._stepper.name} computes '{name}' of a group from all of its "
                        "parameters at once, so its states cannot be brought in piece by piece"
                    )
                changes[name] = value

    # --- storing ---

    def _write(self, one: Stepping) -> None:
        """Starts to write the states, and the values of weights on the drive. States that were read
        lie in the record already."""
        load, record = one.load, one.record
        if not record.has(one.states):
            fields = load.group.lay_out(one.states)
            memory = collected(record.memory, fields, record_bytes(fields), one.states)
            record = Record(memory, fields, [])
        if record_bytes(record.fields) == 0:
            self._store.drop(load.group)
        else:
            self._store.write(load.group, record.fields, record.memory)
        for shard, memory in load.stored_values.items():
            self._store.write_weights(_stored(shard), memory, shard)
        if load.buffer is not None:
            self._store.note_computing(load.buffer)


def _count_in_memory(loads: collections.deque[Load]) -> int:
    """How many sub-groups, from the first on, one call of the optimizer steps: those that stay in
    memory one after the other, because each call takes time before it computes."""
    in_memory = itertools.takewhile(lambda load: load.buffer is None, loads)
    return max(sum(1 for _ in in_memory), 1)


def _stored(shard: Shard) -> StoredParameter:
    stored = stored_parameter_of(shard.param)
    assert stored is not None
    return stored


def active_shards(group: SubGroup) -> list[Shard]:
    """The shards that have a gradient."""
    active = [shard for shard in group.shards if shard.param.grad is not None]
    check_layout(active)
    return active


def check_layout(shards: list[Shard]) -> None:
    """Refuses parameters in memory whose elements have moved."""
    for shard in shards:
        if stored_parameter_of(shard.param) is None:
            shard.check_layout()


def _nothing() -> None:
    """Nothing to wait for."""


def _copied(group: Group) -> Group:
    return {n: v.clone() if isinstance(v, Tensor) else v for n, v in group.items()}


def _own(scale: float | Tensor | None) -> float | Tensor | None:
    return scale.clone() if isinstance(scale, Tensor) else scale


def _dense(gradient: Tensor | None) -> Tensor:
    assert gradient is not None  # only active shards are stepped
    if gradient.layout != torch.strided:
        raise RuntimeError("gradients must be dense to be stepped with states on NVMe")
    # A gradient on the drive belongs to another optimizer.
    return gradient if entry_of(gradient) is None else gradient.clone()


def _on_host(counts: list[int | Tensor]) -> list[int]:
    """Numbers of which some are on a GPU, with one wait for all."""
    there = [count for count in counts if isinstance(count, Tensor)]
    known = iter(torch.stack(there).tolist() if there else ())
    return [next(known) if isinstance(count, Tensor) else count for count in counts]


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)
