"""A step that is made while the backward pass runs."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._tracing import span
from .left import Left
from .spent_gradient import SpentGradient
from .step import active_shards, check_layout

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from .load import Work
    from .masters import Edits
    from .step import Step
    from .store import StateStore
    from .sub_groups import Group, SubGroup

_POLL_SECONDS = 0.0002


class BackwardOrder:
    """The order in which the backward pass completes the gradients of sub-groups: that of the last
    one, and before the first the reverse of their own."""

    def __init__(self) -> None:
        self._last: list[SubGroup] = []

    def of(self, groups: Iterable[SubGroup]) -> list[SubGroup]:
        groups = list(groups)
        known = set(groups).intersection(self._last)
        new = [group for group in reversed(groups) if group not in known]
        return [*new, *(group for group in self._last if group in known)]

    def note(self, groups: list[SubGroup]) -> None:
        """Says in which order sub-groups were complete. The others come last."""
        complete = set(groups)
        self._last = [*groups, *(group for group in self._last if group not in complete)]


class BackwardStep:
    """Steps each sub-group as soon as its gradients are final and its states are in memory, in the
    order of the last backward pass. finish() steps what is left then.

    With `clips` it only brings states in: somebody needs all gradients before the step."""

    def __init__(
        self,
        step: Step,
        store: StateStore,
        order: BackwardOrder,
        groups: Iterable[SubGroup],
        edits: Edits,
        *,
        clips: bool,
        waits: bool,
    ) -> None:
        """`edits` learn which parameters have been stepped. `waits`: the end of the backward pass
        waits for states of sub-groups whose gradients are final."""
        self.step = step
        self._store = store
        self._order = order
        self._edits = edits
        self._groups = order.of(groups)
        self._clips = clips
        self._waits = waits
        self._hooks: list[RemovableHandle] = []
        self._complete: list[SubGroup] = []
        self._taken: set[Tensor] = set()
        self._stepped: set[SubGroup] = set()
        self._noted: set[Tensor] = set()  # parameters of which `edits` know
        # What a GPU had been given at this gradient and at the one before.
        self._marks: collections.deque[torch.cuda.Event] = collections.deque(maxlen=2)
        params = {
            group: dict.fromkeys(s.param for s in group.shards if s.param.requires_grad)
            for group in self._groups
        }
        # Parameters without their final gradient.
        self._missing = {group: len(own) for group, own in params.items()}
        self._left = Left(params)

    @property
    def has_changed(self) -> bool:
        """Whether it has stepped a parameter."""
        return self.step.begun

    @property
    def clips(self) -> bool:
        return self._clips

    def begin(self, param_groups: list[Group]) -> None:
        """Begins to bring states in, and watches the gradients."""
        work: list[Work] = []
        for group in self._groups:
            shards = [shard for shard in group.shards if shard.param.requires_grad]
            check_layout(shards)
            if shards:
                work.append((group, shards))
        self.step.begin(param_groups, work)
        self.step.load_ahead()
        for param in self._left.params:
            self._hooks.append(param.register_post_accumulate_grad_hook(self._take))

    def end(self) -> None:
        """Says that the backward pass has ended. Steps what is complete."""
        self._unhook()
        self._order.note(self._complete)
        while not self._clips and self._is_next_complete():
            if not (self._waits or self.step.is_next_loaded()):
                return
            self._compute()

    def abandon(self, error: BaseException) -> None:
        """Says that the backward pass has failed, or that nobody wants the step."""
        self._unhook()
        self.step.abandon(error)

    def finish(self, scale: float | Tensor | None) -> None:
        """Steps the sub-groups that are left, with the gradients that they have."""
        self.step.expect(self.left(), scale)
        self._edits.note_rounded(self.step.finish() - self._noted)

    def left(self) -> list[Work]:
        """What is left to step, with the gradients that there are."""
        left = [group for group in self._groups if group not in self._stepped]
        return [(group, own) for group in left if (own := active_shards(group))]

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # --- in the backward pass ---

    def _take(self, param: Tensor) -> None:
        """The hook: a gradient is final, unless it comes again."""
        if self._clips and param in self._taken:
            return
        try:
            self._check(param)
        except RuntimeError as error:
            self.step.abandon(error)
            raise
        for group in self._left.groups_of(param):
            self._missing[group] -= 1
            if self._missing[group] == 0:
                self._complete.append(group)
        self._taken.add(param)
        if param.is_cuda:
            self._marks.append(torch.cuda.Event())
            self._marks[-1].record(torch.cuda.current_stream(param.device))
        with torch.no_grad():
            self.step.load_ahead()
            while not self._clips and self._is_next_complete() and self._arrives():
                self._compute()
                self.step.load_ahead()

    def _arrives(self) -> bool:
        """Returns whether the states of the next sub-group are in memory. While a GPU has still to
        do what it was given, it waits for them: that costs nothing, and torch gives a GPU a whole
        backward pass at once. Steps that are given to it later would come after all of that, and
        keep their buffers until then."""
        while not self.step.is_next_loaded():
            if not self._is_gpu_behind():
                return False
            time.sleep(_POLL_SECONDS)
            self.step.load_ahead()
        return True

    def _is_gpu_behind(self) -> bool:
        """Returns whether a GPU has not come to the gradient before this one."""
        return len(self._marks) == 2 and not self._marks[0].query()

    def _check(self, param: Tensor) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward(create_graph=True) needs the parameters as they are, and "
                "last_backward() steps them: call backward() outside of last_backward()"
            )
        if param in self._taken:
            raise RuntimeError(
                f"a parameter of shape {tuple(param.size())} got two gradients in one "
                "last_backward(): reentrant checkpointing computes those of shared weights one "
                "after the other; use checkpoint(..., use_reentrant=False), or call backward() "
                "once, or leave overlap out"
            )

    def _is_next_complete(self) -> bool:
        group = self.step.next_group
        return group is not None and self._missing[group] == 0

    def _compute(self) -> None:
        group = self.step.next_group
        assert group is not None
        with span("step in backward"):
            self.step.compute_next()
        self._stepped.add(group)
        for param in self._left.note_stepped(group):
            if param.grad is not None:
                param.grad = SpentGradient(param.grad, self._store.spoil)
            # torch's fused kernels do not: a graph that needs the old values must raise.
            torch.autograd.graph.increment_version(param)
            self._edits.note_rounded([param])
            self._noted.add(param)
