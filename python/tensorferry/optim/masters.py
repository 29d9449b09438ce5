"""A torch optimizer that steps copies in fp32 of parameters in bf16 and fp16, all in memory."""

import torch

from .._memory.layout import local

HALF = (torch.bfloat16, torch.float16)
CPU_CHUNK, GPU_CHUNK = 1 << 16, 1 << 24  # elements at a time, so that little memory is needed


def follow(master, values):
    """Where a value is not what its master is rounded to, somebody has changed it: the master takes
    it over."""
    master, values = torch.atleast_1d(master, values)
    chunk = CPU_CHUNK if values.is_cpu else GPU_CHUNK
    rows = max(chunk // max(values[:1].numel(), 1), 1)
    for own, value in zip(master.split(rows), values.split(rows)):
        rounded = own.to(value.dtype)
        if value.is_cpu and torch.equal(rounded, value):  # to ask a GPU would be to wait for it
            continue
        own.copy_(torch.where(rounded != value, value.to(own.dtype), own))


class Followed:
    """Which parameters have been changed since the masters were rounded to them. What goes around
    autograd, through .data, is not seen."""

    def __init__(self):
        self._versions = {}

    def edited(self, params):
        return {p for p in params if (v := _version(p)) is None or v != self._versions.get(p)}

    def note(self, params):
        """These are rounded from their masters now."""
        self._versions.update({param: _version(param) for param in params})

    def forget(self):
        self._versions = {}


def _version(param):
    """None where there is none that tells of all changes."""
    is_distributed = hasattr(param, "to_local")
    return None if is_distributed or param.is_inference() else param._version


class MasterWeights(torch.optim.Optimizer):
    """Steps masters and copies them back. `kind` is a torch optimizer class."""

    def __init__(self, kind, params, **settings):
        optimizer = kind(params, **settings)
        groups = optimizer.param_groups
        super().__init__([dict(group) for group in groups], optimizer.defaults)
        self._masters = {}  # param -> its copy in fp32
        self._followed = Followed()
        self._inner = kind([self._with_masters(group) for group in groups], **settings)

    def _with_masters(self, group):
        """A group with the tensors that are stepped in the place of its parameters."""
        for param in group["params"]:
            half = param.dtype in HALF
            self._masters[param] = param.detach().float() if half else param
        return {**group, "params": [self._masters[param] for param in group["params"]]}

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        if hasattr(self, "_inner"):  # not while torch makes the first groups
            self._inner.add_param_group(self._with_masters(self.param_groups[-1]))

    @torch.no_grad()
    def step(self, closure=None, *, gradient_scale=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for outer, inner in zip(self.param_groups, self._inner.param_groups):
            inner.update({name: value for name, value in outer.items() if name != "params"})
        halves = [(p, m) for p, m in self._masters.items() if p is not m and p.grad is not None]
        edited = self._followed.edited(param for param, _ in halves)
        for param, master in halves:
            if param in edited:
                follow(local(master), local(param))
            master.grad = param.grad.float()
        if gradient_scale is not None:
            for master in self._masters.values():
                if master.grad is not None:
                    master.grad.mul_(gradient_scale)
        self._inner.step()
        for param, master in halves:
            master.grad = None
            param.copy_(master)
        self._followed.note(param for param, _ in halves)
        return loss

    def state_dict(self):
        result = self._inner.state_dict()
        numbers = [number for group in result["param_groups"] for number in group["params"]]
        for number, (param, master) in zip(numbers, self._masters.items()):
            if param is not master:
                result["state"].setdefault(number, {})["master"] = master
        return result

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        states = {number: dict(state) for number, state in state_dict["state"].items()}
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, (param, master) in zip(numbers, self._masters.items()):
            saved = states.get(number, {}).pop("master", None)
            if param is not master:
                master.copy_(param if saved is None else saved)
        self._inner.load_state_dict({**state_dict, "state": states})
        for outer, inner in zip(self.param_groups, self._inner.param_groups):
            outer.update({name: value for name, value in inner.items() if name != "params"})
        self._followed.forget()

    def __getstate__(self):
        raise TypeError("an optimizer with master weights cannot be pickled: save its state_dict()")
