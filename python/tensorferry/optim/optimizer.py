"""The step of an optimizer whose states live on NVMe."""

import collections
import contextlib
import logging

import torch

from .._memory.buffers import letting_go, open_space
from .._memory.gpu_pool import GpuPool
from .._memory.heap import note_freed
from .._memory.layout import page_up
from .._memory.stored_parameter import home_of
from .._notes import add_note
from .._tracing import span
from .checkpoints import Checkpoints
from .gradients import GradientStore, entry_of
from .masters import HALF, Followed, follow
from .plan import LEAST_BYTES, Plan, check_groups
from .supported import ELEMENTWISE, check, plain_step

_log = logging.getLogger("tensorferry")


class _Load:
    """A sub-group on its way into a buffer."""

    def __init__(self, group, record, active):
        self.group = group
        self.record = record  # room for the states
        self.active = active  # shards that have a gradient
        self.operations = []
        self.homes = {}  # shard -> room for its values, where those are on the drive too
        self.gradients = {}  # shard -> room for its gradient

    def coming(self):
        """An operation that is not done yet."""
        coming = next((op for op in self.operations if not op.done()), None)
        return getattr(coming, "operation", coming)

    def values(self, shard):
        if shard not in self.homes:
            return shard.values()
        room = self.homes[shard][: shard.numel * shard.param.dtype.itemsize]
        return shard.shaped(room.view(shard.param.dtype))


