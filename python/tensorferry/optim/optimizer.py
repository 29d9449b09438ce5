"""An optimizer whose states live on NVMe: what users call."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .._memory.buffers import NvmePath, open_space
from .._memory.layout import page_up
from .._memory.snapshot_part import SavedPart, SnapshotPart
from .._tracing import Rounds, span
from . import checkpoints, snapshots
from .announcing import Accelerator, announce
from .backward import BackwardOrder, BackwardStep
from .gradients import GradientStore
from .kept import KeptStates, Limit
from .late import LateStep, NeedOrder
from .load import Work
from .masters import Edits
from .spent_gradient import is_spent
from .step import Pace, Step, active_shards
from .stepper import Stepper
from .store import StateStore
from .sub_groups import LEAST_BYTES, Group, Needs, SubGroups
from .supported import check, check_moments
from .traffic import Traffic

_log = logging.getLogger("tensorferry")


class Offloaded(torch.optim.Optimizer):
    """A torch optimizer whose states live on NVMe. Made by offload(), AdamW and Adam.

    - `optimizer`: a torch optimizer. Its states, if it has any, move to the drive.
    - `nvme_path`: a directory on the drive, or several on several drives.
    - `buffer_count`, `buffer_bytes`: how many page-locked buffers a step uses, and their size.
    - `pipeline_read`: reads the next sub-groups while the step computes one.
    - `pipeline_write`: lets the last writes of a step go on behind the next forward pass. If one
      fails, the next step raises, and so does a forward pass that needs the lost weights.
    - `offload_gradients`: moves each gradient to the drive as soon as backward has computed it;
      p.grad then stands for it.
    - `master_weights`: keeps copies in fp32, on the drive, of parameters in bf16 and fp16, and
      steps those.
    - `moments`: "int8" stores the moments of Adam and AdamW in 8 bits, block by block; "fp32" as
      torch has them. The step computes in fp32 either way.
    - `max_cpu_bytes`: how much of the states stays in memory rather than on the drive: bytes, a
      share of all states such as "50%", "auto" for half of what is left at the first step, or a
      MemoryBudget for what that has left.
    - `max_gpu_bytes`: the same in the memory of the GPU that steps.
    - `overlap`: "backward" steps parameters while the backward pass runs, inside last_backward().
      "iteration" does that too, and step() leaves what the drive has not brought by then: it is
      stepped behind the next forward pass. True and False are the setting of the SwapSpace.
    - `fast_init`: False reserves the space on the drive now rather than at the first step.
    - `handle_options`: settings of the SwapSpace, such as engine or queue_depth.
    """

    __module__ = "tensorferry.optim"  # where users find it
    is_offloaded = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        nvme_path: NvmePath,
        *,
        buffer_count: int = 4,
        buffer_bytes: int = 64 << 20,
        pipeline_read: bool = True,
        pipeline_write: bool = False,
        offload_gradients: bool = False,
        master_weights: bool = False,
        moments: str = "fp32",
        max_cpu_bytes: Limit = 0,
        max_gpu_bytes: Limit = 0,
        overlap: str | bool | None = None,
        fast_init: bool = True,
        **handle_options: Any,
    ) -> None:
        check(optimizer)
        if buffer_count < 1 or buffer_bytes < 1:
            raise ValueError(
                f"buffer_count is {buffer_count} and buffer_bytes {buffer_bytes}: both must be at "
                "least 1"
            )
        if isinstance(overlap, bool):  # that of the SwapSpace
            handle_options["overlap"] = overlap
            overlap = None
        _check_overlap(overlap, offload_gradients)
        kept = KeptStates(max_cpu_bytes, max_gpu_bytes)
        stepper = Stepper(optimizer)
        check_moments(moments, stepper.kind, optimizer.param_groups, master_weights)
        needs = Needs(
            stepper.needs_whole,
            stepper.is_adam,
            master_weights,
            offload_gradients,
            packs_moments=moments == "int8",
        )
        self._moments = moments
        self._stepper = stepper
        self._sub_groups = SubGroups(buffer_bytes, buffer_count, needs)
        self._pace = Pace(buffer_count if pipeline_read else 1, not pipeline_write)
        self._edits = Edits()
        self._traffic, self._rounds = Traffic(), Rounds("iteration")
        self.overlap: str | None = overlap
        self._order, self._need = BackwardOrder(), NeedOrder()
        self._begun: BackwardStep | None = None  # by last_backward(), and not finished
        self._late: LateStep | None = None  # what the last step() has left
        self._store: StateStore | None = None
        self._gradients: GradientStore | None = None
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._store = self._open_store(nvme_path, buffer_count, kept, handle_options)
        try:
            if not fast_init:
                kept.choose(self._sub_groups)
                spare = sum(g.spare_bytes for g in self._sub_groups if not kept.stays(g))
                self._store.space.reserve(2 * spare)
            if optimizer.state:
                checkpoints.import_states(optimizer.state, self._sub_groups, self._store)
        except BaseException:
            with contextlib.suppress(OSError):
                self._store.space.close()
            raise
        stepper.reset(self.param_groups)
        stepper.retire()
        if offload_gradients:
            store = self._store
            self._gradients = GradientStore(self._sub_groups, store.space, store.buffers_bytes)
            for group in self.param_groups:
                self._gradients.watch(group["params"])

    def _open_store(
        self,
        nvme_path: NvmePath,
        buffer_count: int,
        kept: KeptStates,
        handle_options: dict[str, Any],
    ) -> StateStore:
        size = max(
            self._sub_groups.buffer_bytes,
            self._sub_groups.largest,
            -(-self._sub_groups.least_bytes // buffer_count),
            LEAST_BYTES,
        )
        if size > self._sub_groups.buffer_bytes:
            _log.warning(
                "buffer_bytes is %d, and the largest piece of a parameter with its states needs "
                "%d: each buffer takes that much",
                self._sub_groups.buffer_bytes,
                size,
            )
        every = buffer_count * page_up(size)
        devices = {group.device.type for group in self._sub_groups}
        # What is stepped on a GPU has its buffers there.
        on_cpu = page_up(size) if devices and "cpu" not in devices else every
        return StateStore(open_space(nvme_path, on_cpu, **handle_options), every, kept)

    def _open(self) -> StateStore:
        """The store, if the states in it can be used."""
        if self._store is None:
            raise RuntimeError("this optimizer is closed")
        self._store.check_usable()
        return self._store

    # --- parameters ---

    def add_param_group(self, param_group: Group) -> None:
        self._check_no_step("add_param_group()")
        self.settle()
        known = len(self.param_groups)
        super().add_param_group(param_group)
        group = self.param_groups[known]
        if self._store is not None:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            try:
                self._check_moments([group])
                trial = self._sub_groups.trial()
                trial.add(group)
                self._check_buffers(trial, self._store)
            except BaseException:
                del self.param_groups[known]
                raise
        self._sub_groups.add(group)
        if self._gradients is not None:
            self._gradients.watch(group["params"])

    def _check_moments(self, groups: list[Group]) -> None:
        masters = self._sub_groups.needs.masters
        check_moments(self._moments, self._stepper.kind, groups, masters)

    def _check_buffers(self, sub_groups: SubGroups, store: StateStore) -> None:
        if sub_groups.least_bytes > store.buffers_bytes:
            raise ValueError(
                f"the buffers hold {store.buffers_bytes} bytes, and a parameter with its states "
                f"needs {sub_groups.least_bytes} at once: raise buffer_bytes"
            )

    def _cut_for(self, settings: list[Group], store: StateStore) -> None:
        """Cuts the parameters anew if settings of their groups ask for more states than the
        sub-groups have, as amsgrad does. Drops the states then."""
        settings = [{**group, **own} for group, own in zip(self.param_groups, settings)]
        if self._sub_groups.fits(settings):
            return
        if self._gradients is not None and len(self._gradients) > 0:
            raise RuntimeError(
                "amsgrad has changed, and gradients on the drive are cut as before: call "
                "zero_grad() first"
            )
        sub_groups = self._sub_groups.trial()
        for group, own in zip(self.param_groups, settings):
            sub_groups.add(group, own)
        self._check_buffers(sub_groups, store)
        for sub_group in self._sub_groups:
            store.drop(sub_group)
        self._sub_groups.adopt(sub_groups)

    # --- the step ---

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        gradient_scale: float | Tensor | None = None,
    ) -> Any:
        """Steps all parameters that have a gradient. Returns what `closure` returns. Multiplies the
        gradients by `gradient_scale`, in fp32 where there are masters.

        With overlap="iteration" some are stepped later: see settle()."""
        loss = None
        if closure is not None:
            if self.overlap is not None:
                raise ValueError(
                    f'step(closure) cannot be used with overlap="{self.overlap}": leave overlap out'
                )
            with torch.enable_grad():
                loss = closure()
        self._open()
        self.settle()
        if self._begun is not None:
            self._finish(self._begun, gradient_scale)
            self._rounds.end()
            return loss
        self._check_not_spent()
        if self.overlap == "iteration":
            _check_one_rank(self.overlap)
        with span("optimizer step"):
            step = self._new_step(gradient_scale)
            if self.overlap == "iteration":
                work = [(g, active) for g in self._sub_groups if (active := active_shards(g))]
                step.begin(self.param_groups, work)
                self._leave(step, work, gradient_scale)
            else:
                self._edits.note_rounded(step.run(self.param_groups))
        self._rounds.end()
        return loss

    def _new_step(self, scale: float | Tensor | None) -> Step:
        store = self._open()
        self._check_moments(self.param_groups)
        store.settle()
        self._traffic.begin_step(store.moved(), store.waits)
        sub_groups = self._sub_groups
        if not sub_groups.has_states:
            self._cut_for(self.param_groups, store)
        sub_groups.check_groups(self.param_groups)
        store.kept.choose(sub_groups)
        if self._gradients is not None:
            self._gradients.collect()
        edited = self._edits.among(
            p for p, own in sub_groups.shards.items() if own and own[0].master
        )
        return Step(sub_groups, store, self._stepper, self._gradients, self._pace, edited, scale)

    # --- the step in the backward pass ---

    @property
    def is_stepping(self) -> bool:
        """Whether last_backward() has begun to step parameters, which step() finishes."""
        return self._begun is not None and not self._begun.clips

    @contextlib.contextmanager
    def last_backward(
        self, *, clips: bool = False, gradient_scale: float | Tensor | None = None
    ) -> Iterator[None]:
        """`with optimizer.last_backward(): loss.backward()` says that this backward pass is the
        last one before step(): the gradients that it completes are final. Needs
        `overlap`. Learning rates and other settings are those of now.

        With `clips` it steps nothing, but reads states ahead: gradients are there to be clipped
        before step(), whose settings count then. `gradient_scale` is that of step(), which must not
        get another one. With overlap="iteration" enter it after the forward pass: it waits for what
        the last step has left."""
        if self.overlap is None:
            raise RuntimeError(
                'last_backward() needs overlap="backward" or "iteration", given to this optimizer'
            )
        if self._begun is not None and self._begun.clips:  # its step() was left out
            self._give_up_step("another last_backward() was called before step()")
        self._check_no_step("another last_backward()")
        self.settle()
        self._check_not_spent()
        _check_one_rank(self.overlap)
        with torch.no_grad():
            store = self._open()
            step = self._new_step(gradient_scale)
            begun = BackwardStep(
                step,
                store,
                self._order,
                self._sub_groups,
                self._edits,
                clips=clips,
                waits=self.overlap == "backward",
            )
            begun.begin(self.param_groups)
        self._begun = begun
        try:
            with span("backward pass"):
                yield
            with torch.no_grad():
                begun.end()
        except BaseException as error:
            self._begun = None
            begun.abandon(error)
            raise

    def _finish(self, begun: BackwardStep, scale: float | Tensor | None) -> None:
        """Makes what last_backward() has begun a whole step."""
        if scale is not None and not begun.clips:
            raise ValueError(
                "last_backward() has stepped already: give gradient_scale to last_backward(), not "
                "to step()"
            )
        self._begun = None
        with span("optimizer step"):
            if begun.clips:
                begun.step.take_settings(self.param_groups)
            if self.overlap == "iteration":
                self._leave(begun.step, begun.left(), scale)
            else:
                begun.finish(scale)

    def follow(self, accelerator: Accelerator, *, clips: bool = False) -> None:
        """Announces by last_backward() what `accelerator.backward(loss)` knows to be the last
        backward pass of a step: an Accelerator of accelerate, or the one that a Trainer of
        transformers has. `clips` as in last_backward(), for a Trainer with max_grad_norm."""
        announce(accelerator, self, clips)

    # --- the step behind the next forward pass ---

    def _leave(self, step: Step, work: list[Work], scale: float | Tensor | None) -> None:
        """Lets the rest of a step go on when step() has returned."""
        late = LateStep(step, self._open(), work, self._need, self._edits)
        late.begin(scale)
        self._late = None if late.ended else late

    def settle(self) -> None:
        """Steps now what overlap="iteration" has left of the last step(). A call of a module steps
        its parameters, and reading a parameter steps that one. Call settle() before parameters are
        read in another way: by C++ outside of modules, or through tensors that share their memory.
        """
        late, self._late = getattr(self, "_late", None), None
        if late is not None:
            late.settle_all()

    def _check_no_step(self, what: str) -> None:
        if getattr(self, "_begun", None) is not None:  # torch's constructor adds groups
            raise RuntimeError(f"last_backward() has begun a step: call step() before {what}")

    def _check_not_spent(self) -> None:
        if any(is_spent(param.grad) for group in self.param_groups for param in group["params"]):
            raise RuntimeError(
                "the last step has used up its gradients: call zero_grad() and backward() first"
            )

    def _give_up_step(self, why: str) -> None:
        if self._begun is not None:
            begun, self._begun = self._begun, None
            begun.abandon(RuntimeError(why))

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._begun is not None and self._begun.has_changed:
            self._check_no_step("zero_grad()")
        self._give_up_step("zero_grad() was called before step()")
        for group in self.param_groups:
            for param in group["params"]:
                if is_spent(param.grad):  # no values are left to be zeroed
                    param.grad = None
        super().zero_grad(set_to_none)
        closed = self._store is None or self._store.closed
        if set_to_none and self._gradients is not None and not closed:
            self._gradients.drop()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """torch.nn.utils.clip_grad_norm_() over all parameters. The step scales gradients on the
        drive when it reads them. Returns the norm."""
        params = [param for group in self.param_groups for param in group["params"]]
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)

    # --- checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with the same names: each may load the other's. The states are mapped from
        the drive, so saving them takes no memory; they stay those of now, also after later steps.
        Parameters in bf16 and fp16 have their copy in fp32 as "master". Moments in 8 bits are given
        in fp32, and load_state_dict() finds the same 8 bits again."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        self._check_no_step("state_dict()")
        self.settle()
        store = self._open()
        store.settle()
        result = checkpoints.pack(self.param_groups, self._sub_groups, store)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, result)
            result = result if changed is None else changed
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes states that state_dict() of this optimizer, or of torch's own, has returned. They
        go to the drive one sub-group at a time: load the file with torch.load(..., mmap=True), and
        memory never holds all of them."""
        store = self._store
        if store is None or store.closed:
            raise RuntimeError("this optimizer is closed")
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        states = checkpoints.unpack(state_dict, self.param_groups, self._sub_groups)
        saved = state_dict["param_groups"]
        self._check_moments([{**own, "params": []} for own in saved])
        self._give_up_step("load_state_dict() was called before step()")
        self._settle_to_replace(store)
        self._cut_for(saved, store)
        store.spoiled = "a checkpoint could not be loaded to the end"
        for group, other in zip(self.param_groups, saved):
            own = {name: value for name, value in other.items() if name != "params"}
            group.update(copy.deepcopy(own))
        checkpoints.import_states(states, self._sub_groups, store)
        self._edits.forget()
        store.spoiled = None
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _settle_to_replace(self, store: StateStore) -> None:
        """Waits for what the last step has left. What comes replaces what fails."""
        with contextlib.suppress(OSError, RuntimeError):
            self.settle()
        with contextlib.suppress(OSError):
            store.settle()

    def snapshot_part(self) -> SnapshotPart:
        """What tensorferry.snapshot keeps of this optimizer."""
        self._check_no_step("a snapshot")
        self.settle()
        store = self._open()
        store.settle()
        shards = self._sub_groups.shards
        edited = self._edits.among(p for p, own in shards.items() if own and own[0].master)
        return snapshots.part_of(
            self._stepper.name, self.param_groups, self._sub_groups, store, edited
        )

    def resume_part(self, saved: SavedPart) -> None:
        """Takes over what tensorferry.snapshot has kept, in the place of all states."""
        store = self._store
        if store is None or store.closed:
            raise RuntimeError("this optimizer is closed")
        self._give_up_step("a snapshot was resumed before step()")
        self._settle_to_replace(store)
        settings = snapshots.settings_of(saved)
        self._check_moments([{**own, "params": []} for own in settings])
        self._cut_for(settings, store)
        same = snapshots.resume(
            self._stepper.name, saved, self.param_groups, self._sub_groups, store
        )
        self._edits.forget()
        self._edits.note_rounded(same)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an optimizer with states on NVMe cannot be pickled: save its state_dict()")

    # --- life ---

    def stats(self) -> dict[str, Any]:
        """What the swap space holds and has moved, as SwapSpace.stats(), and besides:

        - `kept_bytes`: bytes of states that stay in memory: `kept_cpu_bytes` in that of the system
          and `kept_gpu_bytes` in that of GPUs.
        - `read_bytes_per_parameter`, `written_bytes_per_parameter`: bytes of the drive for each
          parameter in a step, weights that the step reads and writes and gradients between the
          steps too; the average of the last ones.
        - `written_bytes_per_day`: what the drive takes in a day at the pace of these steps.
        - `iteration_seconds`: from step to step, and of them `waited_drive_seconds` in which
          computation waited for states, buffers or writes, `waited_copies_seconds` in which it
          waited for copies of a GPU, and `step_seconds` in which it stepped; averages too.
        """
        if self._store is None:
            raise RuntimeError("this optimizer is closed")
        on_cpu, on_gpu = (self._store.kept.nbytes(kind) for kind in ("cpu", "cuda"))
        parameters = sum(s.numel for own in self._sub_groups.shards.values() for s in own)
        return {
            **self._store.space.stats(),
            "kept_bytes": on_cpu + on_gpu,
            "kept_cpu_bytes": on_cpu,
            "kept_gpu_bytes": on_gpu,
            **self._traffic.stats(parameters),
            **self._traffic.seconds(),
        }

    def close(self) -> None:
        """Waits for its writes and removes its files. The optimizer ends."""
        if self._store is None or self._store.closed:
            return
        self._give_up_step("close() was called before step()")
        try:
            self.settle()
        finally:
            if self._gradients is not None:
                self._gradients.close()
            self._store.close()

    def __repr__(self) -> str:
        space = None if self._store is None else self._store.space
        count = len(self._sub_groups.shards)
        return f"<tensorferry.optim.{self._stepper.name} of {count} parameters: {space!r}>"


def _check_overlap(overlap: str | None, offload_gradients: bool) -> None:
    if overlap not in (None, "backward", "iteration"):
        raise ValueError(f'overlap is {overlap!r}: give "backward" or "iteration", or leave it out')
    if overlap is not None and offload_gradients:
        raise ValueError(
            f'offload_gradients=True cannot be used with overlap="{overlap}", which frees '
            "gradients as soon as they are final: choose one"
        )
    if overlap is not None:
        _check_one_rank(overlap)


def _check_one_rank(overlap: str | None) -> None:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and (ranks := torch.distributed.get_world_size()) > 1:
        raise RuntimeError(
            f'overlap="{overlap}" works with one rank, and there are {ranks}: gradients of several '
            "ranks, as with DistributedDataParallel, are averaged late in a backward pass; leave "
            "overlap out"
        )
