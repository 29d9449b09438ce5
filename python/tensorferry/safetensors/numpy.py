"""Safetensors files of NumPy arrays: the functions of safetensors.numpy, at the drive's speed.

>>> import numpy
>>> from tensorferry.safetensors.numpy import load_file, save_file
>>> save_file({"weight": numpy.arange(4)}, "model.safetensors")
>>> load_file("model.safetensors")["weight"]
array([0, 1, 2, 3])
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy

from .frameworks import NumpyArrays
from .opened import safe_open
from .serialization import TensorSpec, deserialize, serialize, serialize_file

if TYPE_CHECKING:
    import os

    from .._progress import Progress
    from .opened import Verify

__all__ = ["load", "load_file", "save", "save_file"]


def save_file(
    tensor_dict: dict[str, numpy.ndarray],
    filename: str | os.PathLike[str],
    metadata: dict[str, str] | None = None,
    *,
    checksums: bool = False,
    progress: Progress = None,
) -> None:
    """Saves arrays to a file that replaces `filename`.

    The file is what safetensors writes, byte for byte. When this returns, the file is on the drive.
    When it raises, also at Ctrl-C, the old file is as it was and nothing else is left.
    `checksums=True` adds XXH3 checksums, in an entry of the metadata; `progress` is True for a bar,
    or a function of (done bytes, total bytes).
    """
    plain = _plain(tensor_dict)
    serialize_file(_specs(plain), filename, metadata, checksums=checksums, progress=progress)


def save(tensor_dict: dict[str, numpy.ndarray], metadata: dict[str, str] | None = None) -> bytes:
    """Returns the bytes of a file with these arrays."""
    plain = _plain(tensor_dict)
    return serialize(_specs(plain), metadata)


def load_file(
    filename: str | os.PathLike[str],
    *,
    backend: str = "mmap",
    verify: Verify = False,
    progress: Progress = None,
    mapping: bool = False,
) -> dict[str, numpy.ndarray]:
    """Loads all arrays of a file, in one read.

    `verify=True` checks the checksums of a file that was saved with them, and raises
    SafetensorError if an array has none; `verify="if_present"` checks those that are there.
    `progress` is True for a bar, or a function of (done bytes, total bytes); `mapping=True` leaves
    it to safetensors.
    """
    with safe_open(
        filename,
        framework="np",
        backend=backend,
        verify=verify,
        progress=progress,
        mapping=mapping,
    ) as file:
        found: dict[str, numpy.ndarray] = file.get_tensors()
        return found


def load(data: bytes) -> dict[str, numpy.ndarray]:
    """Returns the arrays of a file that is in memory. They have copies of its bytes."""
    make = NumpyArrays()
    return {
        name: make.tensor(
            numpy.frombuffer(tensor["data"], dtype="u1"),
            make.dtype(tensor["dtype"]),
            tensor["shape"],
        )
        for name, tensor in deserialize(data)
    }


def _plain(arrays: dict[str, numpy.ndarray]) -> dict[str, numpy.ndarray]:
    """Returns the arrays as files have them: without gaps, the least byte of a number first."""
    found = {}
    for name, array in arrays.items():
        order = array.dtype.byteorder
        if order == ">" or (order == "=" and sys.byteorder == "big"):
            array = array.byteswap()
        found[name] = array if array.flags.c_contiguous else array.copy(order="C")
    return found


def _specs(arrays: dict[str, numpy.ndarray]) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(
            dtype=array.dtype.name,
            shape=array.shape,
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for name, array in arrays.items()
    }
