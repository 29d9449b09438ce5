"""Where the weights of a model are used."""

from __future__ import annotations

import torch

from .._memory.budget import MemoryBudget


def place_of(
    model: torch.nn.Module,
    device: torch.device | str | int | None,
    max_cpu_bytes: int,
    max_gpu_bytes: int | None,
) -> tuple[torch.device, int]:
    """Returns where the weights are used, and how many bytes of them may be there."""
    for name, limit in (("max_cpu_bytes", max_cpu_bytes), ("max_gpu_bytes", max_gpu_bytes)):
        if isinstance(limit, MemoryBudget):
            raise TypeError(
                f"{name} must be a number of bytes: offload.parameters() takes a MemoryBudget, "
                "weights in a checkpoint do not"
            )
    used_on, max_bytes = budgeted_place_of(model, device, max_cpu_bytes, max_gpu_bytes)
    assert isinstance(max_bytes, int)
    return used_on, max_bytes


def budgeted_place_of(
    model: torch.nn.Module,
    device: torch.device | str | int | None,
    max_cpu_bytes: int | MemoryBudget,
    max_gpu_bytes: int | MemoryBudget | None,
) -> tuple[torch.device, int | MemoryBudget]:
    """The same for limits that may be budgets."""
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
    if used_on.type != "cpu" and max_gpu_bytes is not None:
        return used_on, max_gpu_bytes
    if used_on.type != "cpu" and isinstance(max_cpu_bytes, MemoryBudget):
        raise ValueError(
            f"the weights are used on {used_on} and take no memory of the system there: give a "
            "number of bytes, or a MemoryBudget for the GPU as max_gpu_bytes"
        )
    return used_on, max_cpu_bytes


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
