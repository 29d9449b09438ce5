"""Weights on NVMe: brought in before a module needs them, released after.

>>> import tensorferry.offload, torch
>>> model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Linear(512, 64))
>>> expected = model(torch.ones(1, 64))
>>> weights = tensorferry.offload.parameters(model, nvme_path=".", max_cpu_bytes=256 << 10)
>>> torch.equal(model(torch.ones(1, 64)), expected)
True
>>> weights.close()

Training works as before, with an optimizer of tensorferry.optim: that steps weights on the drive.
"""

import contextlib
import logging
import threading

import torch

from ._homes import Home, home_of
from ._residency import Residency, Unit
from ._subgroups import open_space, page_up

__all__ = ["OffloadedParameters", "parameters"]

_log = logging.getLogger("tensorferry")

# Their forward reads the weights of their children without calling them.
_ONE_UNIT = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)


def parameters(
    model,
    nvme_path,
    max_cpu_bytes=1 << 30,
    *,
    keep_bytes=64 << 10,
    units=(),
    initialize=None,
    **handle_options,
):
    """Moves the parameters of a model to NVMe and returns an OffloadedParameters.

    At most `max_cpu_bytes` of them are in memory at a time, page-locked (one layer, where that is
    larger): those in use, those that the order of the last pass says are next, and as many others
    as fit. Parameters of up to `keep_bytes` stay in memory, as long as they are few. The results
    are the same to the last bit.

    Each module has its own weights brought in when it is called. `units` are classes of modules
    whose forward uses the weights of their children without calling them: those come as one.

    A model larger than memory is made with torch.device("meta"): its weights are then made here,
    one module at a time, by `initialize(module)`, or by the module's reset_parameters().
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"a torch.nn.Module is wanted, not {type(model).__name__}")
    if max_cpu_bytes < 1:
        raise ValueError(f"max_cpu_bytes is {max_cpu_bytes}: it must be at least 1")
    return OffloadedParameters(
        model, nvme_path, max_cpu_bytes, keep_bytes, tuple(units), initialize, handle_options
    )


class OffloadedParameters:
    """What offload.parameters() has made of a model, until close()."""

    def __init__(
        self, model, nvme_path, max_cpu_bytes, keep_bytes, unit_classes, initialize, handle_options
    ):
        self._model = model
        self._hooks = []
        self._contexts = threading.local()
        self._initialize = initialize
        self._modules = list(_unit_modules(model, _ONE_UNIT + unit_classes))
        _refuse_unknown_devices(model)
        kept = _smallest(model, keep_bytes, max_cpu_bytes // 16)
        owners = _owners(self._modules, kept)
        sizes = [sum(page_up(p.nbytes) for p in params) for params in owners.values()]
        room = min(sum(sizes), max(max_cpu_bytes, max(sizes, default=0)))
        self._space = open_space(nvme_path, page_up(room), **handle_options)
        self._residency = Residency(self._space)
        self._needs = self._bring_out(owners, kept)
        for module, needed in self._needs.items():
            self._watch(module, needed)
        self._hook(model.register_forward_pre_hook(self._begin_pass, prepend=True))
        self._hook(model.register_forward_hook(self._end_pass, always_call=True))
        self._hook(model._register_state_dict_hook(self._fill_state_dict))
        model._tensorferry_parameters = self

    def _hook(self, hook):
        self._hooks.append(hook)

    # --- moving out ---

    def _bring_out(self, owners, kept):
        """Makes the units, one module at a time, and returns which ones each module needs."""
        made = {}  # a parameter on the meta device -> the real one
        units = {}  # param -> unit
        needs = {}
        for number, (module, subtree) in enumerate(self._modules):
            _materialise(module, subtree, made, self._initialize)
            if own := [made.get(param, param) for param in owners[module]]:
                unit = Unit(self._residency)
                for index, param in enumerate(own):
                    unit.add(Home(param, f"{number}.{index}", self._space, unit))
                    units[param] = unit
                unit.bring_out()
            needed = []
            for part in subtree:
                for param in part._parameters.values():
                    if param is not None and param in units and units[param] not in needed:
                        needed.append(units[param])
            if needed:
                needs[module] = needed
        self._residency.settle()
        return needs

    # --- hooks ---

    def _watch(self, module, needed):
        def before(*_):
            for unit in needed:
                self._residency.enter(unit)

        def after(*_):
            for unit in needed:
                self._residency.leave(unit)

        def loaded(*_):
            for unit in needed:
                unit.write_back()
            after()

        self._hook(module.register_forward_pre_hook(before, prepend=True))
        self._hook(module.register_forward_hook(after, always_call=True))
        self._hook(module.register_load_state_dict_pre_hook(before))
        self._hook(module.register_load_state_dict_post_hook(loaded))

    def _begin_pass(self, *_):
        self._residency.begin_pass()
        contexts = self._contexts.__dict__.setdefault("stack", [])
        context = contextlib.nullcontext()
        if torch.is_grad_enabled():
            context = torch.autograd.graph.saved_tensors_hooks(
                self._residency.pack, self._residency.unpack
            )
        context.__enter__()
        contexts.append(context)

    def _end_pass(self, *_):
        if stack := self._contexts.__dict__.get("stack"):
            stack.pop().__exit__(None, None, None)

    def _fill_state_dict(self, model, state_dict, prefix, _metadata):
        self._residency.settle()
        for name, param in model.named_parameters(remove_duplicate=False):
            if prefix + name in state_dict and (home := home_of(param)) is not None:
                state_dict[prefix + name] = home.view()
        return state_dict

    # --- for users ---

    @contextlib.contextmanager
    def gather(self, module=None, *, modify=False):
        """Inside, all weights of a module (of the model, if none is named) are in memory, whatever
        that takes. With modify=True what they are at the end goes to the drive."""
        module = self._model if module is None else module
        inside = set(module.modules())
        units = {unit: None for m, needed in self._needs.items() if m in inside for unit in needed}
        entered = []
        try:
            for unit in units:
                self._residency.enter(unit)
                entered.append(unit)
            yield module
            if modify:
                for unit in units:
                    unit.write_back()
        finally:
            for unit in entered:
                self._residency.leave(unit)

    def stats(self):
        """SwapSpace.stats(), and what of the weights is in memory."""
        return self._space.stats() | self._residency.stats()

    def close(self, restore=False):
        """Ends it and removes the files. With restore=True the weights come back into memory;
        without, the model has none any more."""
        if self._space.closed:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._residency.settle()
        for unit in self._residency.units:
            unit.end(restore)
        self._space.close()
        if getattr(self._model, "_tensorferry_parameters", None) is self:
            del self._model._tensorferry_parameters

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __repr__(self):
        return f"<tensorferry.offload.OffloadedParameters: {self._space!r}>"

    def __deepcopy__(self, memo):
        raise TypeError("a model with weights on NVMe cannot be copied")

    def __reduce__(self):
        raise TypeError("a model with weights on NVMe cannot be pickled: save its state_dict()")


def _refuse_unknown_devices(model):
    if getattr(model, "_tensorferry_parameters", None) is not None:
        raise ValueError("the weights of this model are on NVMe already")
    for name, param in model.named_parameters():
        if param.device.type not in ("cpu", "meta"):
            raise ValueError(f"{name} is on {param.device}: weights on the CPU can go to NVMe")
        if param.layout != torch.strided:
            raise ValueError(f"{name} is {param.layout}: only dense weights can go to NVMe")


def _unit_modules(module, one_unit):
    """(module, modules whose parameters come with it), parents first."""
    if isinstance(module, one_unit):
        yield module, list(module.modules())
        return
    yield module, [module]
    seen = set()
    for child in module.children():
        if child not in seen:
            seen.add(child)
            yield from _unit_modules(child, one_unit)


def _smallest(model, keep_bytes, most):
    """Parameters so small that they stay in memory."""
    kept = set()
    total = 0
    for param in sorted(model.parameters(), key=lambda p: p.nbytes):
        total += param.nbytes
        if param.nbytes > keep_bytes or total > most:
            break
        kept.add(param)
    return kept


def _owners(modules, kept):
    """Which parameters belong to which module: shared ones to the first."""
    owners = {}
    seen = set(kept)
    for module, subtree in modules:
        own = owners.setdefault(module, [])
        for part in subtree:
            for param in part._parameters.values():
                if param is not None and param not in seen and param.numel() > 0:
                    seen.add(param)
                    own.append(param)
    return owners


def _materialise(module, subtree, made, initialize):
    """Makes what a module has on the meta device, with the values it starts with."""
    fresh = False
    for part in subtree:
        for name, param in part._parameters.items():
            if param is None or param.device.type != "meta":
                continue
            if param not in made:
                made[param] = torch.nn.Parameter(
                    torch.empty_like(param, device="cpu"), requires_grad=param.requires_grad
                )
                fresh = True
            part._parameters[name] = made[param]
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                part._buffers[name] = torch.empty_like(buffer, device="cpu")
                fresh = True
    if not fresh:
        return
    for part in subtree:
        if initialize is not None:
            initialize(part)
        elif hasattr(part, "reset_parameters"):
            part.reset_parameters()
        elif part._parameters or part._buffers:
            raise ValueError(
                f"{type(part).__name__} is on the meta device and has no reset_parameters(): say "
                "with initialize=... how its weights start"
            )
