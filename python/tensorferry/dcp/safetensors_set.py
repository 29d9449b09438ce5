"""Checkpoints in the layout of Hugging Face: safetensors files with whole tensors, and an index.

Rank 0 lays the files out. Each rank writes the rows and columns of its shards to their places, so
that nothing has to be put together afterwards, and computes checksums. When all of them are on the
drive, rank 0 writes the headers, which have the checksums, and the files get their names. The
index, which is renamed last, says which ones count.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as formats
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from .._core import File, NewFile, SafetensorsFile, make_safetensors_header
from .._saving.windows import WINDOW_BYTES, WINDOWS, UnderWay
from .._shared_handle import shared_handle
from ..checkpoint.torch_layout import damaged
from ..checkpoint.unchecked import log_unchecked
from .boxes import Box
from .data_file import bytes_of
from .file_parts import FilePart, windows
from .folder import remove, sync, sync_folder
from .safetensors_sums import PieceSums, TensorSums, piece_count, read_back, whole_pieces
from .stored_tensor import StoredTensor, contiguous

_log = logging.getLogger("tensorferry")

INDEX = "model.safetensors.index.json"
_HIDDEN = ".tensorferry-new"
_OURS = re.compile(r"model-\d{5}-of-\d{5}\.[0-9a-f]{12}\.safetensors(\.tensorferry-new)?")
# What torch writes into the metadata of files that hold shards.
_SHARDING = "DCP_SHARDING_INFO"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# A byte has two elements of it, which torch counts as one.
_PAIRED = torch.float4_e2m1fn_x2


@dataclass
class TensorPlace(_StorageInfo):  # type: ignore[misc]  # mypy knows nothing of torch
    """Where a tensor is that has nothing around it."""

    tensor: StoredTensor | None = None
    checked_by: str | None = None  # the file or index in the folder that has its checksum


@dataclass
class FileSet:
    """New files, and where each tensor is in them. Rank 0 makes it, all ranks get it."""

    names: list[str]
    places: dict[str, TensorPlace]

    def header(
        self, name: str, sums: Mapping[str, object] | None = None
    ) -> tuple[bytes, list[str]]:
        """The header of a file, and its tensors in their order. Without `sums` those are zeros."""
        places = {key: p.tensor for key, p in self.places.items() if p.relative_path == name}
        tensors = {key: tensor for key, tensor in places.items() if tensor is not None}
        described = [(key, _NAMES[t.dtype], _file_shape(t)) for key, t in tensors.items()]
        if sums is None:
            sums = {key: bytes(8 * piece_count(t.bytes)) for key, t in tensors.items()}
        pieces = [sums[key] for key in tensors]
        metadata = {"format": "pt"}
        header, order = make_safetensors_header(
            described, metadata=metadata, alignment=4096, pieces=pieces
        )
        return header, [described[number][0] for number in order]

    def index(self) -> bytes:
        """What the index file holds."""
        total = sum(place.length for place in self.places.values())
        files = {name: place.relative_path for name, place in sorted(self.places.items())}
        return json.dumps(
            {"metadata": {"total_size": total}, "weight_map": files}, indent=2
        ).encode()


def _file_shape(tensor: StoredTensor) -> tuple[int, ...]:
    """The shape that safetensors gives a tensor of torch."""
    *outer, last = tensor.size or (1,)
    return (*outer, 2 * last) if tensor.dtype == _PAIRED else tensor.size


def _torch_shape(kind: str, shape: list[int], what: str) -> tuple[int, ...]:
    """The shape that torch gives a tensor of safetensors."""
    if _DTYPES[kind] != _PAIRED:
        return tuple(shape)
    if not shape or shape[-1] % 2:
        raise ValueError(f"{what} is {kind} of {shape}: torch needs an even last size")
    return (*shape[:-1], shape[-1] // 2)


def make_files(folder: str, items: Iterable[WriteItem], numbers: Mapping[str, int]) -> FileSet:
    """Makes files for the tensors, with their headers and their space.

    `numbers` says which file a tensor goes to, from 1 on. Others go to the first.
    """
    in_file: dict[int, dict[str, Any]] = {}
    for item in items:
        name = item.index.fqn
        if item.tensor_data is None:
            raise ValueError(
                f"{name} is not a tensor, and the files of Hugging Face hold only tensors: save it "
                "elsewhere"
            )
        dtype = item.tensor_data.properties.dtype
        if dtype not in _NAMES or (dtype == _PAIRED and not item.tensor_data.size):
            raise ValueError(f"{name} is {dtype}, which safetensors files do not have")
        in_file.setdefault(numbers.get(name, 1), {})[name] = item.tensor_data
    made = FileSet([], {})
    count = max(in_file, default=1)
    token = secrets.token_hex(6)
    try:
        for number, tensors in sorted(in_file.items()):
            made.names.append(f"model-{number:05}-of-{count:05}.{token}.safetensors")
            _make_file(folder, made.names[-1], tensors, made)
    except BaseException:
        remove_hidden(folder, made)
        raise
    return made


def remove_hidden(folder: str, files: FileSet) -> None:
    """Removes the files of a save that has failed, unless they have their names."""
    for name in files.names:
        remove(os.path.join(folder, name + _HIDDEN))


def _make_file(folder: str, name: str, tensors: dict[str, Any], made: FileSet) -> None:
    for key, tensor in tensors.items():
        dtype, size = tensor.properties.dtype, tuple(tensor.size)
        count = math.prod(size) * dtype.itemsize
        stored = StoredTensor(dtype, size, contiguous(size), 0, key, 0, count, None)
        made.places[key] = TensorPlace(name, 0, count, tensor=stored)
    header, order = made.header(name)
    offset = len(header)
    for key in order:
        made.places[key].offset = offset
        offset += made.places[key].length
    path = os.path.join(folder, name + _HIDDEN)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        os.posix_fallocate(descriptor, 0, offset)
    finally:
        os.close(descriptor)


def write_tensors(
    folder: str,
    files: FileSet,
    items: list[WriteItem],
    resolve: Callable[[WriteItem], torch.Tensor],
    passed: Callable[[int], object],
) -> list[WriteResult]:
    """Writes what one rank has of the tensors, and returns when it is on the drive.

    The results have the checksums of the pieces that this rank has.
    """
    sums: list[list[PieceSums]] = [[] for _ in items]
    with contextlib.ExitStack() as stack:

        @functools.cache
        def opened(name: str) -> tuple[int, File]:
            path = os.path.join(folder, name + _HIDDEN)
            # A planner that keeps its plan leads to files of an earlier save, which have gone.
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            return descriptor, stack.enter_context(File.borrow(descriptor))

        def parts() -> Iterator[FilePart]:
            for item, of_item in zip(items, sums):
                place = files.places[item.index.fqn]
                _, file = opened(place.relative_path)
                yield from _pieces_of(item, place, resolve(item), file, of_item)

        with UnderWay[int]() as under_way:
            for window in windows(parts()):
                if len(under_way) == WINDOWS:
                    passed(under_way.finish_oldest())
                writes = [(part.memory, part.file, part.offset) for part in window]
                count = sum(len(part.memory) for part in window)
                under_way.add(shared_handle().write_many(writes), count)
            while under_way:
                passed(under_way.finish_oldest())
        for name in files.names:
            if any(files.places[item.index.fqn].relative_path == name for item in items):
                sync(opened(name)[0], os.path.join(folder, name))
    return [
        WriteResult(item.index, files.places[item.index.fqn].length, of_item)
        for item, of_item in zip(items, sums)
    ]


def _pieces_of(
    item: WriteItem, place: TensorPlace, tensor: torch.Tensor, file: File, sums: list[PieceSums]
) -> Iterator[FilePart]:
    assert place.tensor is not None
    chunk = item.tensor_data.chunk
    if tensor.dtype != place.tensor.dtype or tensor.size() != torch.Size(chunk.sizes):
        raise ValueError(f"{item.index.fqn} is not the tensor that was planned")
    box = Box(place.tensor, chunk.offsets, chunk.sizes)
    if not box.bytes:
        return
    memory = bytes_of(tensor)
    for run in box.all_runs(contiguous(chunk.sizes)):
        at = 0
        while at < run.bytes:
            # Checksums are computed as late as the bytes are taken.
            source = run.source + at
            count = min(WINDOW_BYTES - source % WINDOW_BYTES, run.bytes - at)
            part = memory[run.target + at : run.target + at + count]
            sums += whole_pieces(part, source, place.length)
            yield FilePart(file, place.offset + source, part, None)
            at += count


def publish(folder: str, files: FileSet, results: list[list[WriteResult]]) -> None:
    """Gives the files their headers and names, and has the index name them; removes the old ones.

    If anything fails before the index has its name, the new files are removed.
    """
    index = os.path.join(folder, INDEX)
    old = _named_by(index) or set()
    try:
        sums = _checksums(folder, files, results)
        for name in files.names:
            path = os.path.join(folder, name)
            descriptor = os.open(path + _HIDDEN, os.O_RDWR | os.O_CLOEXEC)
            try:
                with File.borrow(descriptor) as file:
                    shared_handle().write_now(files.header(name, sums)[0], file)
                sync(descriptor, path)
            finally:
                os.close(descriptor)
            os.rename(path + _HIDDEN, path)
        sync_folder(folder)
        with NewFile(index) as new:
            shared_handle().write_now(files.index(), new.file)
            new.commit()
    except BaseException:
        # If the index has its name, nobody knows whether the drive will keep it.
        if _named_by(index) != set(files.names):
            remove_hidden(folder, files)
            for name in files.names:
                remove(os.path.join(folder, name))
        raise
    for name in os.listdir(folder):
        if (name in old or _OURS.fullmatch(name)) and name not in files.names:
            remove(os.path.join(folder, name))


def _checksums(
    folder: str, files: FileSet, results: list[list[WriteResult]]
) -> dict[str, bytearray]:
    """The checksums of all pieces of each tensor. Reads those that no rank has alone."""
    sums = {name: TensorSums(place.length) for name, place in files.places.items()}
    for result in (result for of_rank in results for result in of_rank):
        for known in result.storage_data:
            sums[result.index.fqn].add(known)
    for file_name in files.names:
        with File(os.path.join(folder, file_name + _HIDDEN)) as file:
            missing = [
                (sums[name], place.offset, part)
                for name, place in files.places.items()
                if place.relative_path == file_name
                for part in sums[name].missing()
            ]
            read_back(file, missing)
    return {name: of_tensor.pieces for name, of_tensor in sums.items()}


def remove_leftovers(folder: str) -> None:
    """Removes the files that killed and failed saves have left."""
    used = _named_by(os.path.join(folder, INDEX))
    if used is None:
        _log.warning("old files stay in %s: its %s is damaged", folder, INDEX)
        return
    for name in os.listdir(folder):
        if _OURS.fullmatch(name) and name not in used:
            remove(os.path.join(folder, name))


def _named_by(index: str) -> set[str] | None:
    """The files that an index names; none if there is no index, and None if it is damaged."""
    try:
        with open(index, "rb") as file:
            return set(json.load(file)["weight_map"].values())
    except FileNotFoundError:
        return set()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def has_safetensors(folder: str) -> bool:
    """Whether the folder has safetensors files and no metadata of torch's own layout."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return INDEX in names or any(name.endswith(".safetensors") for name in names)


