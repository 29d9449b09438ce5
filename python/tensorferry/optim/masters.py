"""Copies in fp32 of parameters in bf16 and fp16: who follows whom, and an optimizer that steps such
copies in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .._memory.layout import local

HALF = (torch.bfloat16, torch.float16)
CPU_CHUNK, GPU_CHUNK = 1 << 16, 1 << 24  # elements at a time, to need little memory


def follow(master: Tensor, values: Tensor) -> None:
    """Takes over into the master each value that it does not round to: somebody has changed it."""
    master, values = torch.atleast_1d(master, values)
    chunk = CPU_CHUNK if values.is_cpu else GPU_CHUNK
    rows = max(chunk // max(values[:1].numel(), 1), 1)
    for own, value in zip(master.split(rows), values.split(rows)):
        rounded = own.to(value.dtype)
        if value.is_cpu and torch.equal(rounded, value):  # to ask a GPU would be to wait for it
            continue
        own.copy_(torch.where(rounded != value, value.to(own.dtype), own))


class Edits:
    """Tells which parameters have changed since they were rounded from their masters. It does not
    see changes that go around autograd, through .data."""

    def __init__(self) -> None:
        self._versions: dict[Tensor, int | None] = {}

    def among(self, params: Iterable[Tensor]) -> set[Tensor]:
        return {p for p in params if (v := _version(p)) is None or v != self._versions.get(p)}

    def note_rounded(self, params: Iterable[Tensor]) -> None:
        """These have just been rounded from their masters."""
        self._versions.update({param: _version(param) for param in params})

    def forget(self) -> None:
        """All may have changed."""
        self._versions = {}


def _version(param: Tensor) -> int | None:
    """None if torch has none that counts all changes."""
    is_distributed = hasattr(param, "to_local")
    return None if is_distributed or param.is_inference() else param._version


class MasterWeights(torch.optim.Optimizer):
    """A torch optimizer of class `kind` that steps masters and copies them to the parameters."""

    def __init__(self, kind: type[torch.optim.Optimizer], params: Any, **settings: Any) -> None:
        optimizer = kind(params, **settings)
        groups = optimizer.param_groups
        super().__init__([dict(group) for group in groups], optimizer.defaults)
        self._masters: dict[Tensor, Tensor] = {}  # parameter -> its copy in fp32
        self._edits = Edits()
        self._inner = kind([self._with_masters(group) for group in groups], **settings)

    def _with_masters(self, group: dict[str, Any]) -> dict[str, Any]:
        """A group of the tensors that are stepped instead of the parameters."""
        for param in group["params"]:
            half = param.dtype in HALF
            self._masters[param] = param.detach().float() if half else param
        return {**group, "params": [self._masters[param] for param in group["params"]]}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if hasattr(self, "_inner"):  # not while torch makes the first groups
            self._inner.add_param_group(self._with_masters(self.param_groups[-1]))

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        gradient_scale: float | Tensor | None = None,
    ) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for outer, inner in zip(self.param_groups, self._inner.param_groups):
            inner.update({name: value for name, value in outer.items() if name != "params"})
        halves = [(p, m) for p, m in self._masters.items() if p is not m and p.grad is not None]
        edited = self._edits.among(param for param, _ in halves)
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
        self._edits.note_rounded(param for param, _ in halves)
        return loss

    def state_dict(self) -> dict[str, Any]:
        result = self._inner.state_dict()
        numbers = [number for group in result["param_groups"] for number in group["params"]]
        for number, (param, master) in zip(numbers, self._masters.items()):
            if param is not master:
                result["state"].setdefault(number, {})["master"] = master
        return result

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        states = {number: dict(state) for number, state in state_dict["state"].items()}
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, (param, master) in zip(numbers, self._masters.items()):
            saved = states.get(number, {}).pop("master", None)
            if param is not master:
                master.copy_(param if saved is None else saved)
        self._inner.load_state_dict({**state_dict, "state": states})
        for outer, inner in zip(self.param_groups, self._inner.param_groups):
            outer.update({name: value for name, value in inner.items() if name != "params"})
        self._edits.forget()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an optimizer with master weights cannot be pickled: save its state_dict()")
