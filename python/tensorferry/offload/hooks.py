"""Hooks on modules: they hold weights in memory while a module is called or loaded."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from .._memory.graphs import not_compiled_alone, outside_graphs
from .._memory.stored_parameter import StoredParameter, stored_parameter_of
from .residency import Residency
from .saved_weights import save_weights
from .unit import Unit

_MODULES = torch.nn.modules.module.__file__


class OnDrive:
    """Base of objects that belong to weights on the drive: they can be neither copied nor pickled.

    A hook of such an object keeps its module from being copied, too."""

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(
            "a model with weights on NVMe cannot be copied: call close(restore=True) first"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError("a model with weights on NVMe cannot be pickled: save its state_dict()")


class Call(NamedTuple):
    """A call of a module that has not ended yet."""

    module: torch.nn.Module
    units: Collection[Unit]  # in memory until the call ends
    at_end: contextlib.ExitStack  # leaves the units
    frame: FrameType  # torch's, which lasts as long as the call


class Calls(threading.local):
    """The calls of modules that the current thread is in, innermost last."""

    def __init__(self) -> None:
        self._stack: list[Call] = []

    def begin(
        self, module: torch.nn.Module, units: Collection[Unit], frame: FrameType
    ) -> contextlib.ExitStack:
        """Notes a call that lasts as long as `frame` and holds these units as long. Returns the
        stack that its end closes."""
        self.end_interrupted()
        at_end = contextlib.ExitStack()
        self._stack.append(Call(module, units, at_end, frame))
        return at_end

    def end(self, module: torch.nn.Module) -> None:
        """Ends the innermost call if it is one of `module`. If not, a hook before ours has failed
        and ours has begun no call."""
        if self.end_with(module):
            self._stack.pop().at_end.close()

    def end_with(self, module: torch.nn.Module) -> bool:
        """Returns whether the innermost call is one of the module."""
        return bool(self._stack) and self._stack[-1].module is module

    def has(self, module: torch.nn.Module) -> bool:
        """Returns whether the thread is in a call of the module."""
        return any(call.module is module for call in self._stack)

    def hold_for(self, module: torch.nn.Module, units: Collection[Unit]) -> bool:
        """Returns whether the innermost call, of another module, holds all of these units."""
        self.end_interrupted()
        if not self._stack or self.end_with(module):
            return False
        held = self._stack[-1].units
        return all(unit in held for unit in units)

    def end_interrupted(self) -> None:
        """Ends the calls that Ctrl-C has interrupted: torch calls our hook after an exception, but
        not after Ctrl-C."""
        while self._stack:
            running: FrameType | None = sys._getframe()
            while running is not None and running is not self._stack[-1].frame:
                running = running.f_back
            if running is not None:
                return
            self._stack.pop().at_end.close()


class ModuleHooks(OnDrive):
    """The hooks on one module. They hold its units in memory while the module needs them."""

    def __init__(
        self,
        module: torch.nn.Module,
        units: list[Unit],
        residency: Residency,
        calls: Calls,
        *,
        begins_pass: bool,
        asks_for_parts: Callable[[], bool] | None = None,
    ) -> None:
        """`begins_pass`: each call of the module begins a pass over the model. `asks_for_parts`
        tells whether its calls bring in parts of its units by themselves."""
        self._asks_for_parts = asks_for_parts
        self._module = module
        self._units = units
        self._residency = residency
        self._calls = calls
        self._begins_pass = begins_pass
        self._is_open = False  # whether a call of the module has begun and not ended
        self._handles = [
            *self._watch_calls(module),
            module.register_load_state_dict_pre_hook(self.before_load),
            module.register_load_state_dict_post_hook(self.after_load),
            # torch sets an attribute of this one, which a method cannot have.
            module.register_state_dict_post_hook(functools.partial(self.after_state_dict)),
        ]

    def _watch_calls(self, module: torch.nn.Module) -> list[RemovableHandle]:
        self._after_forward = module.register_forward_hook(self.after_forward, always_call=True)
        return [
            self._after_forward,
            module.register_forward_pre_hook(self.before_forward, prepend=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    # In a graph of torch.compile the first condition is true, and a hook that returns there leaves
    # nothing in the graph, but guards.

    @not_compiled_alone
    def before_forward(self, *_: object) -> None:
        if torch.compiler.is_compiling():
            if self._is_inside_unit():
                return
        elif self._adds_nothing():
            return
        self._begin()

    @not_compiled_alone
    def after_forward(self, _module: torch.nn.Module, _inputs: object, output: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._end(output) if self._is_open else None
        if self._calls.end_with(self._module):
            return self._end(output)
        return _without_parameters(output)

    def _is_inside_unit(self) -> bool:
        """Returns whether a module around this one holds its weights in memory."""
        if self._begins_pass or not self._units:
            return False
        return all(unit.shown for unit in self._units)

    @not_compiled_alone
    def _adds_nothing(self) -> bool:
        """Returns whether a call of a module around this one does all that a call of this one has
        to do: small modules are called so often that the rest of _begin() would show."""
        if self._begins_pass or torch.is_grad_enabled():
            return False
        if torch.is_autocast_enabled(self._residency.device.type):
            return False
        return self._calls.hold_for(self._module, self._units)

    @outside_graphs
    def _begin(self) -> None:
        # Ours is the last to run: hooks of users may look at the weights.
        self._module._forward_hooks.move_to_end(self._after_forward.id)
        whole = self._asks_for_parts is None or not self._asks_for_parts()
        units = self._units if whole else ()
        at_end = self._calls.begin(self._module, units, _frame_of_call())
        self._is_open = True
        # Activation checkpointing calls modules again, in the backward pass.
        if self._begins_pass and torch._C._current_graph_task_id() == -1:
            self._residency.begin_pass()
        self._residency.use(units, at_end)
        device_type = self._residency.device.type
        if torch.is_grad_enabled():
            save_weights(self._residency, at_end)
        elif torch.is_autocast_enabled(device_type) and torch.is_autocast_cache_enabled():
            # Else the cache would keep converted copies of all weights until autocast ends.
            torch.set_autocast_cache_enabled(False)
            at_end.callback(torch.set_autocast_cache_enabled, True)

    @outside_graphs
    def _end(self, output: Any) -> Any:
        output = _without_parameters(output)
        self._calls.end(self._module)
        self._is_open = self._calls.has(self._module)
        return output

    def before_load(
        self,
        _module: torch.nn.Module,
        state_dict: Mapping[str, Any],
        prefix: str,
        metadata: Mapping[str, Any],
        *_: object,
    ) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise ValueError(
                "load_state_dict(assign=True) is not supported for weights on NVMe: use "
                "assign=False"
            )
        loaded = self._loaded(state_dict, prefix)
        units = self._units if loaded else ()
        at_end = self._calls.begin(self._module, units, _frame_of_load())
        try:
            for stored in loaded:
                stored.values.check_writable()
            self._residency.use(units, at_end, replacing=True)
        except BaseException:
            self._calls.end(self._module)
            raise

    def _loaded(self, state_dict: Mapping[str, Any], prefix: str) -> list[StoredParameter]:
        """Returns the weights of the module on the drive that a dictionary has."""
        own = self._module._parameters.items()
        named = (
            stored_parameter_of(p) for n, p in own if p is not None and prefix + n in state_dict
        )
        return [stored for stored in named if stored is not None]

    def after_load(self, *_: object) -> None:
        if torch.is_inference_mode_enabled():  # autograd counts no changes there
            self._residency.note_changes(self._units)
        self._calls.end(self._module)

    def after_state_dict(
        self, _module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: object
    ) -> None:
        """Puts the weights into the dictionary, mapped from the drive."""
        self._calls.end_interrupted()
        self._residency.write_changed(self._units)
        self._residency.settle()
        for name, param in self._module._parameters.items():
            if param is None or prefix + name not in state_dict:
                continue
            if (stored := stored_parameter_of(param)) is not None:
                state_dict[prefix + name] = stored.view()


def _frame_of_call() -> FrameType:
    """Returns the frame of torch that calls the hooks of a module, and then the module."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename != _MODULES:
        frame = frame.f_back
    return frame


