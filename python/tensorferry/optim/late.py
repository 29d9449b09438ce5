"""What is left of a step when step() returns: it is stepped behind the next forward pass."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

from .._memory.graphs import not_compiled_alone, outside_graphs
from .._memory.pending import can_be_pending, end_pending, make_pending, show_old_values
from .._memory.stored_parameter import stored_parameter_of
from .._tracing import span
from .left import Left
from .spent_gradient import SpentGradient

if TYPE_CHECKING:
    from .load import Work
    from .masters import Edits
    from .step import Step
    from .store import StateStore
    from .sub_groups import SubGroup


class NeedOrder:
    """The order in which the forward pass needs sub-groups: that of the last one. Those that it has
    not told of come last, in their own order."""

    def __init__(self) -> None:
        self._last: list[SubGroup] = []

    def of(self, work: list[Work]) -> list[Work]:
        place = {group: number for number, group in enumerate(self._last)}
        return sorted(work, key=lambda one: place.get(one[0], len(place)))  # which keeps ties

    def note(self, groups: Iterable[SubGroup]) -> None:
        """Says which sub-groups a forward pass needed first, and in which order."""
        first = dict.fromkeys(groups)
        self._last = [*first, *(group for group in self._last if group not in first)]


class LateStep:
    """Steps sub-groups when their states are in memory or somebody needs their parameters,
    whichever comes first, in the order of need. It is its caller's thread that computes: torch uses
    all processors for one forward pass, so another thread would only take some away. A forked child
    has neither the drive nor the threads of its parent: there it steps nothing.

    It holds the gradients. Parameters are pending until they are stepped: a module that is called
    waits for its own, and code that reads one waits for that. If a step fails, so does the call
    that made it."""

    def __init__(
        self, step: Step, store: StateStore, work: list[Work], order: NeedOrder, edits: Edits
    ) -> None:
        self._step = step
        self._store = store
        self._order = order
        self._edits = edits
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._work = dict(work)
        self._left = Left({g: dict.fromkeys(s.param for s in own) for g, own in work})
        self._needed: dict[SubGroup, None] = {}  # by the modules that were called, in their order
        self._streams = {
            device: torch.cuda.current_stream(device)
            for device in {group.device for group in self._work}
            if device.type == "cuda"
        }
        self._hook: weakref.finalize[Any, Any] | None = None
        self.ended = False

    def begin(self, scale: float | Tensor | None) -> None:
        """Takes the gradients, and steps at once what is in memory or cannot be pending."""
        loading = {group: None for group in self._step.loading if group in self._work}
        rest = [one for one in self._work.items() if one[0] not in loading]
        work = [(group, self._work[group]) for group in loading] + self._order.of(rest)
        self._step.expect(work, scale)
        for param in self._left.params:
            self._step.hold_gradient(param)
        self._step.begun = True  # whatever fails from now on, step() cannot be repeated
        now = [param for param in self._left.params if not can_be_pending(param)]
        try:
            self._make_pending(set(self._left.params).difference(now))
            self._settle(now)
            self.advance()
        except BaseException as error:
            self.abandon(error)
            raise

    def _make_pending(self, params: set[Tensor]) -> None:
        for param in self._left.params:
            assert param.grad is not None
            param.grad = SpentGradient(param.grad, self._store.spoil)
            torch.autograd.graph.increment_version(param)
            if param in params:
                in_memory = stored_parameter_of(param) is None
                make_pending(param, self, hides_values=in_memory)
        handle = register_module_forward_pre_hook(_Caller(self))
        self._hook = weakref.finalize(self, handle.remove)
        self._hook.atexit = False

    # --- stepping ---

    def advance(self) -> None:
        """Steps what has arrived. Does not wait for the drive."""
        with self._computing():
            self._step.load_ahead()
            while self._step.is_next_loaded():
                self._compute()
                self._step.load_ahead()
            self._end_if_done()

    def settle(self, params: Iterable[Tensor]) -> None:
        """Steps all sub-groups that have a part of these parameters, for whoever reads one."""
        with span("reader waits for step"):
            self._settle(params)

    def _settle(self, params: Iterable[Tensor]) -> None:
        if not self.ended and self.is_in_child():
            raise RuntimeError(
                "these parameters wait for the rest of a step, which the parent process makes: "
                "call settle() of the optimizer before you fork"
            )
        with self._computing():
            groups = {g for param in params for g in self._left.groups_of(param) if g in self._work}
            self._step.prefer(groups)
            while not self.ended and groups & self._work.keys():
                self._compute()
            self._end_if_done()

    def settle_all(self) -> None:
        """Steps all that is left."""
        self.settle(self._left.params)

    def before_call(self, module: torch.nn.Module) -> None:
        """Steps the parameters of a module that is about to be called."""
        if self.ended:
            return
        own: Iterable[Tensor | None] = module._parameters.values()
        if _calls_unseen(module):
            own = module.parameters()
        needed = [param for param in own if param is not None and self._left.groups_of(param)]
        for param in needed:
            self._needed.update(dict.fromkeys(self._left.groups_of(param)))
        if any(self._left.has(param) for param in needed):
            with span("module waits for step"):
                self._settle(needed)
        if not self.is_in_child():
            self.advance()

    def is_in_child(self) -> bool:
        """Returns whether this is a forked child of the process that makes the step."""
        return os.getpid() != self._process

    def _compute(self) -> None:
        group = self._step.next_group
        assert group is not None
        for shard in self._work[group]:
            show_old_values(shard.param)
        with span("step behind forward"):
            self._step.compute_next()
        del self._work[group]
        for param in self._left.note_stepped(group):
            self._step.let_gradient_go(param)
            end_pending(param)
            torch.autograd.graph.increment_version(param)
            self._edits.note_rounded([param])

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """Inside, the current thread alone computes, whatever mode its caller has set."""
        with self._lock, contextlib.ExitStack() as stack:
            if self.ended:
                yield
                return
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch._C.DisableTorchFunction())
            for device_type in {group.device.type for group in self._work}:
                stack.enter_context(torch.autocast(device_type, enabled=False))
            for device, stream in self._streams.items():
                current = torch.cuda.current_stream(device)
                if current != stream:
                    stream.wait_stream(current)
                    stack.enter_context(torch.cuda.stream(stream))
                    stack.callback(current.wait_stream, stream)
            try:
                yield
            except BaseException as error:
                self.abandon(error)
                raise

    # --- the end ---

    def _end_if_done(self) -> None:
        if not self.ended and not self._work:
            self._end()
            self._step.end(waits_for_writes=False)

    def abandon(self, error: BaseException) -> None:
        """Ends the step in the middle, because of `error`, which gets a note on what that means."""
        with self._lock:
            if not self.ended:
                self._end()
                self._step.abandon(error)

    def _end(self) -> None:
        self.ended = True
        self._order.note(self._needed)
        if self._hook is not None:
            self._hook()
        for param in self._left.params:
            end_pending(param)


class _Caller:
    """The hook on all modules. Does not keep the step alive: parameters and the optimizer do."""

    def __init__(self, late: LateStep) -> None:
        self._late = weakref.ref(late)

    @not_compiled_alone
    def __call__(self, module: torch.nn.Module, _inputs: object) -> None:
        if torch.compiler.is_compiling():
            self._settle_all()  # a graph has the weights of many modules
        elif (late := self._late()) is not None:
            late.before_call(module)

    @outside_graphs
    def _settle_all(self) -> None:
        if (late := self._late()) is not None and not late.is_in_child():
            late.settle_all()


def _calls_unseen(module: torch.nn.Module) -> bool:
    """Returns whether the modules in a module are called where hooks do not see it."""
    return isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod")
