"""Opens the items of a checkpoint: objects as their bytes, tensors as where their bytes are."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from .._core import File, crc32
from .._saving.windows import UnderWay
from .._shared_handle import shared_handle
from ..checkpoint.torch_layout import damaged, wrong_checksum
from ..checkpoint.zip_archive import (
    LOCAL_HEADER_BYTES,
    BadArchive,
    local_data_offset,
    read_directory,
)
from .stored_tensor import StoredTensor, find_tensor, piece_checksums

# An item up to this long is read at once, and a longer one if most of it is wanted. Of all others
# the ends are read first, which say where their bytes are.
_SHORT_BYTES = 64 << 10
_LONG_BYTES = 512 << 10
_FRONT_BYTES = 4096
_BACK_BYTES = 1024
# So many items, and bytes, are read at a time to open them.
_BATCH_ITEMS = 256
_BATCH_BYTES = 16 << 20


class Item:
    """A request of a plan, which wants so many bytes of a tensor; and what has been read of it.

    `tensor` is where the tensor is in the item, if that is known; then nothing is read to open it.
    """

    def __init__(
        self,
        request: ReadItem,
        wanted_bytes: int,
        place: _StorageInfo,
        folder: str,
        tensor: StoredTensor | None,
    ) -> None:
        self.request = request
        self.wanted_bytes = wanted_bytes
        self.checked_by: str | None = None  # the safetensors file or index that has its checksum
        self.path = os.path.join(folder, place.relative_path)
        self.offset: int = place.offset
        self.bytes = int(place.length)
        most = wanted_bytes > 0.9 * self.bytes and self.bytes <= _LONG_BYTES
        at_once = most or request.type == LoadItemType.BYTE_IO or self.bytes <= _SHORT_BYTES
        self._known = tensor
        self._front_bytes = 0 if tensor else self.bytes if at_once else _FRONT_BYTES
        self._back_bytes = 0 if tensor else min(_BACK_BYTES, self.bytes - self._front_bytes)
        if place.transform_descriptors:
            raise NotImplementedError(
                f"{self.name} was saved with the extensions {place.transform_descriptors}: load "
                "this checkpoint with torch's FileSystemReader"
            )

    @property
    def name(self) -> str:
        return str(self.request.storage_index.fqn)

    @property
    def opening_bytes(self) -> int:
        """How much has to be read to open it."""
        return self._front_bytes + self._back_bytes

    def transfers(self, file: File) -> Iterator[tuple[bytearray, File, int]]:
        """What to read first."""
        self.file = file
        if self.offset + self.bytes > file.size:
            raise damaged(self.path, f"the file ends before {self.name} does", file.size)
        self._front = bytearray(self._front_bytes)
        self._back = bytearray(self._back_bytes)
        if self._front:
            yield self._front, file, self.offset
        if self._back:
            yield self._back, file, self.offset + self.bytes - len(self._back)

    @property
    def in_memory(self) -> bytearray | None:
        """All of its bytes, if they have been read to open it."""
        return self._front if self._front_bytes == self.bytes else None

    def read(self, offset: int, count: int) -> bytes:
        """Returns bytes of the item, as many as there are."""
        end = min(offset + count, self.bytes)
        back = self.bytes - len(self._back)
        if offset < 0 or end <= offset:
            return b""
        if end <= len(self._front):
            return bytes(self._front[offset:end])
        if offset >= back:
            return bytes(self._back[offset - back : end - back])
        data = bytearray(end - offset)
        shared_handle().read_now(data, self.file, self.offset + offset)
        return bytes(data)

    def forget(self) -> None:
        """Lets go of what was read."""
        del self._front, self._back

    def tensor(self, verify: bool) -> StoredTensor | None:
        """Returns where the tensor is; None if torch has to load it."""
        if self._known is not None:
            return self._known
        try:
            return find_tensor(self.read, self.bytes, verify)
        except BadArchive as problem:
            raise self.damaged(str(problem), problem.offset) from None

    def piece_checksums(self, stored: StoredTensor) -> tuple[int, ...] | None:
        """Returns the checksums of the pieces of the tensor; None if it has none."""
        try:
            return piece_checksums(stored, self.read)
        except BadArchive as problem:
            raise self.damaged(str(problem), problem.offset) from None

    def data(self, verify: bool) -> io.BytesIO:
        """Returns all bytes. With `verify`, they have their checksums if they are an archive."""
        data = self.read(0, self.bytes)
        if verify and data[:4] == b"PK\3\4":
            self._check_archive(data)
        return io.BytesIO(data)

    def check_size(self, stored: Sequence[int]) -> None:
        """A request asks for elements that the item has."""
        request = self.request
        ends = [at + count for at, count in zip(request.storage_offsets, request.lengths)]
        if len(ends) != len(stored) or any(end > size for end, size in zip(ends, stored)):
            raise self.damaged(f"{self.name} is smaller than the metadata say", 0)

    def _check_archive(self, data: bytes) -> None:
        try:
            records = read_directory(lambda at, count: data[at : at + count], len(data))
        except BadArchive as problem:
            raise self.damaged(str(problem), problem.offset) from None
        if not any(record.crc for record in records):
            return
        for record in records:
            header = data[record.header_offset : record.header_offset + LOCAL_HEADER_BYTES]
            at = local_data_offset(record, header)
            if at is None or (record.stored and crc32(data[at : at + record.size]) != record.crc):
                what = f"{record.name} of {self.name}"
                raise wrong_checksum(self.path, what, self.offset + (at or 0), record.size)

    def damaged(self, what: str, offset: int) -> OSError:
        """The error for an item that is not as it was written; `offset` counts from its start."""
        return damaged(self.path, f"{self.name}: {what}", self.offset + offset, self.bytes)


def opened(items: list[Item]) -> Iterator[Item]:
    """Opens items in the order of the files. Reads what that takes for many at a time, ahead."""
    items.sort(key=lambda item: (item.path, item.offset))
    with UnderWay[list[Item]]() as under_way:
        for batch, transfers in _batches(items):
            if not transfers:  # they need no opening
                yield from batch
                continue
            under_way.add(shared_handle().read_many(transfers), batch)
            if len(under_way) == 2:
                yield from _in_turn(under_way.finish_oldest())
        while under_way:
            yield from _in_turn(under_way.finish_oldest())


def _in_turn(batch: list[Item]) -> Iterator[Item]:
    for item in batch:
        yield item
        item.forget()


def _batches(items: list[Item]) -> Iterator[tuple[list[Item], list[tuple[bytearray, File, int]]]]:
    batch: list[Item] = []
    transfers: list[tuple[bytearray, File, int]] = []
    count = 0
    file = None  # each closes when the last of its items has gone
    for item in items:
        if file is None or item.path != file.path:
            file = File(item.path)
        batch.append(item)
        transfers += item.transfers(file)
        count += item.opening_bytes
        if len(batch) == _BATCH_ITEMS or count >= _BATCH_BYTES:
            yield batch, transfers
            batch, transfers, count = [], [], 0
    if batch:
        yield batch, transfers
