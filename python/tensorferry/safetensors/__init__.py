"""Safetensors files at the speed of the drive: the surface of Hugging Face's safetensors.

>>> import torch
>>> from tensorferry.safetensors import safe_open
>>> from tensorferry.safetensors.torch import save_file
>>> save_file({"weight": torch.ones(4, 2)}, "model.safetensors")
>>> with safe_open("model.safetensors", framework="pt") as file:
...     file.get_slice("weight")[1:3].shape
torch.Size([2, 2])

.torch and .numpy have save_file, load_file and the others. To run programs that import safetensors
on it, such as those with transformers and accelerate, without a change, call enable() or set
TENSORFERRY_SAFETENSORS=1 in their environment.
"""

from .enabling import disable, enable
from .errors import SafetensorError
from .opened import safe_open
from .opened import safe_open_handle as safe_open_handle
from .serialization import TensorSpec, deserialize, serialize, serialize_file

__all__ = [
    "SafetensorError",
    "TensorSpec",
    "deserialize",
    "disable",
    "enable",
    "safe_open",
    "serialize",
    "serialize_file",
]
