"""Reads the storages of a torch file, in the order of the file, ahead of those who want them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .._core import File, PinnedBuffer, crc32
from .._progress import ProgressReport
from .._saving.windows import Part, Piece, UnderWay, as_bytes, cut
from .._shared_handle import shared_handle
from ..safetensors.arena import Arena
from .torch_layout import Place, check_header, wrong_checksum

# Few, because an operation has a beginning and an end; small, because nothing is read while the
# last one is checked.
WINDOW_BYTES = 32 << 20
# So many are under way at a time: the drive has work while a checksum is computed.
WINDOWS = 4
# Files with fewer bytes of storages are not worth an arena.
_ARENA_BYTES = 1 << 20
# Bytes of a GPU come to the CPU in pieces of this for their checksum.
_HOST_BYTES = 16 << 20
# A gap up to this between two storages is read too, so that both are in one request.
_GAP_BYTES = 64


class StorageStream:
    """The storages of a file. Leaving `with` ends the reads that are under way."""

    def __init__(
        self, file: File, path: str, places: list[Place], verify: bool, report: ProgressReport
    ) -> None:
        self._file = file
        self._path = path
        self._places = places
        self._verify = verify
        self._report = report
        self._device = torch.device("cpu")
        self._arena: Arena | None = None
        self._windows: Iterator[list[Piece]] = cut(self._parts(), WINDOW_BYTES)
        self._under_way = UnderWay[list[Piece]]()
        self._headers: dict[int, memoryview] = {}
        self._coming: dict[int, torch.UntypedStorage] = {}
        self._arrived: dict[int, torch.UntypedStorage] = {}
        self._crc = 0
        self._host: torch.Tensor | None = None
        self._done = 0

    def __enter__(self) -> StorageStream:
        return self

    def __exit__(self, *args: object) -> None:
        self._under_way.__exit__(*args)
        self._windows = iter(())  # it refers to this object

    def get(self, number: int, device: torch.device) -> torch.UntypedStorage:
        """Returns a storage with its bytes. It may be on another device than this, if it was read
        ahead: what is read ahead goes where the last one was wanted."""
        self._device = device
        while number not in self._arrived:
            while len(self._under_way) < WINDOWS:
                window = next(self._windows, None)
                if window is None:
                    break
                reads = [(piece.memory, self._file, piece.offset) for piece in window]
                self._under_way.add(shared_handle().read_many(reads), window)
            for piece in self._under_way.finish_oldest():
                if piece.storage is not None:
                    self._pass(piece, piece.storage)
            self._report.update(self._done)
        return self._arrived[number]

    def forget(self, number: int) -> None:
        """Lets go of a storage that nobody will want again."""
        del self._arrived[number]

    def _parts(self) -> Iterator[Part]:
        end = -1
        for number, place in enumerate(self._places):
            near = 0 <= place.header_offset - end <= _GAP_BYTES
            begin = end if near else place.header_offset
            end = place.offset + place.size
            header, memory, storage = self._memory(begin, place)
            self._headers[number] = header
            self._coming[number] = storage
            yield Part(begin, header, None)
            yield Part(place.offset, memory, number)

    def _arena_for_all(self) -> Arena | None:
        """Returns memory for all storages, if they go to the CPU and they are not few."""
        first, last = self._places[0], self._places[-1]
        span = last.offset + last.size - first.header_offset
        if self._device.type != "cpu" or span < _ARENA_BYTES:
            return None
        if self._arena is None:
            self._arena = Arena(first.header_offset, span)
        return self._arena

    def _memory(self, begin: int, place: Place) -> tuple[memoryview, Any, torch.UntypedStorage]:
        """Returns memory for the bytes before a storage and for its own, and the storage."""
        arena = self._arena_for_all()
        if arena is None:
            storage = torch.UntypedStorage(place.size, device=self._device)
            return memoryview(bytearray(place.offset - begin)), as_bytes(storage), storage
        memory = arena.lent_part(place.offset, place.size)
        storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        return arena.part(begin, place.offset - begin), memory, storage

    def _pass(self, piece: Piece, number: int) -> None:
        """Checks what has arrived of a storage."""
        place = self._places[number]
        if piece.offset == place.offset:
            header = self._headers.pop(number)
            check_header(self._path, place, header[place.header_offset - place.offset :])
        if self._verify:
            self._add_to_crc(piece.memory)
        self._done += len(piece.memory)
        if not piece.last:
            return
        if self._verify and self._crc != place.crc:
            raise wrong_checksum(self._path, place.name, place.offset, place.size)
        self._crc = 0
        self._arrived[number] = self._coming.pop(number)

    def _add_to_crc(self, memory: Any) -> None:
        if isinstance(memory, memoryview) or memory.is_cpu:
            self._crc = crc32(memory, self._crc)
            return
        if self._host is None:
            self._host = torch.frombuffer(PinnedBuffer(_HOST_BYTES), dtype=torch.uint8)
        for part in memory.split(_HOST_BYTES):
            self._crc = crc32(self._host[: len(part)].copy_(part), self._crc)
