"""Where the storages of a torch file are, by the directory of the archive alone.

The local headers, which say it too, lie all over the file: they are read and compared with the
storages.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import sys
from typing import NamedTuple

from .._core import crc32
from .zip_archive import (
    LOCAL_HEADER_BYTES,
    BadArchive,
    Record,
    local_data_offset,
    read_bytes,
    read_directory,
)

_PIECE_BYTES = 16 << 20


class NotOurs(Exception):
    """A file that torch has to load; the text says why."""


class Place(NamedTuple):
    """A storage in the file."""

    name: str  # of its record
    header_offset: int
    offset: int
    size: int
    crc: int

    def header(self) -> bytes:
        """The local header, as far as readers look at it."""
        extra = self.offset - self.header_offset - LOCAL_HEADER_BYTES
        return struct.pack("<4s22xHH", b"PK\3\4", 0, extra)


class TorchLayout:
    """The records of a torch file. Raises NotOurs, or OSError (EBADMSG) for a damaged file."""

    def __init__(self, descriptor: int, path: str) -> None:
        self._descriptor = descriptor
        self._path = path
        facts = os.fstat(descriptor)
        if stat.S_ISDIR(facts.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        self.bytes = facts.st_size
        if self.read(0, 4) != b"PK\3\4":
            raise NotOurs("it is not a zip archive, but torch's older format or another one")
        try:
            records = read_directory(self.read, self.bytes)
        except BadArchive as problem:
            raise damaged(path, str(problem), problem.offset) from None
        if not records:
            raise damaged(path, "the archive is empty", 0)
        self._folder = records[0].name.split("/")[0] + "/"
        self._records = sorted(records, key=lambda record: record.header_offset)
        self._by_name = {record.name: record for record in records}
        if self._folder + "constants.pkl" in self._by_name:
            raise NotOurs("it is a TorchScript archive")
        if len(self._by_name) != len(records) or self._folder + "data.pkl" not in self._by_name:
            raise NotOurs("torch.save has not written it")
        self._check_byte_order()
        self.has_crcs = any(record.crc for record in records)
        places = self._find_places()
        self.known = places is not None  # torch.save has laid the file out
        self.places: list[Place] = places or []

    def read(self, offset: int, count: int) -> bytes:
        """Returns bytes of the file: fewer at its end."""
        return read_bytes(self._descriptor, offset, count)

    def data(self, name: str) -> bytes:
        """Returns the bytes of a small record, "data.pkl", if they match their checksum."""
        record = self._by_name[self._folder + name]
        if not record.stored:
            raise NotOurs(f"its record {name} is compressed")
        offset = self._data_offset(record)
        data = self.read(offset, record.size)
        if self.has_crcs and crc32(data) != record.crc:
            raise wrong_checksum(self._path, record.name, offset, record.size)
        return data

    def check_records(self) -> None:
        """Compares the checksums of all records but those in `places`."""
        elsewhere = {place.name for place in self.places}
        for record in self._records:
            if record.name in elsewhere or not record.stored:
                continue
            offset, crc = self._data_offset(record), 0
            for at in range(offset, offset + record.size, _PIECE_BYTES):
                crc = crc32(self.read(at, min(_PIECE_BYTES, offset + record.size - at)), crc)
            if crc != record.crc:
                raise wrong_checksum(self._path, record.name, offset, record.size)

    def _is_storage(self, record: Record) -> bool:
        return record.name.startswith(self._folder + "data/")

    def _data_offset(self, record: Record) -> int:
        offset = local_data_offset(record, self.read(record.header_offset, LOCAL_HEADER_BYTES))
        if offset is None or offset + record.size > self.bytes:
            raise damaged(
                self._path, f"the header of {record.name} is damaged", record.header_offset
            )
        return offset

    def _check_byte_order(self) -> None:
        record = self._by_name.get(self._folder + "byteorder")
        if record is None:
            import torch

            other = torch.serialization.LoadEndianness.BIG
            if torch.serialization.get_default_load_endianness() == other:
                raise NotOurs("its numbers are in big-endian order")
        elif record.size > 16:
            raise damaged(self._path, "the byte order is damaged", record.header_offset)
        else:
            order = self.read(self._data_offset(record), record.size)
            if order in (b"little", b"big") and order.decode() != sys.byteorder:
                raise NotOurs(f"its numbers are in {order.decode()}-endian order")

    def _find_places(self) -> list[Place] | None:
        """Returns the storages that have bytes, in the order of the file; None if another program
        has laid the file out.

        Between the data and the next record is what torch writes there. Whether that is so, the
        first local header tells at once, and the others when they have been read.
        """
        places: list[Place] = []
        for record, following in zip(self._records, self._records[1:] + [None]):
            if not self._is_storage(record) or not record.size:
                continue
            if following is None or not record.stored:
                return None
            offset = following.header_offset - record.descriptor_bytes - record.size
            extra = offset - record.header_offset - LOCAL_HEADER_BYTES
            if not 0 <= extra <= 0xFFFF or (not places and self._data_offset(record) != offset):
                return None
            place = Place(record.name, record.header_offset, offset, record.size, record.crc)
            places.append(place)
        return places


def check_header(path: str, place: Place, header: bytes | memoryview) -> None:
    """Compares the local header in the file with what the directory led to."""
    if header[:4] == b"PK\3\4":
        name_bytes, extra_bytes = struct.unpack_from("<HH", header, 26)
        if place.header_offset + LOCAL_HEADER_BYTES + name_bytes + extra_bytes == place.offset:
            return
    raise damaged(path, f"the header of {place.name} is damaged", place.header_offset)


def damaged(path: str, what: str, offset: int, length: int | None = None) -> OSError:
    """The error for a file that is not as it was written."""
    hint = f"{what}; load another copy of the file"
    where = f"offset {offset}" + (f", length {length}" if length is not None else "")
    error = OSError(
        errno.EBADMSG, f"load: {os.strerror(errno.EBADMSG)}, {where}: {hint}", os.fspath(path)
    )
    error.operation = "load"  # type: ignore[attr-defined]
    error.offset = offset  # type: ignore[attr-defined]
    error.length = length  # type: ignore[attr-defined]
    error.hint = hint  # type: ignore[attr-defined]
    return error


def wrong_checksum(path: str, name: str, offset: int, length: int) -> OSError:
    return damaged(path, f"the bytes of {name} do not match their checksum", offset, length)
