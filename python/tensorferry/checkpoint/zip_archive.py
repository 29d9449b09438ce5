"""The directory of a zip archive: which records it has, and where. Knows nothing of torch."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

LOCAL_HEADER_BYTES = 30
_END_BYTES, _LOCATOR_BYTES, _ENTRY_BYTES = 22, 20, 46
_MAX_16, _MAX_32 = 0xFFFF, 0xFFFFFFFF

# read(offset, bytes) of the archive.
Read = Callable[[int, int], bytes]


class BadArchive(ValueError):
    """It is not a zip archive, or its directory is damaged."""

    def __init__(self, text: str, offset: int) -> None:
        super().__init__(text)
        self.offset = offset


class Record(NamedTuple):
    name: str
    header_offset: int  # of the local header; the data follow it
    size: int
    crc: int
    stored: bool  # not compressed, not encrypted
    has_descriptor: bool  # the checksum follows the data
    entry_offset: int  # of its entry in the directory

    @property
    def descriptor_bytes(self) -> int:
        """The bytes that torch writes behind the data; they hold the checksum."""
        if not self.has_descriptor or not self.size:
            return 0
        return 24 if max(self.header_offset, self.size) >= _MAX_32 else 16


def read_bytes(descriptor: int, offset: int, count: int) -> bytes:
    """Returns bytes of a file: fewer at its end."""
    parts = []
    while count > 0 and (part := os.pread(descriptor, min(count, 1 << 30), offset)):
        parts.append(part)
        offset, count = offset + len(part), count - len(part)
    return b"".join(parts)


def read_directory(read: Read, file_bytes: int) -> list[Record]:
    """Returns the records in the order of the directory. Raises BadArchive."""
    begin, size, count = _find_directory(read, file_bytes)
    directory = read(begin, size)
    if len(directory) != size:
        raise BadArchive("the directory of the archive is cut off", begin)
    records = list(_entries(directory, begin))
    if len(records) != count:
        raise BadArchive(f"the archive has {len(records)} records and says {count}", begin)
    for record in records:
        size = record.size if record.stored else 0
        if record.header_offset + LOCAL_HEADER_BYTES + size > begin:
            raise BadArchive(f"record {record.name} does not fit", record.entry_offset)
    return records


def local_data_offset(record: Record, header: bytes) -> int | None:
    """Returns where the data of the record begin, by its local header; None if that is damaged."""
    if len(header) < LOCAL_HEADER_BYTES or header[:4] != b"PK\3\4":
        return None
    name_bytes, extra_bytes = struct.unpack_from("<HH", header, 26)
    return int(record.header_offset + LOCAL_HEADER_BYTES + name_bytes + extra_bytes)


def _find_directory(read: Read, file_bytes: int) -> tuple[int, int, int]:
    """Returns offset, bytes and records of the directory."""
    for comment_bytes in (0, _MAX_16):  # few archives have a comment
        tail_bytes = min(file_bytes, _END_BYTES + comment_bytes + _LOCATOR_BYTES)
        tail_begin = file_bytes - tail_bytes
        tail = read(tail_begin, tail_bytes)
        at = tail.rfind(b"PK\5\6")
        if at >= 0 and at + _END_BYTES <= len(tail):
            break
    else:
        raise BadArchive(
            "the file does not end as a zip archive does: it is cut off or another file", file_bytes
        )
    count, size, begin = struct.unpack_from("<10xHII", tail, at)
    locator = at - _LOCATOR_BYTES
    if locator >= 0 and tail[locator : locator + 4] == b"PK\6\7":
        (end_offset,) = struct.unpack_from("<8xQ", tail, locator)
        end = read(end_offset, 56) if end_offset + 56 <= file_bytes else b""
        if len(end) != 56 or end[:4] != b"PK\6\6":
            raise BadArchive("the end of the archive is damaged", tail_begin + locator)
        count, size, begin = struct.unpack_from("<32xQQQ", end)
    if begin + size > tail_begin + at:
        raise BadArchive("the end of the archive is damaged", tail_begin + at)
    return begin, size, count


def _entries(directory: bytes, begin: int) -> Iterator[Record]:
    at = 0
    while at < len(directory):
        if len(directory) - at < _ENTRY_BYTES or directory[at : at + 4] != b"PK\1\2":
            raise BadArchive("the directory of the archive is damaged", begin + at)
        flags, method = struct.unpack_from("<8xHH", directory, at)
        crc, packed, size, name_bytes, extra_bytes, comment_bytes = struct.unpack_from(
            "<16xIIIHHH", directory, at
        )
        (header_offset,) = struct.unpack_from("<42xI", directory, at)
        name_end = at + _ENTRY_BYTES + name_bytes
        extra = directory[name_end : name_end + extra_bytes]
        size, packed, header_offset = _wide(extra, size, packed, header_offset)
        yield Record(
            name=directory[at + _ENTRY_BYTES : name_end].decode("utf-8", "replace"),
            header_offset=header_offset,
            size=size,
            crc=crc,
            stored=method == 0 and not flags & 1 and packed == size,
            has_descriptor=bool(flags & 8),
            entry_offset=begin + at,
        )
        at = name_end + extra_bytes + comment_bytes
    if at != len(directory):
        raise BadArchive("the directory of the archive is cut off", begin + at)


def _wide(extra: bytes, *values: int) -> Iterator[int]:
    """The values of an entry. Those that do not fit into 32 bits are in its extra field."""
    at, wide = 0, b""
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            wide = extra[at + 4 : at + 4 + length]
        at += 4 + length
    at = 0
    for value in values:
        if value == _MAX_32 and at + 8 <= len(wide):
            (value,) = struct.unpack_from("<Q", wide, at)
            at += 8
        yield value
