"""What torch.save writes around the storages of an object.

torch pickles the object and lays the file out; storages stay holes. Uses torch's public functions
alone, so that the bytes are those of the torch that runs.
"""

from __future__ import annotations

import collections
import os
import shutil
import struct
import tempfile
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch

from .zip_archive import (
    LOCAL_HEADER_BYTES,
    Record,
    local_data_offset,
    read_bytes,
    read_directory,
)

_ID_RECORD = ".data/serialization_id"

# Objects of these very types are never storages. A pickle has many of them for each tensor.
_PLAIN = frozenset({bool, bytes, dict, float, int, list, str, tuple, type(None)}) | {
    collections.OrderedDict,
    FunctionType,
    torch.nn.Parameter,
    torch.Size,
    torch.Tensor,
}


class Skeleton:
    """A file of torch.save with holes for the storages.

    `gaps` are the bytes between the holes, by their offset; `storages` fill the holes. Call
    set_crc() for each storage, then set_id(); until then checksums are those of torch's holes.
    """

    def __init__(self, descriptor: int, storages: dict[str, torch.UntypedStorage]) -> None:
        def read(offset: int, count: int) -> bytes:
            return read_bytes(descriptor, offset, count)

        self.bytes = os.fstat(descriptor).st_size
        self._records = read_directory(read, self.bytes)
        self._folder = self._records[0].name.split("/")[0] + "/"
        self.storages: list[tuple[int, torch.UntypedStorage]] = []
        self.gaps: list[tuple[int, bytearray]] = []
        self._holes: list[Record] = []
        begin = 0
        for record, following in zip(self._records, self._records[1:]):
            key = record.name.removeprefix(self._folder + "data/")
            if key == record.name or not record.size:
                continue
            # One read gets what is between two storages, the local header of the second with it.
            offset = following.header_offset - record.descriptor_bytes - record.size
            gap = read(begin, offset - begin)
            header = gap[record.header_offset - begin :][:LOCAL_HEADER_BYTES]
            storage = storages.get(key)
            known = local_data_offset(record, header) == offset
            if not known or storage is None or storage.nbytes() != record.size:
                raise _unknown_layout()
            self._add_gap(begin, gap, offset)
            self.storages.append((offset, storage))
            self._holes.append(record)
            begin = offset + record.size
        self._add_gap(begin, read(begin, self.bytes - begin), self.bytes)
        self._crcs = {record.name: record.crc for record in self._records}
        self.has_crcs = bool(torch.serialization.get_crc32_options())
        if self._id() != self._written_id():
            raise _unknown_layout()

    def set_crc(self, index: int, crc: int) -> None:
        """Sets the checksum of a storage, in the gap behind it and in the directory."""
        record, gap = self._holes[index], self.gaps[index + 1][1]
        if gap[:4] != b"PK\7\10" or record.descriptor_bytes == 0:
            raise _unknown_layout()
        struct.pack_into("<I", gap, 4, crc)
        self._set_entry_crc(record, crc)

    def set_id(self, crc_of: Any) -> None:
        """Sets what torch calls the serialization id, which depends on all checksums."""
        record = self._id_record()
        at = self._id_offset()
        text = self._id()
        self._tail()[at : at + len(text)] = text
        crc = crc_of(text)
        struct.pack_into("<I", self._tail(), at + len(text) + 4, crc)
        self._set_entry_crc(record, crc)

    def forget_storages(self) -> None:
        """Somebody else has their bytes: lets go of their memory."""
        nothing = torch.UntypedStorage(0)
        self.storages = [(offset, nothing) for offset, _ in self.storages]

    def _add_gap(self, begin: int, data: bytes, end: int) -> None:
        if len(data) != end - begin:
            raise _unknown_layout()
        self.gaps.append((begin, bytearray(data)))

    def _tail(self) -> bytearray:
        return self.gaps[-1][1]

    def _set_entry_crc(self, record: Record, crc: int) -> None:
        self._crcs[record.name] = crc
        struct.pack_into("<I", self._tail(), record.entry_offset - self.gaps[-1][0] + 16, crc)

    def _id_record(self) -> Record:
        record = self._records[-1]
        if record.name != self._folder + _ID_RECORD or record.size != 40:
            raise _unknown_layout()
        return record

    def _id_offset(self) -> int:
        """Where the id is in the last gap."""
        record = self._id_record()
        at = record.header_offset - self.gaps[-1][0]
        offset = local_data_offset(record, bytes(self._tail()[at : at + LOCAL_HEADER_BYTES]))
        if at < 0 or offset is None:
            raise _unknown_layout()
        return offset - self.gaps[-1][0]

    def _written_id(self) -> bytes:
        at = self._id_offset()
        return bytes(self._tail()[at : at + 40])

    def _id(self) -> bytes:
        """20 digits of the records' names, then 20 of the checksums of those that have bytes."""
        combined = 0
        for record in self._records[:-1]:
            if record.size:
                crc = self._crcs[record.name]
                mixed = crc + 0x9E3779B9 + (combined << 6) + (combined >> 2)
                combined = (combined ^ mixed) & 0xFFFFFFFFFFFFFFFF
        return self._written_id()[:20] + b"%020d" % combined