class Offloaded(Checkpoints, torch.optim.Optimizer):
    """A torch optimizer whose states live on NVMe. Made by offload(), AdamW and Adam.

    `nvme_path` is a directory on the drive, or several on several drives. `pipeline_write=True`
    lets the last writes of a step go on behind the next forward pass; if one fails, the next step
    says so, and so does a forward pass that needs what was not written. `offload_gradients=True`
    moves each gradient to the drive as soon as it is there; p.grad then stands for it.
    `master_weights=True` keeps copies in fp32, on the drive, of parameters in bf16 and fp16 and
    steps those. `fast_init=False` takes the room on the drive now rather than at the first step.
    """

    __module__ = "tensorferry.optim"  # where users find it
    is_offloaded = True

    def __init__(
        self,
        optimizer,
        nvme_path,
        *,
        buffer_count=4,
        buffer_bytes=64 << 20,
        pipeline_read=True,
        pipeline_write=False,
        offload_gradients=False,
        master_weights=False,
        fast_init=True,
        **handle_options,
    ):
        check(optimizer)
        if buffer_count < 1 or buffer_bytes < 1:
            raise ValueError(
                f"buffer_count is {buffer_count} and buffer_bytes {buffer_bytes}: both must be at "
                "least 1"
            )
        self._inner = optimizer
        self._step_inner = plain_step(type(optimizer))
        # Classes that are made of these may have other states.
        self._is_adam = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
        self._space = None
        self._master_weights = master_weights
        self._pipeline_read = pipeline_read
        self._pipeline_write = pipeline_write
        self._buffer_count = buffer_count
        self._writes = []
        self._gradient_scale = None
        self._begun = False  # has a step changed anything?
        self._group_changes = []  # (group, its changes) that a step has made
        self._spoiled = None  # why the states cannot be used
        self._followed = Followed()
        self._edited = set()  # parameters that somebody has changed since the last step
        self._gradients = GradientStore() if offload_gradients else None
        self._plan = Plan(buffer_bytes, type(optimizer) not in ELEMENTWISE)
        self._shards = {}  # param -> its shards
        self._amsgrad = []  # of each group, when it was cut
        self._groups = self._plan.groups
        self._gpu_pools = {}  # device -> the room for what is stepped there
        super().__init__(optimizer.param_groups, optimizer.defaults)
        room = max(buffer_bytes, self._plan.largest, LEAST_BYTES)
        if room > buffer_bytes:
            _log.warning(
                "buffer_bytes is %d, and the largest piece of a parameter with its states needs "
                "%d: the buffers are made as large as that",
                buffer_bytes,
                room,
            )
        self._buffers_bytes = buffer_count * page_up(room)
        on_gpu = all(group.device.type != "cpu" for group in self._groups) and self._groups
        # What is stepped on a GPU has its buffers there.
        memory = page_up(room) if on_gpu else self._buffers_bytes
        self._space = open_space(nvme_path, memory, **handle_options)
        try:
            if not fast_init:
                self._space.reserve(2 * sum(group.spare_bytes for group in self._groups))
            if optimizer.state:
                self._import(optimizer.state)
        except BaseException:
            with contextlib.suppress(OSError):
                self._space.close()
            raise
        optimizer.state = collections.defaultdict(dict)
        # Schedulers that have the optimizer itself reach the same groups.
        optimizer.param_groups = self.param_groups
        optimizer.step = _moved
        if offload_gradients:
            self._gradients.attach(self)

    # --- the plan ---

    def _element_bytes(self, group, param):
        states = 3  # at most, of torch's own
        if self._is_adam:
            states = 3 if group.get("amsgrad", self._inner.defaults["amsgrad"]) else 2
        master = self._wants_master(param)
        size = 4 if master else param.dtype.itemsize
        state_bytes = states * size + (4 if master else 0)
        held = state_bytes
        if home_of(param) is not None:
            held += param.dtype.itemsize
        if master or self._gradients is not None:
            held += size
        return state_bytes, held

    def _wants_master(self, param):
        return self._master_weights and param.dtype in HALF

    def _cut(self, plan, group, settings):
        """Adds the parameters of a group to a plan. Returns {param: its shards}."""
        return {
            param: plan.add(
                group,
                param,
                self._wants_master(param),
                self._element_bytes(settings, param),
                home_of(param),
            )
            for param in group["params"]
        }

    def _check_room(self, plan):
        room = self._space.stats()["buffer_bytes"]
        if plan.largest > room:
            raise ValueError(
                f"the buffers hold {room} bytes, and a parameter with its states needs "
                f"{plan.largest} at once: raise buffer_bytes"
            )

    def add_param_group(self, param_group):
        known = len(self.param_groups)
        super().add_param_group(param_group)
        group = self.param_groups[known]
        if self._space is not None:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            try:
                trial = Plan(self._plan.buffer_bytes, self._plan.whole)
                self._cut(trial, group, group)
                self._check_room(trial)
            except BaseException:
                del self.param_groups[known]
                raise
        self._shards.update(self._cut(self._plan, group, group))
        self._amsgrad.append(bool(group.get("amsgrad", self.defaults.get("amsgrad"))))
        if self._space is not None and self._gradients is not None:
            self._gradients.watch(group["params"])

    def _cut_for(self, settings):
        """Cuts the parameters anew where settings of their groups ask for more states than the
        buffers were cut for, as amsgrad does. The states are dropped."""
        settings = [{**group, **own} for group, own in zip(self.param_groups, settings)]
        wanted = [bool(own.get("amsgrad")) for own in settings]
        if not self._is_adam or wanted == self._amsgrad:
            return
        if self._gradients is not None and len(self._gradients) > 0:
            raise RuntimeError(
                "amsgrad has changed, and gradients on the drive are cut as it was before: call "
                "zero_grad() first"
            )
        plan = Plan(self._plan.buffer_bytes, self._plan.whole)
        shards = {}
        for group, own in zip(self.param_groups, settings):
            shards.update(self._cut(plan, group, own))
        self._check_room(plan)
        for group in self._groups:
            self._space.drop(group.key)
        self._plan, self._groups, self._shards = plan, plan.groups, shards
        self._amsgrad = wanted

    # --- the step ---

    @torch.no_grad()
    def step(self, closure=None, *, gradient_scale=None):
        """Steps all parameters that have a gradient. Returns what `closure` returns. The gradients
        are multiplied by `gradient_scale`, in fp32 where there are masters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_usable()
        self._settle()
        if not any(group.slots for group in self._groups):
            self._cut_for(self.param_groups)
        check_groups(self.param_groups, self._shards)
        if self._gradients is not None:
            self._gradients.collect()
        self._gradient_scale = gradient_scale
        with span("optimizer step"):
            self._step_all()
        return loss

    def _step_all(self):
        self._edited = self._followed.edited(
            param for param, shards in self._shards.items() if shards and shards[0].master
        )
        work = [(group, active) for group in self._groups if (active := self._active(group))]
        self._begun = False
        self._group_changes = [(group, {}) for group in self.param_groups]
        takes_memory = self._takes_memory()
        loads = collections.deque()
        done = 0
        try:
            for done in range(len(work)):
                with letting_go():
                    self._begin_ahead(work[done:], loads)
                    # Nobody else may hold the load: its buffer is free when its writes are done.
                    self._compute(loads.popleft())
                if takes_memory:
                    note_freed(work[done][0].spare_bytes)
            done = len(work)
            for group, changes in self._group_changes:
                group.update(changes)
            self._followed.note({shard.param for _, active in work for shard in active})
            if not self._pipeline_write:
                self._settle()
        except BaseException as error:
            self._fail(error, done, len(work), loads)
            raise
        finally:
            self._inner.state = collections.defaultdict(dict)
            self._inner.param_groups = self.param_groups

    def _takes_memory(self):
        """Whether computing takes memory besides the buffers. torch's fused Adam does not."""
        fused = self._is_adam and all(group.get("fused") for group in self.param_groups)
        return not fused or (self._master_weights and self._gradients is not None)

    def _begin_ahead(self, work, loads):
        """Begins the first of the sub-groups, and those after it for which there is room before
        the first has come."""
        most = self._buffer_count if self._pipeline_read else 1
        while len(loads) < min(most, len(work)):
            load = self._begin(*work[len(loads)], loads[0] if loads else None)
            if load is None:
                break
            loads.append(load)

    def _active(self, group):
        active = [shard for shard in group.shards if shard.param.grad is not None]
        for shard in active:
            if home_of(shard.param) is None:
                shard.check_layout()
        return active

    def _begin(self, group, active, behind):
        """Takes a buffer and starts to fill it. None where there is no room before the load
        `behind` which it comes is there.

        The buffer: the record of states, then values that are on the drive, then gradients."""
        known = {slot.shard for slot in group.slots}
        complete = all(shard in known for shard in active)
        # States that come make a new record in the place of the old one.
        spare = 0 if complete else group.spare_bytes
        record = page_up(max(group.record_bytes, spare))
        end = record
        homes = {}
        gradients = {}
        for shard in active:
            if home_of(shard.param) is not None:
                size = page_up(shard.numel * shard.param.dtype.itemsize)
                homes[shard] = slice(end, end + size)
                end += size
            if shard.master or self._is_stored(shard):
                size = page_up(shard.numel * max(shard.dtype.itemsize, shard.param.dtype.itemsize))
                gradients[shard] = slice(end, end + size)
                end += size
        memory = self._take(group.device, end, behind)
        if memory is None:
            return None
        load = _Load(group, memory[:record], active)
        with self._reading(group.device):
            if group.slots:
                load.operations.append(self._space.get(group.key, memory[: group.record_bytes]))
            for shard, room in gradients.items():
                load.gradients[shard] = memory[room]
                if self._is_stored(shard):
                    load.operations += self._gradients.read(shard, memory[room])
        for shard, room in homes.items():  # copied, where they are in memory, by who computes
            load.homes[shard] = memory[room]
            if not (shard.master and shard in known) or shard.param in self._edited:
                home = home_of(shard.param)
                load.operations += home.read(memory[room], shard.begin, shard.end)
        return load

    def _take(self, device, nbytes, behind):
        """Room in the buffers, or on the GPU that steps. None where there is none before the load
        `behind` is there; on a GPU, where there is none now."""
        if device.type == "cpu":
            with span("wait for room"):
                buffer = self._take_buffer(nbytes, behind)
            return None if buffer is None else torch.frombuffer(buffer, dtype=torch.uint8)
        if device not in self._gpu_pools:
            self._gpu_pools[device] = GpuPool(device, self._buffers_bytes)
        room = self._gpu_pools[device]
        wait = behind is None
        while (memory := room.take(nbytes, beyond=wait and not self._writes)) is None and wait:
            self._writes.pop(0).wait()
        return memory

    def _take_buffer(self, nbytes, behind):
        if behind is None:
            return self._space.take(nbytes)
        while True:
            coming = behind.coming()
            try:
                return self._space.take(nbytes, 0 if coming is None else None, until=coming)
            except TimeoutError:
                if coming is None:
                    return None

    def _reading(self, device):
        room = self._gpu_pools.get(device)
        return contextlib.nullcontext() if room is None else room.reading()

    def _is_stored(self, shard):
        return self._gradients is not None and self._gradients.has(shard)

    def _gradient(self, load, shard):
        """The gradient of a shard, in the dtype that is stepped."""
        if self._is_stored(shard):
            gradient = shard.shaped(self._gradients.result(shard, load.gradients[shard]))
        elif shard.param.grad.layout == torch.strided:
            gradient = shard.param.grad
            if entry_of(gradient) is not None:  # it is with another optimizer
                gradient = gradient.clone()
            gradient = shard.cut_like(gradient)
        else:
            raise RuntimeError("gradients must be dense to be stepped with states on NVMe")
        if gradient.dtype != shard.dtype:
            if self._is_stored(shard):
                gradient = gradient.clone()  # it lies where the result goes
            room = load.gradients[shard][: shard.numel * shard.dtype.itemsize]
            gradient = shard.shaped(room.view(shard.dtype)).copy_(gradient)
        if self._gradient_scale is not None:
            gradient.mul_(self._gradient_scale)
        return gradient

    def _compute(self, load):
        with span("wait for states"):
            for operation in load.operations:
                operation.wait()
        group = load.group
        state = collections.defaultdict(dict)
        groups = {}
        stepped = {}  # shard -> the tensor that is stepped
        first = not group.slots and self._is_adam
        record = self._first_states(load) if first else group.slots
        for shard in group.shards:
            slots = {slot.name: slot.of(load.record) for slot in record if slot.shard is shard}
            if shard not in load.active:
                stepped[shard] = (None, slots)
                continue
            tensor = values = load.values(shard)
            if shard.master and "master" in slots:
                tensor = slots.pop("master")
                if shard.param in self._edited and not first:
                    follow(tensor, values)
            elif shard.master:
                tensor = values.float()
            tensor.grad = self._gradient(load, shard)
            state[tensor] = {**shard.small, **slots}
            if first:
                device = tensor.device if shard.group.get("fused") else None
                state[tensor]["step"] = torch.tensor(0.0, dtype=torch.float32, device=device)
            own = groups.setdefault(id(shard.group), {**shard.group, "params": []})
            own["params"].append(tensor)
            stepped[shard] = (tensor, None)
        self._inner.state = state
        self._inner.param_groups = list(groups.values())
        self._begun = True
        with span(f"{type(self._inner).__name__} step"):
            self._step_inner(self._inner)
        self._note_group_changes(groups)
        states = {}
        for shard, (tensor, slots) in stepped.items():
            if tensor is None:
                states[shard] = slots
                continue
            tensor.grad = None
            states[shard] = self._sort(shard, tensor, self._inner.state[tensor])
            if shard.master:
                load.values(shard).copy_(tensor)
        self._inner.state = collections.defaultdict(dict)
        self._inner.param_groups = self.param_groups
        self._store(group, states, load.record)
        for shard, room in load.homes.items():
            self._writes += home_of(shard.param).write(room, shard.begin, shard.end)

    def _note_group_changes(self, groups):
        """Optimizers may count in their groups. All sub-groups begin with the group as it was
        before the step, so all must come to the same."""
        for group, changes in self._group_changes:
            for name, value in groups.get(id(group), {}).items():
                if name == "params" or (name in group and value is group[name]):
                    continue
                if name in changes and not _is_same(changes[name], value):
                    raise RuntimeError(
                        f"{type(self._inner).__name__} computes '{name}' of a group from all of "
                        "its parameters at once, so its states cannot be brought in piece by piece"
                    )
                changes[name] = value

    def _first_states(self, load):
        """Adam's states before its first step, as torch makes them, but in the buffer: memory from
        elsewhere, taken and given back for each sub-group, adds up in the heap."""
        made = {}
        for shard in load.active:
            names = ["master"] if shard.master else []
            names += ["exp_avg", "exp_avg_sq"]
            names += ["max_exp_avg_sq"] if shard.group["amsgrad"] else []
            like = torch.empty(shard.shape, dtype=shard.dtype, device="meta")
            made[shard] = dict.fromkeys(names, like)
        slots = load.group.lay_out(made)
        for slot in slots:
            state = slot.of(load.record).zero_()
            if slot.name == "master":
                state.copy_(load.values(slot.shard))
        return slots

    def _sort(self, shard, tensor, state):
        """Keeps what is small, returns what goes to the drive."""
        large = {"master": tensor} if shard.master else {}
        shard.small = {}
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                large[name] = value
            else:
                shard.small[name] = value
        return large

    def _store(self, group, states, memory):
        """Writes the states of a sub-group. Those that were read lie in the buffer already."""
        slots = group.lay_out(states)
        size = page_up(slots[-1].offset + slots[-1].nbytes) if slots else 0
        if size == 0:
            group.slots = []
            self._space.drop(group.key)
            return
        begin = memory.data_ptr()
        end = begin + memory.numel()
        if size > memory.numel():
            memory = torch.empty(size, dtype=torch.uint8, device=memory.device)
        for slot in slots:  # what moves within the buffer may be in the way of others
            source = states[slot.shard][slot.name]
            moves = source.data_ptr() != memory.data_ptr() + slot.offset
            if moves and begin <= source.data_ptr() < end:
                states[slot.shard][slot.name] = source.clone()
        for slot in slots:
            target = slot.of(memory)
            source = states[slot.shard][slot.name]
            if source.data_ptr() != target.data_ptr():
                target.copy_(source)
        group.slots = slots
        self._writes.append(self._space.put(group.key, memory[:size]))

    # --- when something goes wrong ---

    def _settle(self):
        """Waits for what the last step has written."""
        failed = None
        for operation in self._writes:
            try:
                operation.wait()
            except OSError as error:
                failed = failed or error
        self._writes = []  # not before: Ctrl-C must not lose one that has failed
        if failed is not None:
            if self._spoiled is None:
                self._spoiled = (
                    "what the last step computed could not be written, so some states are those "
                    f"of the step before ({failed})"
                )
            raise failed

    def _fail(self, error, done, total, loads):
        if self._begun:  # said first of all: another Ctrl-C may come while writes are waited for
            self._spoiled = self._spoiled or (
                f"a step ended after {done} of {total} sub-groups ({error}): parameters and states "
                "are of different steps"
            )
        for load in loads:
            for operation in load.operations:
                operation.cancel()
        loads.clear()
        with contextlib.suppress(OSError):
            self._settle()
        if self._spoiled is not None:
            add_note(error, self._spoiled + "; load a checkpoint before you go on")

    def _check_usable(self):
        if self._space is None or self._space.closed:
            raise RuntimeError("this optimizer is closed")
        if self._spoiled is not None:
            raise RuntimeError(self._spoiled + "; load a checkpoint (load_state_dict)")

    # --- gradients ---

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        if set_to_none and self._gradients is not None and not self._space.closed:
            self._gradients.drop()

    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """torch.nn.utils.clip_grad_norm_() over all parameters. Gradients on the drive are scaled
        when the step reads them. Returns the norm."""
        params = [param for group in self.param_groups for param in group["params"]]
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)

    # --- life ---

    def stats(self):
        """What the swap space holds and has moved: SwapSpace.stats()."""
        return self._space.stats()

    def close(self):
        """Waits for what is being written and removes the files. The optimizer ends."""
        if self._space is None or self._space.closed:
            return
        if self._gradients is not None:
            self._gradients.close()
        try:
            self._settle()
        finally:
            self._space.close()

    def __repr__(self):
        name = type(self._inner).__name__
        return f"<tensorferry.optim.{name} of {len(self._shards)} parameters: {self._space!r}>"

    def __getstate__(self):
        raise TypeError("an optimizer with states on NVMe cannot be pickled: save its state_dict()")


def _is_same(one, other):
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return one == other


def _moved(*_):
    raise RuntimeError("the states of this optimizer are on NVMe: step what offload() has returned")