def read_set(folder: str, verify: bool) -> formats.Metadata:
    """Returns what the files hold, as metadata of a checkpoint.

    Without an index, all safetensors files of the folder count, also those with shards, which torch
    writes. With `verify`, the log says which tensors have no checksum.
    """
    metadata = formats.Metadata({}, storage_data={})
    names = [INDEX]
    if not os.path.exists(os.path.join(folder, INDEX)):
        names = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
    for name in names:
        path = os.path.join(folder, name)
        opened = SafetensorsFile(path)
        if verify:
            log_unchecked(path, opened)
        _add(metadata, opened, name, {} if name == INDEX else _sharding(path, opened))
    return metadata


def _sharding(path: str, opened: SafetensorsFile) -> Any:
    try:
        return json.loads((opened.metadata or {}).get(_SHARDING, "{}"))
    except (ValueError, RecursionError):
        raise damaged(path, f"its {_SHARDING} is no JSON", 0) from None


def _first_of(sharding: Any, key: str, dims: int, path: str) -> list[int]:
    """Where a shard begins in its tensor."""
    first: Any = None
    with contextlib.suppress(LookupError, TypeError):
        first = sharding[key]["saved_offsets"] if key in sharding else [0] * dims
    counts = isinstance(first, list) and len(first) == dims
    if counts and all(type(at) is int and 0 <= at < 1 << 62 for at in first):
        return list(first)
    raise damaged(path, f"its {_SHARDING} does not say where {key} begins", 0)


