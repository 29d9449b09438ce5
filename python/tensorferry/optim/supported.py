"""Which optimizers can be stepped piece by piece, and how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._memory.layout import local
from .masters import HALF
from .quantized_moments import CHOICES

# Each element of a parameter is stepped by itself: parameters can be cut anywhere.
ELEMENTWISE = {
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
}

# Classes derived from these may have other states.
ADAM = (torch.optim.Adam, torch.optim.AdamW)


def check(optimizer: object) -> None:
    """Refuses optimizers that cannot be stepped with states on NVMe."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"expected a torch optimizer, got {type(optimizer).__name__}")
    if getattr(optimizer, "is_offloaded", False):
        raise ValueError("the states of this optimizer are on NVMe already")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS needs all parameters and their history at once, so its states cannot be "
            "brought in piece by piece; use an optimizer that steps each parameter by itself"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError("SparseAdam needs sparse gradients; states on NVMe need dense ones")
    for group in optimizer.param_groups:
        for name in ("capturable", "differentiable"):
            if group.get(name):
                raise ValueError(f"{name}=True is not supported with states on NVMe")
        for param in group["params"]:
            if hasattr(param, "to_local") and type(optimizer) not in ELEMENTWISE:
                raise ValueError(
                    f"{type(optimizer).__name__} needs whole parameters, and those of FSDP are "
                    "spread over the ranks; use an optimizer that steps each element by itself"
                )
            if local(param).device.type not in ("cpu", "cuda"):
                raise ValueError(
                    f"a parameter is on {param.device}: states on NVMe support parameters on the "
                    "CPU and on CUDA devices"
                )


def check_moments(
    moments: str, kind: type[torch.optim.Optimizer], groups: list[dict[str, Any]], masters: bool
) -> None:
    """Raises unless the moments can have this form, and have it in these groups."""
    if moments not in CHOICES:
        raise ValueError(f"moments is {moments!r}: give one of {', '.join(map(repr, CHOICES))}")
    if moments == "fp32":
        return
    if kind not in ADAM:
        raise ValueError(
            f"moments={moments!r} is for torch.optim.Adam and AdamW, and this is {kind.__name__}"
        )
    for group in groups:
        if group.get("amsgrad"):
            raise ValueError(
                f"amsgrad=True is not supported with moments={moments!r}: use moments='fp32'"
            )
        for param in group.get("params", ()):
            if param.dtype != torch.float32 and not (masters and param.dtype in HALF):
                raise ValueError(
                    f"moments={moments!r} needs parameters that are stepped in fp32, and one is "
                    f"{param.dtype}: use fp32, or bf16 or fp16 with master_weights=True"
                )


def plain_step(kind: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], Any]:
    """The step of an optimizer class without torch's hooks around it, which run once a step."""
    step: Any = kind.step
    while getattr(step, "hooked", False) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step
