"""Keeps weights on NVMe: reads them before a module needs them and releases them after.

>>> import tensorferry.offload, torch
>>> model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Linear(512, 64))
>>> expected = model(torch.ones(1, 64))
>>> weights = tensorferry.offload.parameters(model, nvme_path=".", max_cpu_bytes=256 << 10)
>>> torch.equal(model(torch.ones(1, 64)), expected)
True
>>> weights.close()

Training needs an optimizer of tensorferry.optim, which steps weights on the drive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._memory.budget import MemoryBudget
from .._memory.buffers import NvmePath
from .offloaded import OffloadedParameters, offload_model

__all__ = ["OffloadedParameters", "parameters"]


def parameters(
    model: torch.nn.Module,
    nvme_path: NvmePath,
    max_cpu_bytes: int | MemoryBudget = 1 << 30,
    *,
    max_gpu_bytes: int | MemoryBudget | None = None,
    device: torch.device | str | int | None = None,
    keep_bytes: int = 64 << 10,
    units: Sequence[type[torch.nn.Module]] = (),
    initialize: Callable[[torch.nn.Module], object] | None = None,
    **handle_options: Any,
) -> OffloadedParameters:
    """Moves the parameters of a model to NVMe and returns an OffloadedParameters.

    At most `max_cpu_bytes` of them are in memory at a time, page-locked (or one layer, if that is
    larger): those in use, those that the order of the last pass says are next, and as many others
    as fit. Parameters of up to `keep_bytes` stay in memory, as long as they are few. The results
    are the same to the last bit.

    When a module is called, its own weights are read into memory. At other times they read as NaN,
    unless gather() holds them. `units` are classes of modules whose forward uses the weights of
    their children without calling them: the weights of such a module come together.

    Make a model larger than memory with torch.device("meta"): this function then makes its weights,
    one module at a time, with `initialize(module)` or the module's reset_parameters().

    Weights on a GPU are read straight into its memory, at most `max_gpu_bytes` at a time (default:
    `max_cpu_bytes`). `device` is where the weights are used; default: where they are now.

    With a MemoryBudget as limit, which weights and states share, as many weights as fit stay in
    memory for good and never go to the drive; the others pass through what is left.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(max_cpu_bytes, (int, MemoryBudget)):
        raise TypeError(
            "max_cpu_bytes must be a number of bytes (an int) or a MemoryBudget, got "
            f"{max_cpu_bytes!r}"
        )
    if isinstance(max_cpu_bytes, int) and max_cpu_bytes < 1:
        raise ValueError(f"max_cpu_bytes must be at least 1, got {max_cpu_bytes}")
    used_on = _device_of(model) if device is None else _with_index(torch.device(device))
    max_bytes = max_cpu_bytes
    if used_on.type != "cpu" and max_gpu_bytes is not None:
        max_bytes = max_gpu_bytes
    elif used_on.type != "cpu" and isinstance(max_cpu_bytes, MemoryBudget):
        raise ValueError(
            f"the weights are used on {used_on} and take no memory of the system there: give a "
            "number of bytes, or a MemoryBudget for the GPU as max_gpu_bytes"
        )
    return offload_model(
        model, nvme_path, used_on, max_bytes, keep_bytes, tuple(units), initialize, handle_options
    )


def _with_index(device: torch.device) -> torch.device:
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"cannot use weights on {device}: choose the CPU or a CUDA GPU")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _device_of(model: torch.nn.Module) -> torch.device:
    """Returns where the weights are; the CPU if they have no values yet."""
    devices = {param.device for param in model.parameters()} - {torch.device("meta")}
    if len(devices) > 1:
        named = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"the weights are on {named}: pass device=... to choose where to use them")
    return _with_index(devices.pop()) if devices else torch.device("cpu")
