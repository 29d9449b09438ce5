"""Finds the bytes of a tensor in an item, which is a zip archive of torch.save.

Reads the ends of the archive alone. The pickle in it is read by rules of its own: it describes one
tensor, or torch has to load the item.
"""

from __future__ import annotations

import functools
import io
import math
import pickle
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from .._core import crc32
from ..checkpoint.sealed import Sealed
from ..checkpoint.zip_archive import (
    LOCAL_HEADER_BYTES,
    BadArchive,
    Read,
    Record,
    local_data_offset,
    read_directory,
)
from .metadata_file import noted_storage
from .piece_checksums import RECORD, piece_count

_PICKLE_BYTES_MAX = 1 << 20
STORAGE = "archive/data/0"  # the record that has the bytes of a tensor of ours


class StoredTensor(NamedTuple):
    """A strided tensor, and where the bytes of its storage are in the item."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]  # in elements, as all but the last four
    storage_offset: int
    record: str
    offset: int
    bytes: int
    crc: int | None  # None if the archive has no checksums
    pieces: Record | None = None  # the record with the checksums of its pieces


def contiguous(size: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    stride = [1] * len(size)
    for dim in reversed(range(len(size) - 1)):
        stride[dim] = stride[dim + 1] * max(size[dim + 1], 1)
    return tuple(stride)


def noted_tensor(
    tensor: TensorStorageMetadata, index: MetadataIndex, place: _StorageInfo
) -> StoredTensor | None:
    """Returns where the metadata say that a tensor is in its item; None if they do not."""
    noted = noted_storage(place)
    size = _chunk_size(tensor, index)
    if noted is None or size is None:
        return None
    dtype = tensor.properties.dtype
    count = math.prod(size) * dtype.itemsize
    if noted[0] + count > place.length:
        return None
    return StoredTensor(dtype, size, contiguous(size), 0, STORAGE, noted[0], count, noted[1])


def _chunk_size(tensor: TensorStorageMetadata, index: MetadataIndex) -> tuple[int, ...] | None:
    chunks = tensor.chunks
    if index.index is not None and index.index < len(chunks):  # where it should be
        chunks = [chunks[index.index], *chunks]
    for chunk in chunks:
        if index.offset is None or chunk.offsets == index.offset:
            return tuple(chunk.sizes)
    return None


class _Unknown(Exception):
    """It is not a tensor as torch.save writes one by itself."""


def find_tensor(read: Read, item_bytes: int, verify: bool) -> StoredTensor | None:
    """Returns where the tensor is; None if torch has to load the item.

    Raises BadArchive if the archive is damaged or, with `verify`, a checksum differs.
    """
    records = read_directory(read, item_bytes)
    has_crcs = any(record.crc for record in records)
    by_name = {record.name.partition("/")[2]: record for record in records}
    storages = [record for record in records if "/data/" in record.name]
    if len(by_name) != len(records) or len(storages) != 1 or not storages[0].stored:
        return None

    def small(name: str) -> bytes:
        record = by_name.get(name)
        if record is None or not record.stored or record.size > _PICKLE_BYTES_MAX:
            raise _Unknown
        data = read(_data_offset(record, read), record.size)
        if verify and has_crcs and crc32(data) != record.crc:
            raise BadArchive(f"{record.name} does not match its checksum", record.header_offset)
        return data

    try:
        if small("byteorder") != sys.byteorder.encode():
            return None
        described = _described(small("data.pkl"))
    except _Unknown:
        return None
    storage = storages[0]
    offset = _storage_offset(storage, records, read, item_bytes)
    if offset is None or storage.name.rpartition("/")[2] != described.record:
        return None
    if storage.size != described.bytes:
        raise BadArchive(
            f"{storage.name} does not have the size of its tensor", storage.header_offset
        )
    crc = storage.crc if has_crcs else None
    pieces = by_name.get(RECORD)
    if pieces is not None and pieces.size != 4 * piece_count(storage.size):
        raise BadArchive(
            f"{pieces.name} does not have the size of its tensor", pieces.header_offset
        )
    return described._replace(record=storage.name, offset=offset, crc=crc, pieces=pieces)


def piece_checksums(stored: StoredTensor, read: Read) -> tuple[int, ...] | None:
    """Returns the checksums of the pieces of a tensor; None if its item has none."""
    if stored.pieces is None:
        return None
    data = read(_data_offset(stored.pieces, read), stored.pieces.size)
    if crc32(data) != stored.pieces.crc:
        name = stored.pieces.name
        raise BadArchive(f"{name} does not match its checksum", stored.pieces.header_offset)
    return struct.unpack(f"<{len(data) // 4}I", data)


def _data_offset(record: Record, read: Read) -> int:
    offset = local_data_offset(record, read(record.header_offset, LOCAL_HEADER_BYTES))
    if offset is None:
        raise BadArchive(f"the header of {record.name} is damaged", record.header_offset)
    return offset


def _storage_offset(
    storage: Record, records: list[Record], read: Read, item_bytes: int
) -> int | None:
    """Where the bytes begin, if the header in front of them and what follows them agree on it."""
    offset = _data_offset(storage, read)
    behind = [r.header_offset for r in records if r.header_offset > storage.header_offset]
    # The directory has no entry of its own: its first record says where it begins.
    following = min([*behind, min(record.entry_offset for record in records)])
    end = offset + storage.size + storage.descriptor_bytes
    return offset if end == following and end <= item_bytes else None


@functools.lru_cache(maxsize=1024)  # the tensors of a model have few shapes
def _described(data: bytes) -> StoredTensor:
    try:
        found = _Unpickler(io.BytesIO(data)).load()
    except _Unknown:
        raise
    except Exception as error:
        raise BadArchive(f"data.pkl is damaged: {error}", 0) from None
    if not isinstance(found, StoredTensor):
        raise _Unknown
    return found


class _Unpickler(pickle.Unpickler):
    """Reads the pickle of one tensor; everything else raises _Unknown."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in _REBUILD:
            return _REBUILD[name]
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return torch.uint8
        if module == "torch":
            found = torch.storage._storage_type_to_dtype_map().get(name, vars(torch).get(name))
            if isinstance(found, torch.dtype):
                return found
        raise _Unknown

    def persistent_load(self, identity: Any) -> tuple[torch.dtype, str, int]:
        kind, dtype, key, _, count = identity
        if kind != "storage" or not isinstance(dtype, torch.dtype) or not isinstance(key, str):
            raise _Unknown
        return dtype, key, _natural(count)


