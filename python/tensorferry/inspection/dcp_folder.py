"""Opens folders of torch.distributed.checkpoint, and of safetensors files without an index."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from ..checkpoint.torch_layout import damaged
from ..checkpoint.zip_archive import (
    LOCAL_HEADER_BYTES,
    BadArchive,
    Read,
    local_data_offset,
    read_bytes,
    read_directory,
)
from ..dcp.folder import metadata_name, metadata_ranks
from ..dcp.metadata_file import load_metadata
from ..dcp.safetensors_set import TensorPlace, read_set
from ..dcp.stored_tensor import StoredTensor, find_tensor
from .dtypes import PAIRED, kind_of_torch
from .tensors import (
    Check,
    Checkpoint,
    StoredBox,
    StoredObject,
    Stretch,
    Tensor,
    Unusable,
    dense,
    unpaired,
)

_FILES_MAX = 64  # open at a time
# What reading metadata raises that have other kinds of objects than they should.
_WRONG_KINDS = (TypeError, ValueError, AttributeError, LookupError, OverflowError, RuntimeError)


def open_dcp_folder(path: str) -> Checkpoint:
    """Opens a folder with `.metadata`, or with that of ranks that have saved by themselves."""
    ranks = metadata_ranks(path)
    found = Checkpoint(path, "dcp", [], lambda: iter(()))
    metadata = [load_metadata(os.path.join(path, metadata_name(rank))) for rank in ranks]
    for rank, of_rank in zip(ranks, metadata):
        _add(found, of_rank, f"rank {rank}: " if len(ranks) > 1 else "")
    found.checks = functools.partial(_checks, path, metadata)
    return found


def open_safetensors_folder(path: str) -> Checkpoint:
    """Opens all safetensors files of a folder, also those with shards, which torch writes."""
    try:
        metadata = read_set(path, verify=False)
    except _WRONG_KINDS as error:
        raise Unusable(f"{path}: its safetensors files do not belong together: {error}") from None
    found = Checkpoint(path, "safetensors", [], functools.partial(_checks, path, [metadata]))
    _add(found, metadata, "")
    return found


def _add(checkpoint: Checkpoint, metadata: Metadata, prefix: str) -> None:
    with _Items(checkpoint.path) as items:
        for name, described in metadata.state_dict_metadata.items():
            if not isinstance(described, TensorStorageMetadata):
                checkpoint.objects.append(StoredObject(prefix + str(name), "object"))
                continue
            try:
                checkpoint.tensors.append(_tensor(items, metadata, name, described, prefix))
            except _WRONG_KINDS as error:
                raise damaged(
                    items.folder, f"the metadata of {name} are wrong: {error}", 0
                ) from None


def _tensor(
    items: _Items, metadata: Metadata, name: str, described: TensorStorageMetadata, prefix: str
) -> Tensor:
    dtype = str(described.properties.dtype).removeprefix("torch.")
    kind = kind_of_torch(dtype)
    if kind is None:
        raise Unusable(
            f"{items.folder}: {name} has the dtype {dtype}, which this command does not read"
        )
    shape = tuple(described.size)
    boxes, checksum, elements = [], None, 0
    for chunk in described.chunks:
        if 0 in chunk.sizes:
            continue
        place = metadata.storage_data.get(MetadataIndex(name, chunk.offsets))
        if place is None:
            raise damaged(items.folder, f"the metadata do not say where {name} is", 0)
        stored = items.tensor(name, place)
        box = _box(items, name, place, chunk, stored)
        ends = (at + count for at, count in zip(box.starts, box.sizes))
        outside = (
            any(end > size for end, size in zip(ends, shape)) or min(box.starts, default=0) < 0
        )
        if len(box.sizes) != len(shape) or outside:
            raise damaged(items.folder, f"a part of {name} is outside of it", 0)
        elements += torch.Size(box.sizes).numel()
        boxes.append(box)
        whole = len(described.chunks) == 1 and dense(box)
        if stored.crc is not None and whole:
            checksum = f"crc32:{stored.crc:08x}"
    if elements != torch.Size(shape).numel():
        raise damaged(items.folder, f"the parts of {name} are not all of it", 0)
    if kind == PAIRED and shape:
        shape, boxes = (*shape[:-1], 2 * shape[-1]), list(map(unpaired, boxes))
    tensor = Tensor(prefix + name, kind, shape, tuple(boxes), checksum)
    if kind == PAIRED and (not shape or tensor.stretches() is None):
        raise Unusable(
            f"{items.folder}: {name} has pairs of elements that do not follow each other"
        )
    return tensor


def _box(
    items: _Items, name: str, place: _StorageInfo, chunk: ChunkStorageMetadata, stored: StoredTensor
) -> StoredBox:
    path = items.path(place)
    if tuple(stored.size) != tuple(chunk.sizes):
        raise damaged(path, f"{name} has another shape than the metadata say", place.offset)
    offset = place.offset + stored.offset + stored.storage_offset * stored.dtype.itemsize
    return StoredBox(path, offset, tuple(chunk.offsets), tuple(chunk.sizes), tuple(stored.stride))


class _Items:
    """Reads the ends of the items of a folder. Leaving `with` closes its files."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._open: dict[str, int] = {}

    def __enter__(self) -> _Items:
        return self

    def __exit__(self, *args: object) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def path(self, place: _StorageInfo) -> str:
        return os.path.join(self.folder, place.relative_path)

    def read(self, place: _StorageInfo) -> Read:
        """Returns the function that reads bytes of an item."""
        path = self.path(place)
        if path not in self._open:
            if len(self._open) == _FILES_MAX:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        descriptor = self._open[path]
        size = os.fstat(descriptor).st_size
        if place.offset + place.length > size:
            raise damaged(path, "the file ends before its last item does", size)

        def read(offset: int, count: int) -> bytes:
            count = max(0, min(count, place.length - offset))
            return read_bytes(descriptor, place.offset + offset, count)

        return read

    def tensor(self, name: str, place: _StorageInfo) -> StoredTensor:
        path = self.path(place)
        if place.transform_descriptors:
            raise Unusable(
                f"{path}: {name} was saved with the extensions {place.transform_descriptors}: load "
                "it with torch, and save it without them"
            )
        if isinstance(place, TensorPlace) and place.tensor is not None:
            return place.tensor
        try:
            stored = find_tensor(self.read(place), place.length, verify=False)
        except BadArchive as problem:
            raise damaged(path, f"{name}: {problem}", place.offset + problem.offset) from None
        if stored is None:
            raise Unusable(f"{path}: {name} is not an ordinary tensor: load it with torch")
        return stored


