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

import torch

from .offloaded import OffloadedParameters

__all__ = ["OffloadedParameters", "parameters"]


def parameters(
    model,
    nvme_path,
    max_cpu_bytes=1 << 30,
    *,
    max_gpu_bytes=None,
    device=None,
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

    Each module has its own weights brought in when it is called; outside of that they read as NaN,
    unless gather() has brought them. `units` are classes of modules whose forward uses the weights
    of their children without calling them: those come as one.

    A model larger than memory is made with torch.device("meta"): its weights are then made here,
    one module at a time, by `initialize(module)`, or by the module's reset_parameters().

    Weights on a GPU come there straight from the drive, `max_gpu_bytes` of them at a time (as many
    as `max_cpu_bytes`, if it is not said). `device` is where the weights are used, if not where
    they are now.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"a torch.nn.Module is wanted, not {type(model).__name__}")
    if not isinstance(max_cpu_bytes, int):
        raise TypeError(f"max_cpu_bytes is {max_cpu_bytes!r}: a number of bytes is wanted")
    if max_cpu_bytes < 1:
        raise ValueError(f"max_cpu_bytes is {max_cpu_bytes}: it must be at least 1")
    device = _device_of(model) if device is None else _with_index(torch.device(device))
    most = max_cpu_bytes
    if device.type != "cpu" and max_gpu_bytes is not None:
        most = max_gpu_bytes
    return OffloadedParameters(
        model, nvme_path, device, most, keep_bytes, tuple(units), initialize, handle_options
    )


def _with_index(device):
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"weights are used on the CPU or on a GPU of CUDA, not on {device}")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _device_of(model):
    """Where its weights are; the CPU for those that have no values yet."""
    devices = {param.device for param in model.parameters()} - {torch.device("meta")}
    if len(devices) > 1:
        named = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"the weights are on {named}: say with device=... where to use them")
    return _with_index(devices.pop()) if devices else torch.device("cpu")
