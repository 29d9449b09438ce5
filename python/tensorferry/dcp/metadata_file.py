"""Reads and writes `.metadata`, the pickle that says where each item of a checkpoint is.

With an ordinary unpickler, anybody who can write that file could run any code. This one makes
objects of the classes that a checkpoint needs, and nothing else. It cannot change the classes
either.
"""

from __future__ import annotations

import collections
import io
import os
import pathlib
import pickle
import re
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as formats
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from .._core import NewFile, crc32
from .._shared_handle import shared_handle
from ..checkpoint.sealed import Sealed, sealed_class
from ..checkpoint.torch_layout import damaged

# Behind the pickle, where other readers do not look.
_TRAILER = re.compile(rb"\ntensorferry crc32 ([0-9a-f]{8})\n\Z")

_CLASSES: dict[tuple[str, str], Any] = {
    (cls.__module__, cls.__qualname__): sealed_class(cls)
    for cls in (
        formats.BytesStorageMetadata,
        formats.ChunkStorageMetadata,
        formats.Metadata,
        formats.MetadataIndex,
        formats.StorageMeta,
        formats.TensorProperties,
        formats.TensorStorageMetadata,
        _StorageInfo,
    )
}
# Python lets nobody change these.
_CLASSES["collections", "OrderedDict"] = collections.OrderedDict
_CLASSES["torch", "Size"] = torch.Size


def _layout(name: str) -> torch.layout:
    found = vars(torch)[name.removeprefix("torch.")]
    if not isinstance(found, torch.layout):
        raise ValueError(f"{name} is not a layout")
    return found


def _memory_format(value: object) -> Sealed:
    return Sealed(_MEM_FORMAT_ENCODING(value))


# torch pickles a layout as a call of its own.
_CLASSES["torch.serialization", "_get_layout"] = Sealed(_layout)
# A member of an enumeration is the same object everywhere.
_CLASSES[_MEM_FORMAT_ENCODING.__module__, _MEM_FORMAT_ENCODING.__qualname__] = Sealed(
    _memory_format
)
# Where versions of Python have the class of a path.
_CLASSES["pathlib", "PosixPath"] = sealed_class(pathlib.PurePosixPath)
_CLASSES["pathlib._local", "PosixPath"] = _CLASSES["pathlib", "PosixPath"]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _CLASSES.get((module, name))
        if found is None and module == "torch":
            found = vars(torch).get(name)
            if not isinstance(found, torch.dtype):
                found = None
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
        return found

    def persistent_load(self, pid: object) -> Any:
        raise pickle.UnpicklingError("it refers to objects elsewhere")


def load_metadata(path: str) -> formats.Metadata:
    """Returns the metadata in the file. Runs nothing that the file names.

    Raises OSError (EBADMSG) if the file is damaged or holds anything that no checkpoint needs.
    """
    with open(path, "rb") as file:
        data = file.read()
    trailer = _TRAILER.search(data, max(0, len(data) - 64))
    if trailer and crc32(data[: trailer.start()]) != int(trailer[1], 16):
        raise damaged(path, "the metadata do not match their checksum", 0, trailer.start())
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
        problem = _problem(metadata)
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle raises whatever its objects raise
        problem = f"the metadata cannot be read: {error}"
    if problem:
        raise damaged(path, problem, 0, len(data))
    assert isinstance(metadata, formats.Metadata)
    return metadata


def save_metadata(metadata: formats.Metadata, path: str) -> None:
    """Replaces the file, durably and as a whole."""
    data = pickle.dumps(metadata)
    data += b"\ntensorferry crc32 %08x\n" % crc32(data)
    with NewFile(path) as new:
        shared_handle().write_now(data, new.file)
        new.commit()


def note_storage(place: _StorageInfo, offset: int, crc: int) -> None:
    """Notes where the bytes of a tensor are in its item, and their checksum.

    With that, a reader need not look at what torch has around them. torch does not see the note.
    """
    place.tensorferry = (offset, crc)


def noted_storage(place: _StorageInfo) -> tuple[int, int] | None:
    """Returns what note_storage() noted; None if it did not."""
    noted = vars(place).get("tensorferry")
    if not isinstance(noted, tuple) or len(noted) != 2:
        return None
    offset, crc = noted
    if not isinstance(offset, int) or not isinstance(crc, int) or offset < 0:
        return None
    return offset, crc


def forget_storage(place: _StorageInfo) -> None:
    vars(place).pop("tensorferry", None)


def _problem(metadata: object) -> str | None:
    """Says what is wrong with the kinds of the objects, which readers rely on."""
    if not isinstance(metadata, formats.Metadata):
        return "the file holds no metadata of a checkpoint"
    tensors, places = metadata.state_dict_metadata, metadata.storage_data
    if not isinstance(tensors, dict) or not isinstance(places, dict):
        return "the metadata are damaged"
    for index, place in places.items():
        if not isinstance(index, formats.MetadataIndex) or not isinstance(place, _StorageInfo):
            return "the metadata are damaged"
        name, begin, length = place.relative_path, place.offset, place.length
        if not isinstance(begin, int) or not isinstance(length, int) or begin < 0 or length < 0:
            return f"the place of {index.fqn} is damaged"
        if not isinstance(name, str) or os.path.isabs(name) or ".." in name.split("/"):
            return f"the data of {index.fqn} are said to be outside the folder, in {name!r}"
    return None
