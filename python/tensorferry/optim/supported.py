"""Which optimizers can be stepped piece by piece, and how."""

import torch

from .._memory.layout import local

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


def check(optimizer):
    """Refuses what cannot be stepped with states on NVMe."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"offload() wants a torch optimizer, not {type(optimizer).__name__}")
    if getattr(optimizer, "is_offloaded", False):
        raise ValueError("the states of this optimizer are on NVMe already")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS needs all parameters and their history at once, so its states cannot be "
            "brought in piece by piece; use an optimizer that steps each parameter by itself"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError("SparseAdam is for sparse gradients; on NVMe they must be dense")
    for group in optimizer.param_groups:
        for name in ("capturable", "differentiable"):
            if group.get(name):
                raise ValueError(f"{name}=True does not go with states on NVMe")
        for param in group["params"]:
            if hasattr(param, "to_local") and type(optimizer) not in ELEMENTWISE:
                raise ValueError(
                    f"{type(optimizer).__name__} needs whole parameters, and those of FSDP are "
                    "spread over the ranks; use an optimizer that steps each element by itself"
                )
            if local(param).device.type not in ("cpu", "cuda"):
                raise ValueError(
                    f"a parameter is on {param.device}: parameters on the CPU or on a GPU of CUDA "
                    "can be stepped with states on NVMe"
                )


def plain_step(kind):
    """The step of an optimizer class without the hooks around it: ours are called once a step."""
    step = kind.step
    while getattr(step, "hooked", False) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step
