"""What stands in p.grad when a step has taken the gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch


class SpentGradient(torch.Tensor):
    """Has the shape, dtype and device of a gradient that is gone. Whatever computes with it
    raises: None would pass for a parameter that has no gradient, as in clip_grad_norm_()."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, like: torch.Tensor, spoil: Callable[[str], None]) -> SpentGradient:
        return torch.Tensor._make_wrapper_subclass(
            cls, like.size(), strides=like.stride(), dtype=like.dtype, device=like.device
        )

    def __init__(self, like: torch.Tensor, spoil: Callable[[str], None]) -> None:
        """`spoil` is told if the step should not have been made."""
        self._spoil = spoil

    @classmethod
    def __torch_dispatch__(
        cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        if operator._schema.name.startswith("aten::_amp_"):
            first = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
            first.refuse_scaler()
        raise RuntimeError(
            "this gradient is gone: with overlap, last_backward() or step() has taken it to step "
            "its parameter. To clip gradients, use last_backward(clips=True); before the next "
            "backward pass call zero_grad(). If one backward pass computes two gradients of a "
            "parameter, as reentrant checkpointing does for shared weights, use "
            "use_reentrant=False"
        )

    def refuse_scaler(self) -> NoReturn:
        why = (
            "GradScaler cannot be used with last_backward(), which has stepped parameters with "
            "scaled gradients"
        )
        self._spoil(why)
        raise RuntimeError(
            why + ". Load a checkpoint, and use last_backward(clips=True), which steps after the "
            "scaler, or leave overlap out"
        )

    def __repr__(self) -> str:
        return f"<gradient that is stepped: {self.dtype} of {tuple(self.size())}, {self.device}>"


def is_spent(gradient: torch.Tensor | None) -> bool:
    return isinstance(gradient, SpentGradient)
