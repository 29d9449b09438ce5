"""A step that is made while the backward pass runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._tracing import span
from .spent_gradient import SpentGradient
from .step import active_shards, check_layout

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from .load import Work
    from .step import Step
    from .store import StateStore
    from .sub_groups import Group, SubGroup


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
        clips: bool,
    ) -> None:
        self._step = step
        self._store = store
        self._order = order
        self._groups = order.of(groups)
        self._clips = clips
        self._hooks: list[RemovableHandle] = []
        self._missing: dict[SubGroup, int] = {}  # parameters without their final gradient
        self._of: dict[Tensor, list[SubGroup]] = {}  # sub-groups that have a part of a parameter
        self._left: dict[Tensor, int] = {}  # how many of these are not stepped
        self._complete: list[SubGroup] = []
        self._taken: set[Tensor] = set()
        self._stepped: set[SubGroup] = set()
        for group in self._groups:
            params = dict.fromkeys(s.param for s in group.shards if s.param.requires_grad)
            self._missing[group] = len(params)
            for param in params:
                self._of.setdefault(param, []).append(group)
                self._left[param] = self._left.get(param, 0) + 1

    @property
    def has_changed(self) -> bool:
        """Whether it has stepped a parameter."""
        return self._step.begun

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
        self._step.begin(param_groups, work)
        self._step.load_ahead()
        for param in self._of:
            self._hooks.append(param.register_post_accumulate_grad_hook(self._take))

    def end(self) -> None:
        """Says that the backward pass has ended. Steps what is complete."""
        self._unhook()
        self._order.note(self._complete)
        while not self._clips and self._is_next_complete():
            self._compute()

    def abandon(self, error: BaseException) -> None:
        """Says that the backward pass has failed, or that nobody wants the step."""
        self._unhook()
        self._step.abandon(error)

    def finish(self, scale: float | Tensor | None) -> set[Tensor]:
        """Steps the sub-groups that are left, with the gradients that they have. Returns all
        parameters that have changed."""
        left = [group for group in self._groups if group not in self._stepped]
        self._step.expect([(group, own) for group in left if (own := active_shards(group))], scale)
        return self._step.finish()

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
            self._step.abandon(error)
            raise
        for group in self._of[param]:
            self._missing[group] -= 1
            if self._missing[group] == 0:
                self._complete.append(group)
        self._taken.add(param)
        with torch.no_grad():
            self._step.load_ahead()
            while not self._clips and self._is_next_complete() and self._step.is_next_loaded():
                self._compute()
                self._step.load_ahead()

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
        group = self._step.next_group
        return group is not None and self._missing[group] == 0

    def _compute(self) -> None:
        group = self._step.next_group
        assert group is not None
        with span("step in backward"):
            self._step.compute_next()
        self._stepped.add(group)
        for param in dict.fromkeys(shard.param for shard in group.shards):
            if param in self._left:
                self._left[param] -= 1
                if self._left[param] == 0 and param.grad is not None:
                    param.grad = SpentGradient(param.grad, self._store.spoil)
                # torch's fused kernels do not: a graph that needs the old values must raise.
                torch.autograd.graph.increment_version(param)
