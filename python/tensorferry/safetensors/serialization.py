"""Tensors by address: TensorSpec, serialize, serialize_file, deserialize."""

from __future__ import annotations

import operator

from .. import _core
from .._progress import report_of
from .._shared_handle import shared_handle
from .errors import (
    PACKED_MISFIT,
    SIZE_OVERFLOW,
    WRONG_SIZE,
    SafetensorError,
    check_path,
    check_type,
    header_error,
    saving_error,
)

TYPE_CHECKING = False  # as in typing, which takes long to import
if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from typing import Any

    from .._progress import Progress

# The bits of each, by the name that files have for it.
BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip

# The names of torch and NumPy for them.
CODES = {
    "bool": "BOOL",
    "int8": "I8",
    "uint8": "U8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
    "complex64": "C64",
}

_UNSIGNED_END = 1 << 64
_BYTES = bytes  # which an argument of deserialize() hides


def _unsigned(argument: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError as error:
        raise TypeError(f"argument '{argument}': {error}") from None
    if number < 0:
        raise OverflowError("can't convert negative int to unsigned")
    if number >= _UNSIGNED_END:
        raise OverflowError("int too big to convert")
    return number


class TensorSpec:
    """Where a tensor lies in memory, and what it is.

    `dtype` is torch's or NumPy's name for it: "float32", "bfloat16". `shape` is that of the
    framework; for float4_e2m1fn_x2, of which a byte has two, the last dimension of the file is
    twice as long. The memory must live until serialize() or serialize_file() has returned.
    """

    __slots__ = ("_data_len", "_data_ptr", "_dtype", "_shape")

    def __init__(self, *, dtype: str, shape: Sequence[int], data_ptr: int, data_len: int) -> None:
        check_type("dtype", dtype, str)
        if isinstance(shape, str):
            raise TypeError("argument 'shape': Can't extract `str` to `Vec`")
        if not hasattr(shape, "__len__") or not hasattr(shape, "__getitem__"):
            raise TypeError(
                f"argument 'shape': '{type(shape).__name__}' object is not an instance of "
                "'Sequence'"
            )
        sizes = [_unsigned("shape", size) for size in shape]
        if dtype not in CODES:
            names = ", ".join(CODES)
            raise SafetensorError(f'Unknown dtype "{dtype}". Supported dtypes: {names}')
        self._dtype = CODES[dtype]
        self._data_ptr = _unsigned("data_ptr", data_ptr)
        self._data_len = _unsigned("data_len", data_len)
        if self._dtype == "F4" and sizes:
            if sizes[-1] * 2 >= _UNSIGNED_END:
                raise SafetensorError(
                    f"F4 last-dim {sizes[-1]} doubled to logical shape overflows usize"
                )
            sizes[-1] *= 2
        self._shape = sizes

    @property
    def dtype(self) -> str:
        """The name of the dtype in files: "F32", "BF16"."""
        return self._dtype

    @property
    def shape(self) -> list[int]:
        """The shape in files."""
        return list(self._shape)

    @property
    def data_ptr(self) -> int:
        """The address of the first byte."""
        return self._data_ptr

    @property
    def data_len(self) -> int:
        """The number of bytes."""
        return self._data_len

    def __repr__(self) -> str:
        return (
            f"TensorSpec(dtype='{self._dtype}', shape={self._shape}, "
            f"data_ptr={self._data_ptr}, data_len={self._data_len})"
        )


def _memory_of(spec: TensorSpec) -> Any:
    import ctypes

    return (ctypes.c_char * spec.data_len).from_address(spec.data_ptr) if spec.data_len else b""


def _check_sizes(specs: dict[str, TensorSpec]) -> None:
    for spec in specs.values():
        bits = BITS[spec.dtype]
        for size in spec.shape:
            bits *= size
            if bits >= _UNSIGNED_END:
                raise SafetensorError(f"Error while serializing: {SIZE_OVERFLOW}")
        if bits % 8 != 0:
            raise SafetensorError(f"Error while serializing: {PACKED_MISFIT}")
        if bits // 8 != spec.data_len:
            raise SafetensorError(f"Error while serializing: {WRONG_SIZE}")


def _check_specs(tensor_dict: Any, metadata: Any) -> None:
    check_type("tensor_dict", tensor_dict, dict)
    for name, spec in tensor_dict.items():
        check_type("tensor_dict", name, str)
        # One of safetensors' own is as good.
        if not all(hasattr(spec, field) for field in ("dtype", "shape", "data_ptr", "data_len")):
            check_type("tensor_dict", spec, TensorSpec)
    check_metadata(metadata)
    _check_sizes(tensor_dict)


def check_metadata(metadata: Any) -> None:
    """Raises what safetensors raises unless it is None or a dict of texts."""
    if metadata is None:
        return
    check_type("metadata", metadata, dict)
    for name, text in metadata.items():
        check_type("metadata", name, str)
        check_type("metadata", text, str)
        name.encode(), text.encode()  # raises for half a character


def serialize(tensor_dict: dict[str, TensorSpec], metadata: dict[str, str] | None = None) -> bytes:
    """Returns the bytes of a file with these tensors."""
    _check_specs(tensor_dict, metadata)
    names = list(tensor_dict)
    rows = [(name, tensor_dict[name].dtype, tensor_dict[name].shape) for name in names]
    try:
        header, order = _core.make_safetensors_header(rows, metadata=metadata, alignment=8)
    except OSError as error:
        raise SafetensorError(f"Error while serializing: {error}") from error
    parts = [header, *(_memory_of(tensor_dict[names[index]]) for index in order)]
    return b"".join(parts)


def serialize_file(
    tensor_dict: dict[str, TensorSpec],
    filename: str | os.PathLike[str],
    metadata: dict[str, str] | None = None,
    *,
    checksums: bool = False,
    progress: Progress = None,
) -> None:
    """Writes these tensors to a new file that replaces `filename`.

    When it returns, the file is on the drive. When it raises, the old file is as it was.
    `checksums=True` adds XXH3 checksums, in an entry of the metadata; `progress` is True for a bar,
    or a function of (done bytes, total bytes).
    """
    path = check_path(filename)
    _check_specs(tensor_dict, metadata)
    rows = [(n, spec.dtype, spec.shape, _memory_of(spec)) for n, spec in tensor_dict.items()]
    write_file(rows, path, metadata, checksums=checksums, progress=progress)


def write_file(
    rows: list[tuple[str, str, list[int], object]],
    path: str,
    metadata: dict[str, str] | None,
    *,
    checksums: bool,
    progress: Progress,
) -> None:
    """Writes (name, dtype, shape, memory) as safetensors would."""
    try:
        _core.save_safetensors(
            shared_handle(),
            path,
            rows,
            metadata=metadata,
            checksums=checksums,
            alignment=8,
            progress=report_of(progress, "saving"),
        )
    except OSError as error:
        raise saving_error(error) from error


def deserialize(bytes: bytes) -> list[tuple[str, dict[str, Any]]]:  # noqa: A002
    """Returns (name, {"shape": ..., "dtype": ..., "data": bytearray}) of each tensor, by offset."""
    try:
        view = memoryview(bytes).cast("B")
    except TypeError:
        check_type("bytes", bytes, _BYTES)
        raise
    try:
        tensors, _ = _core.parse_safetensors(view)
    except OSError as error:
        raise header_error(error, "Error while deserializing") from error
    return [
        (
            name,
            {
                "shape": shape,
                "dtype": dtype,
                "data": bytearray(view[offset : offset + length]),
            },
        )
        for name, dtype, shape, _, offset, length in tensors
    ]