def make_skeleton(
    obj: object, path: str, pickle_module: ModuleType, pickle_protocol: int
) -> Skeleton:
    """Pickles the object with torch.save, for a file that will have the name `path`."""
    storages: dict[str, torch.UntypedStorage] = {}
    before = torch.serialization.skip_data()
    with before:
        pass  # from now on before.__exit__() brings back how it is now
    with _Scratch(os.path.basename(path)) as scratch:

        def pickled() -> None:
            # Not before: tensors of some kinds refuse to be pickled while torch skips data.
            torch.serialization.skip_data().__enter__()

        module = _noting_module(pickle_module, storages, scratch.hide, pickled)
        try:
            # The name of the file is in the file, unless it has letters outside ASCII.
            if path.isascii():
                torch.save(obj, scratch.path, module, pickle_protocol)
            else:
                with open(scratch.path, "wb") as file:
                    torch.save(obj, file, module, pickle_protocol)
        finally:
            before.__exit__(None, None, None)
        try:
            return Skeleton(scratch.descriptor, storages)
        finally:
            storages.clear()  # the class has them until Python looks for cycles


class _Scratch:
    """A temporary file of a given name. After hide() only descriptors lead to it: a process that is
    killed later leaves nothing."""

    def __init__(self, name: str) -> None:
        self.descriptor = -1
        self._folder = tempfile.mkdtemp(prefix="tensorferry-")
        self.path = os.path.join(self._folder, name)
        if not self._folder.isascii():
            os.rmdir(self._folder)
            raise ValueError(f"torch needs a TMPDIR of ASCII letters; it is {self._folder!r}")

    def hide(self) -> None:
        self.descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        os.unlink(self.path)
        os.rmdir(self._folder)

    def __enter__(self) -> _Scratch:
        return self

    def __exit__(self, *args: object) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
        shutil.rmtree(self._folder, ignore_errors=True)


def _noting_module(
    pickle_module: ModuleType,
    storages: dict[str, torch.UntypedStorage],
    begin: Callable[[], None],
    end: Callable[[], None],
) -> ModuleType:
    """Returns a pickle module whose pickler notes the storages, which torch.save shows to nobody,
    and calls begin() and end() around pickling, when torch has opened the file."""

    class Pickler(pickle_module.Pickler):  # type: ignore[misc, name-defined]
        def __init_subclass__(cls) -> None:
            torch_id = cls.persistent_id

            def noting(self: Any, value: Any) -> Any:
                if type(value) in _PLAIN:
                    return None
                saved = torch_id(self, value)
                if saved is not None:
                    typed = isinstance(value, torch.storage.TypedStorage)
                    storages[saved[2]] = value._untyped_storage if typed else value
                return saved

            cls.persistent_id = noting

        def dump(self, value: object) -> None:
            begin()
            super().dump(value)
            end()

    module = ModuleType(pickle_module.__name__)
    module.__dict__.update(vars(pickle_module))
    module.Pickler = Pickler  # type: ignore[attr-defined]
    return module


def _unknown_layout() -> Exception:
    return NotImplementedError(
        f"torch {torch.__version__} lays files out in a way that tensorferry does not know: use "
        "torch.save, and tell us"
    )
