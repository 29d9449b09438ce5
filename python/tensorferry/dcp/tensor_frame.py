"""What is around the bytes of a tensor in a data file: a zip archive, as torch.save writes one.

torch.load reads the item. Its bytes can begin at a multiple of 4096, so that they go between the
drive and the tensor without a copy.
"""

from __future__ import annotations

import functools
import struct
import sys
from collections.abc import Sequence

import torch

from .._core import crc32
from .piece_checksums import RECORD, piece_count
from .stored_tensor import contiguous

_FOLDER = b"archive/"
_PIECES_RECORD = _FOLDER + RECORD.encode()
_MAX_32 = 0xFFFFFFFF
_JANUARY_1980 = 0x21  # zip has no earlier day
_ALIGNMENT_FROM_BYTES = 64 << 10  # smaller tensors are not worth the padding


class TensorFrame:
    """The bytes in front of a tensor and those behind it, for an item at `offset` of a file."""

    def __init__(self, dtype: torch.dtype, shape: Sequence[int], offset: int) -> None:
        self.dtype, self.shape = dtype, torch.Size(shape)
        self.crc = 0
        self.tensor_bytes = dtype.itemsize
        for size in shape:
            self.tensor_bytes *= size
        head, entries = _front(dtype, tuple(shape), self.tensor_bytes)
        self._records = [*entries]  # of the directory
        self.head = head + self._storage_header(len(head), offset)
        self.tail = bytearray(self._tail())
        self.bytes = len(self.head) + self.tensor_bytes + len(self.tail)

    def set_crc(self, crc: int, of_pieces: Sequence[int] = ()) -> None:
        """Sets the checksum of the tensor's bytes, behind them and in the directory.

        `of_pieces` are the checksums of its pieces, as many as piece_count() says.
        """
        self.crc = crc
        struct.pack_into("<I", self.tail, 4, crc)
        struct.pack_into("<I", self.tail, self._entry_at + 16, crc)
        if not self._pieces:
            return
        data = struct.pack(f"<{self._pieces}I", *of_pieces)
        end = self._pieces_at + len(data)
        self.tail[self._pieces_at : end] = data
        header = self._pieces_at - len(_PIECES_RECORD) - 30
        struct.pack_into("<I", self.tail, header + 14, crc32(data))
        struct.pack_into("<I", self.tail, self._pieces_entry_at + 16, crc32(data))

    def _storage_header(self, at: int, offset: int) -> bytes:
        name = _FOLDER + b"data/0"
        alignment = 4096 if self.tensor_bytes >= _ALIGNMENT_FROM_BYTES else 64
        padding = -(offset + at + 30 + len(name)) % alignment
        if 0 < padding < 4:
            padding += alignment
        size = min(self.tensor_bytes, _MAX_32)
        version = 45 if size == _MAX_32 else 20
        # Bit 3: the checksum and the size are behind the data.
        fields = (version, 8, 0, 0, _JANUARY_1980, 0, size, size, len(name))
        self._records.append(_entry(name, fields, at, self.tensor_bytes))
        header = struct.pack("<4s5H3I2H", b"PK\3\4", *fields[:5], 0, 0, 0, len(name), padding)
        extra = struct.pack("<2sH", b"FB", padding - 4) if padding else b""
        return (header + name + extra).ljust(30 + len(name) + padding, b"Z")

    def _tail(self) -> bytes:
        wide = self.tensor_bytes >= _MAX_32
        sizes = (self.tensor_bytes, self.tensor_bytes)
        tail = struct.pack("<4sIQQ" if wide else "<4sIII", b"PK\7\10", 0, *sizes)
        in_front = len(self.head) + self.tensor_bytes
        storage_entry = len(self._records) - 1
        self._pieces = piece_count(self.tensor_bytes)
        if self._pieces:
            at, name = in_front + len(tail), _PIECES_RECORD.removeprefix(_FOLDER)
            record, entry = _small_record(name, bytes(4 * self._pieces), at)
            self._records.append(entry)
            tail += record
            self._pieces_at = len(tail) - 4 * self._pieces
        begin = in_front + len(tail)
        self._entry_at = len(tail) + sum(map(len, self._records[:storage_entry]))
        self._pieces_entry_at = len(tail) + sum(map(len, self._records[:-1]))
        directory = b"".join(self._records)
        count, end = len(self._records), begin + len(directory)
        tail += directory
        if end >= _MAX_32:
            tail += struct.pack(
                "<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(directory), begin
            )
            tail += struct.pack("<4sIQI", b"PK\6\7", 0, end, 1)
        short = min(begin, _MAX_32)
        return tail + struct.pack(
            "<4s4HIIH", b"PK\5\6", 0, 0, count, count, len(directory), short, 0
        )


