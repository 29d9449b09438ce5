"""Which devices and frameworks safe_open takes."""

from __future__ import annotations

import operator

from .errors import SafetensorError, check_type

TYPE_CHECKING = False  # as in typing, which takes long to import
if TYPE_CHECKING:
    from typing import Any

_FRAMEWORKS = {
    "pt": "pytorch",
    "torch": "pytorch",
    "pytorch": "pytorch",
    "np": "numpy",
    "numpy": "numpy",
    "tf": "tensorflow",
    "tensorflow": "tensorflow",
    "jax": "flax",
    "flax": "flax",
    "mlx": "mlx",
    "paddle": "paddle",
}
_DEVICES = {"cuda", "musa", "mps", "npu", "xpu", "xla", "mlu", "hpu"}


def framework_named(name: Any) -> str:
    """Returns the usual name of a framework: "pytorch" for "pt". Raises as safetensors does."""
    check_type("framework", name, str)
    if name not in _FRAMEWORKS:
        raise SafetensorError(f"framework {name} is invalid")
    return _FRAMEWORKS[name]


def device_named(device: Any, framework: str) -> Any:
    """Returns "cpu", "cuda:0" and the like, a number or a torch.device. Raises as safetensors does.

    With torch any device of its own is right, which safetensors does not know all of.
    """
    if device is None:
        return "cpu"
    if not isinstance(device, str):
        return _numbered(device)
    kind, colon, number = device.partition(":")
    if device == "cpu":
        return device
    if kind in _DEVICES and ":" not in number:
        if colon and not (number.isascii() and number.isdigit()):
            raise ValueError("invalid digit found in string")
        if kind == "mps":
            if int(number or 0) != 0:
                raise SafetensorError(f"device {device} is invalid: only mps or mps:0 is supported")
            return "mps"
        return f"{kind}:{int(number or 0)}"
    if framework == "pytorch":
        import torch

        try:
            return torch.device(device)
        except RuntimeError:
            pass  # torch does not know it either
    raise SafetensorError(f"device {device} is invalid")


def _numbered(device: Any) -> Any:
    if type(device).__module__ == "torch" and type(device).__name__ == "device":
        return "cpu" if device.type == "cpu" else device
    try:
        number = operator.index(device)
    except TypeError:
        number = -1
    if number < 0:
        raise SafetensorError(f"device {device!r} is invalid")
    return number
