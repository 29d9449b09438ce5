"""Where the weights of a model are used."""

from __future__ import annotations

import torch


def place_of(
    model: torch.nn.Module,
    device: torch.device | str | int | None,
    max_cpu_bytes: int,
    max_gpu_bytes: int | None,
) -> tuple[torch.device, int]:
    """Returns where the weights are used, and how many bytes of them may be there."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(max_cpu_bytes, int):
        raise TypeError(f"max_cpu_bytes must be a number of bytes (an int), got {max_cpu_bytes!r}")
    if max_cpu_bytes < 1:
        raise ValueError(f"max_cpu_bytes must be at least 1, got {max_cpu_bytes}")
    used_on = _device_of(model) if device is None else _with_index(torch.device(device))
    on_gpu = used_on.type != "cpu" and max_gpu_bytes is not None
    return used_on, max_gpu_bytes if on_gpu and max_gpu_bytes is not None else max_cpu_bytes


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
