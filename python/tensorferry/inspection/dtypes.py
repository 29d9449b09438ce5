"""The names of element types: those of safetensors, and torch's own where it has none."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

# (torch's name or None, bits of an element)
_KINDS: dict[str, tuple[str | None, int]] = {
    "F64": ("float64", 64),
    "F32": ("float32", 32),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "I64": ("int64", 64),
    "U64": ("uint64", 64),
    "I32": ("int32", 32),
    "U32": ("uint32", 32),
    "I16": ("int16", 16),
    "U16": ("uint16", 16),
    "I8": ("int8", 8),
    "U8": ("uint8", 8),
    "BOOL": ("bool", 8),
    "C64": ("complex64", 64),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "F6_E2M3": (None, 6),
    "F6_E3M2": (None, 6),
    "F4": ("float4_e2m1fn_x2", 4),
    # safetensors has no names for these.
    "complex128": ("complex128", 128),
    "complex32": ("complex32", 32),
}
_OF_TORCH = {name: kind for kind, (name, _) in _KINDS.items() if name is not None}
# What torch calls the storages of these elements in its files.
_OF_STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "U8",
}

# Two elements of torch's dtype are in a byte, which it counts as one.
PAIRED = "F4"


def bits_of(kind: str) -> int:
    return _KINDS[kind][1]


def kind_of_torch(name: str) -> str | None:
    """Returns what "float32" is called here; None for rare ones, and names of no dtype."""
    return _OF_TORCH.get(name)


def kind_of_storage(name: str) -> str | None:
    """Returns the elements of "FloatStorage"."""
    return _OF_STORAGES.get(name)


def in_safetensors(kind: str) -> bool:
    return kind.isupper()


def torch_dtype(kind: str) -> Any:
    """Returns the torch.dtype; None if torch has none."""
    import torch

    name = _KINDS[kind][0]
    return None if name is None else getattr(torch, name, None)