def _add(metadata: formats.Metadata, opened: SafetensorsFile, name: str, sharding: Any) -> None:
    unchecked = set(opened.unchecked)
    names = [os.path.basename(file.path) for file in opened.files]
    for key, kind, shape, file, offset, count in opened.tensors:
        if kind not in _DTYPES:
            raise ValueError(f"{names[file]}: {key} is {kind}, which torch does not have")
        size = _torch_shape(kind, shape, f"{names[file]}: {key}")
        first = _first_of(sharding, key, len(size), opened.files[file].path)
        stored = StoredTensor(_DTYPES[kind], size, contiguous(size), 0, key, 0, count, None)
        checked_by = None if key in unchecked else name
        place = TensorPlace(names[file], offset, count, tensor=stored, checked_by=checked_by)
        index = formats.MetadataIndex(key, first)
        if index in metadata.storage_data:
            other = metadata.storage_data[index].relative_path
            raise ValueError(f"{key} is in {other} and in {names[file]}, and no {INDEX} says more")
        metadata.storage_data[index] = place
        whole = metadata.state_dict_metadata.setdefault(
            key,
            formats.TensorStorageMetadata(
                formats.TensorProperties(_DTYPES[kind]), torch.Size([0] * len(size)), []
            ),
        )
        ends = [at + count for at, count in zip(first, size)]
        whole.size = torch.Size(map(max, whole.size, ends))
        whole.chunks.append(formats.ChunkStorageMetadata(torch.Size(first), torch.Size(size)))