def _natural(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is not a size")
    return value


def _rebuilt(storage: Any, offset: Any, size: Any, stride: Any, dtype: Any) -> StoredTensor:
    storage_dtype, key, count = storage
    sizes, strides = tuple(map(_natural, size)), tuple(map(_natural, stride))
    storage_bytes = count * storage_dtype.itemsize
    last = _natural(offset)
    if len(sizes) != len(strides) or not isinstance(dtype, torch.dtype):
        raise ValueError("the shape of the tensor is damaged")
    if 0 not in sizes:
        last += 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides))
    if last * dtype.itemsize > storage_bytes:
        raise ValueError("the tensor is larger than its storage")
    return StoredTensor(dtype, sizes, strides, offset, key, 0, storage_bytes, None)


def _rebuild_v2(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, *more: Any
) -> StoredTensor:
    if more or storage[0] in _QUANTIZED:
        raise _Unknown
    return _rebuilt(storage, offset, size, stride, storage[0])


def _rebuild_v3(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *more: Any
) -> StoredTensor:
    if more:
        raise _Unknown
    return _rebuilt(storage, offset, size, stride, dtype)


_QUANTIZED = {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4}
_REBUILD: dict[str, Callable[..., StoredTensor]] = {
    "_rebuild_tensor_v2": Sealed(_rebuild_v2),
    "_rebuild_tensor_v3": Sealed(_rebuild_v3),
}