def _checks(folder: str, metadata: list[Metadata]) -> Iterator[Check]:
    """The checksums in all items, which are archives, in the order of the files."""
    places = [(place, index.fqn) for one in metadata for index, place in one.storage_data.items()]
    places.sort(key=lambda item: (item[0].relative_path, item[0].offset))
    with _Items(folder) as items:
        for place, name in places:
            path = items.path(place)
            if isinstance(place, TensorPlace):
                yield Check(name, Stretch(path, place.offset, place.length))
                continue
            read = items.read(place)
            try:
                yield from _checks_of_archive(name, path, place, read)
            except BadArchive as problem:
                raise damaged(path, f"{name}: {problem}", place.offset + problem.offset) from None


def _checks_of_archive(name: str, path: str, place: _StorageInfo, read: Read) -> Iterator[Check]:
    if read(0, 4) != b"PK\3\4":  # an object that its planner has written otherwise
        yield Check(name, Stretch(path, place.offset, place.length))
        return
    records = read_directory(read, place.length)
    has_crcs = any(record.crc for record in records)
    for record in records:
        at = local_data_offset(record, read(record.header_offset, LOCAL_HEADER_BYTES))
        if at is None or at + record.size > place.length:
            raise BadArchive(f"the header of {record.name} is damaged", record.header_offset)
        if record.stored and record.size:
            stretch = Stretch(path, place.offset + at, record.size)
            yield Check(name, stretch, record.crc if has_crcs else None)