def _frame_of_load() -> FrameType:
    """Returns the frame that called torch's _load_from_state_dict(): it loads the children, too."""
    name = "_load_from_state_dict"
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_name != name:
        frame = frame.f_back
    while frame.f_back is not None and frame.f_code.co_name == name:
        frame = frame.f_back
    return frame


def _without_parameters(output: Any) -> Any:
    """Returns the output of a module with views for weights: those lose their values at its end."""
    if isinstance(output, torch.nn.Parameter) and stored_parameter_of(output) is not None:
        return output.view_as(output)
    if type(output) in (tuple, list) and any(type(o) is torch.nn.Parameter for o in output):
        return type(output)(_without_parameters(o) for o in output)
    if type(output) is dict:
        return {name: _without_parameters(o) for name, o in output.items()}
    return output


_refusing: list[RemovableHandle] = []


def refuse_other_optimizers() -> None:
    """Makes other optimizers raise from now on: they would step weights that are not in memory."""
    if not _refusing:
        _refusing.append(register_optimizer_step_pre_hook(_check_optimizer))


def _check_optimizer(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if getattr(getattr(optimizer, "optimizer", optimizer), "is_offloaded", False):
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            stored = stored_parameter_of(param) if param.grad is not None else None
            if stored is not None:
                stored.values.check_writable()
                raise RuntimeError(
                    f"{type(optimizer).__name__} cannot step weights that are on NVMe: use "
                    "tensorferry.optim.AdamW, or tensorferry.optim.offload(optimizer, ...)"
                )
