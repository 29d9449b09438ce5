"""Tensors of torch and arrays of NumPy over memory that reads fill."""

from __future__ import annotations

from .arena import Arena
from .errors import SafetensorError

TYPE_CHECKING = False  # as in typing, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, Protocol

    class Framework(Protocol):
        """Makes memory, and tensors of it once it is filled."""

        may_read_ahead: bool  # whether memory for tensors to come costs little

        def dtype(self, code: str) -> Any: ...
        def place(self, offset: int, length: int) -> Any:
            """Returns where memory for these bytes of a file comes from."""

        def memory(self, place: Any, offset: int, length: int) -> Any: ...
        def tensor(self, memory: Any, dtype: Any, shape: Sequence[int]) -> Any: ...
        def finished(self, tensor: Any) -> Any:
            """Returns the tensor on its device."""


# From here on an arena is quicker than to copy the bytes to where the allocator has room.
ARENA_BYTES = 256 << 10

_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "U64": "uint64",
    "I32": "int32",
    "U32": "uint32",
    "I16": "int16",
    "U16": "uint16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
}


def _name_of(code: str) -> str:
    if code not in _NAMES:
        raise SafetensorError(f"Dtype not understood: {code}")
    return _NAMES[code]


class TorchTensors:
    """Tensors of torch, on the CPU, on a GPU that we read to, or moved to another device."""

    def __init__(self, device: Any) -> None:
        import torch

        self._torch = torch
        self._device = device
        self._gpu = None
        if device != "cpu" and torch.version.cuda is not None and torch.cuda.is_available():
            wanted = torch.device(device)
            if wanted.type == "cuda":
                self._gpu = wanted
        self.may_read_ahead = self._gpu is None

    def dtype(self, code: str) -> Any:
        return getattr(self._torch, _name_of(code))

    def place(self, offset: int, length: int) -> Arena | None:
        """Returns an arena, unless the bytes go to a GPU or are too few."""
        if self._gpu is not None or length < ARENA_BYTES:
            return None
        return Arena(offset, length)

    def memory(self, place: Arena | None, offset: int, length: int) -> Any:
        """Returns memory for these bytes of the file, as a tensor of them."""
        torch = self._torch
        if place is None or length == 0:
            return torch.empty(length, dtype=torch.uint8, device=self._gpu or "cpu")
        return torch.frombuffer(place.lent_part(offset, length), dtype=torch.uint8)

    def tensor(self, memory: Any, dtype: Any, shape: Sequence[int]) -> Any:
        if memory.data_ptr() % dtype.itemsize:
            memory = memory.clone()
        return memory.view(dtype).reshape(shape)

    def finished(self, tensor: Any) -> Any:
        if self._device == "cpu" or self._gpu is not None:
            return tensor
        return tensor.to(self._device)


class NumpyArrays:
    """Arrays of NumPy."""

    may_read_ahead = False  # an array keeps all memory that was read with it

    def __init__(self) -> None:
        import numpy

        self._numpy = numpy

    def dtype(self, code: str) -> Any:
        if code == "BOOL":
            return self._numpy.dtype(bool)
        if code == "BF16":
            return self._numpy.dtype("bfloat16")  # ml_dtypes adds it
        return self._numpy.dtype(getattr(self._numpy, _name_of(code)))

    def place(self, offset: int, length: int) -> Arena | None:
        """Returns an arena, unless the bytes are too few."""
        return Arena(offset, length) if length >= ARENA_BYTES else None

    def memory(self, place: Arena | None, offset: int, length: int) -> Any:
        """Returns memory for these bytes of the file, as an array of them."""
        if place is None or length == 0:
            return self._numpy.empty(length, dtype="u1")
        # Not a lent part: what NumPy holds of a memoryview is another view of it.
        return self._numpy.frombuffer(place.part(offset, length), dtype="u1")

    def tensor(self, memory: Any, dtype: Any, shape: Sequence[int]) -> Any:
        if memory.ctypes.data % dtype.alignment:
            memory = memory.copy()
        return memory.view(dtype).reshape(shape)

    def finished(self, tensor: Any) -> Any:
        return tensor
