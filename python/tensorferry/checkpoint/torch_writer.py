"""Writes files of torch.save: the bytes of torch's skeleton, with the storages in its holes.

The thread that saves computes the checksums of a window and then starts to write it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._core import File, NewFile, PinnedBuffer, crc32
from .._memory.mapped_weight import is_mapped_weight
from .._progress import Progress, ProgressReport
from .._saving.line import begin_save, save_in_background
from .._shared_handle import shared_handle
from .skeleton import Skeleton, make_skeleton

if TYPE_CHECKING:
    from .._saving.line import WhenBusy
    from .._saving.saving import Saving
from .._saving.windows import Part, Piece, UnderWay, as_bytes, cut

# Small, so that a window can stay in the cache from the checksum to the write.
WINDOW_BYTES = 16 << 20
# So many are under way at a time: the drive has work while a checksum is computed.
WINDOWS = 6


def save_torch_file(
    obj: object, path: str, pickle_module: ModuleType, pickle_protocol: int, progress: Progress
) -> None:
    """Does what torch.save does, to a new file that replaces `path` when it is on the drive."""
    with NewFile(path) as new:
        skeleton = make_skeleton(obj, path, pickle_module, pickle_protocol)
        report = ProgressReport(progress, "save", skeleton.bytes)
        new.reserve(skeleton.bytes)
        for done in write_skeleton(new.file, skeleton):
            report.update(done)
        new.commit()


def save_torch_file_in_background(
    obj: object,
    path: str,
    pickle_module: ModuleType,
    pickle_protocol: int,
    progress: Progress,
    stage_bytes: int | None,
    when_busy: WhenBusy,
) -> Saving:
    """The same, but returns when the object may be changed."""
    begin_save(stage_bytes, when_busy)
    skeleton = make_skeleton(obj, path, pickle_module, pickle_protocol)
    return save_in_background(_TorchFile(path, skeleton), progress, stage_bytes, when_busy)


class _TorchFile:
    """What a save in the background writes."""

    def __init__(self, path: str, skeleton: Skeleton) -> None:
        self.path = path
        self.nbytes = skeleton.bytes
        self._skeleton = skeleton
        self._checksums = _Checksums(skeleton)
        self._mapped = {
            number
            for number, (_, storage) in enumerate(skeleton.storages)
            if is_mapped_weight(storage)
        }

    def parts(self) -> Iterator[Part]:
        return _parts(self._skeleton, as_bytes)

    def stays(self, storage: int) -> bool:
        return storage in self._mapped

    def passed(self, memory: torch.Tensor, storage: int, last: bool) -> None:
        self._checksums.add([Piece(0, memory, storage, last)])

    def staged(self) -> None:
        self._skeleton.forget_storages()

    def end(self, file: File) -> None:
        """The last bytes of the skeleton have come last."""


class _Window(NamedTuple):
    end: int  # in the file
    host: torch.Tensor | None  # memory for what comes from other devices


def write_skeleton(
    file: File,
    skeleton: Skeleton,
    memory_of: Callable[[torch.UntypedStorage], Any] = as_bytes,
) -> Iterator[int]:
    """Writes the skeleton with its storages, and yields how many bytes are written so far.

    `memory_of` returns what has the length of a storage, and whose slices are tensors of bytes;
    they are asked for once, in the order of the file.
    """
    handle = shared_handle()
    checksums = _Checksums(skeleton)
    hosts: list[torch.Tensor] = []  # that no window uses
    with UnderWay[_Window]() as under_way:

        def finish_oldest() -> int:
            window = under_way.finish_oldest()
            if window.host is not None:
                hosts.append(window.host)
            return window.end

        for pieces in cut(_parts(skeleton, memory_of), WINDOW_BYTES):
            if len(under_way) == WINDOWS:
                yield finish_oldest()
            host = None
            if any(_elsewhere(piece, skeleton) for piece in pieces):
                host = hosts.pop() if hosts else _host_memory()
                pieces = list(_brought(pieces, skeleton, host))
            checksums.add(pieces)
            end = pieces[-1].offset + len(pieces[-1].memory)
            writes = [(piece.memory, file, piece.offset) for piece in pieces]
            under_way.add(handle.write_many(writes), _Window(end, host))
        while under_way:
            yield finish_oldest()


def _parts(skeleton: Skeleton, memory_of: Callable[[torch.UntypedStorage], Any]) -> Iterator[Part]:
    for number, (begin, gap) in enumerate(skeleton.gaps):
        yield Part(begin, memoryview(gap), None)
        if number < len(skeleton.storages):
            offset, storage = skeleton.storages[number]
            yield Part(offset, memory_of(storage), number)


class _Checksums:
    """Computes the checksums of storages as windows pass, and puts them into the skeleton."""

    def __init__(self, skeleton: Skeleton) -> None:
        self._skeleton = skeleton
        self._value = 0

    def add(self, pieces: list[Piece]) -> None:
        if not self._skeleton.has_crcs:
            return
        for piece in pieces:
            if piece.storage is None:
                continue
            self._value = crc32(piece.memory, self._value)
            if piece.last:
                self._skeleton.set_crc(piece.storage, self._value)
                self._value = 0
                if piece.storage == len(self._skeleton.storages) - 1:
                    self._skeleton.set_id(crc32)


def _elsewhere(piece: Piece, skeleton: Skeleton) -> bool:
    """Whether the CPU has to have the bytes and does not: a drive reaches CUDA's memory itself."""
    if piece.storage is None or piece.memory.is_cpu:
        return False
    return skeleton.has_crcs or not piece.memory.is_cuda


def _host_memory() -> torch.Tensor:
    return torch.frombuffer(PinnedBuffer(WINDOW_BYTES), dtype=torch.uint8)


def _brought(pieces: list[Piece], skeleton: Skeleton, host: torch.Tensor) -> Iterator[Piece]:
    """Brings the bytes that other devices have into memory of the CPU."""
    at = 0
    for piece in pieces:
        if _elsewhere(piece, skeleton):
            memory = host[at : at + len(piece.memory)]
            memory.copy_(piece.memory)
            at += len(memory)
            piece = piece._replace(memory=memory)
        yield piece