@functools.lru_cache(maxsize=1024)  # the tensors of a model have few shapes
def _front(
    dtype: torch.dtype, shape: tuple[int, ...], tensor_bytes: int
) -> tuple[bytes, tuple[bytes, ...]]:
    """The records in front of that of the tensor, and their entries in the directory."""
    head, entries = b"", []
    for name, data in (
        (b"data.pkl", _pickled(dtype, shape, tensor_bytes)),
        (b"byteorder", sys.byteorder.encode()),
        (b"version", b"3\n"),
    ):
        record, entry = _small_record(name, data, len(head))
        head += record
        entries.append(entry)
    return head, tuple(entries)


def _small_record(name: bytes, data: bytes, at: int) -> tuple[bytes, bytes]:
    """A record, and its entry in the directory."""
    name = _FOLDER + name
    fields = (20, 0, 0, 0, _JANUARY_1980, crc32(data), len(data), len(data), len(name))
    record = struct.pack("<4s5H3I2H", b"PK\3\4", *fields, 0) + name + data
    return record, _entry(name, fields, at)


def _entry(name: bytes, fields: tuple[int, ...], at: int, size: int = 0) -> bytes:
    """An entry of the directory."""
    wide = [size, size] if size >= _MAX_32 else []
    wide += [at] if at >= _MAX_32 else []
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    head = struct.pack("<4sH5H3I2H", b"PK\1\2", fields[0], *fields, len(extra))
    return head + struct.pack("<HHHII", 0, 0, 0, 0, min(at, _MAX_32)) + name + extra


# Opcodes of protocol 2 of pickle.
_GLOBAL, _MARK, _TUPLE, _PERSISTENT = b"c", b"(", b"t", b"Q"
_FALSE, _EMPTY_TUPLE, _CALL, _END = b"\x89", b")", b"R", b"."


def _number(value: int) -> bytes:
    if value < 1 << 31:
        return struct.pack("<ci", b"J", value)
    return struct.pack("<cBq", b"\x8a", 8, value)


def _numbers(values: Sequence[int]) -> bytes:
    return _MARK + b"".join(map(_number, values)) + _TUPLE


def _text(value: str) -> bytes:
    return struct.pack("<cI", b"X", len(value)) + value.encode()


def _name(module: str, name: str) -> bytes:
    return _GLOBAL + f"{module}\n{name}\n".encode()


def _pickled(dtype: torch.dtype, shape: tuple[int, ...], tensor_bytes: int) -> bytes:
    """What torch.save pickles for a contiguous tensor that has all of its storage.

    A pickler takes ten times as long, and longer than it takes to write a small tensor.
    """
    before, after, item_bytes = _around_numbers(dtype)
    storage = before + _number(tensor_bytes // item_bytes) + _TUPLE + _PERSISTENT
    return storage + _number(0) + _numbers(shape) + _numbers(contiguous(shape)) + after


@functools.cache
def _around_numbers(dtype: torch.dtype) -> tuple[bytes, bytes, int]:
    """The pickle up to the elements of the storage, and behind the strides; bytes per element."""
    kind = torch.storage._dtype_to_storage_type_map().get(dtype)
    if kind is None:
        storage, rebuild, item_bytes = ("torch.storage", "UntypedStorage"), "_rebuild_tensor_v3", 1
        more = _name("torch", str(dtype).removeprefix("torch."))
    else:
        storage, rebuild, item_bytes = ("torch", kind), "_rebuild_tensor_v2", dtype.itemsize
        more = b""
    before = b"\x80\2" + _name("torch._utils", rebuild) + _MARK
    before += _MARK + _text("storage") + _name(*storage) + _text("0") + _text("cpu")
    hooks = _name("collections", "OrderedDict") + _EMPTY_TUPLE + _CALL
    return before, _FALSE + hooks + more + _TUPLE + _CALL + _END, item_bytes
