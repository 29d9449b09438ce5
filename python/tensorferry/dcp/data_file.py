"""Writes the items of a checkpoint into a data file, one behind the other.

Checksums are computed as the bytes pass. Tensors are taken as late as possible, so that those on
other devices do not all need memory of the CPU at once.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from .._core import File, PieceChecksums
from .._saving.windows import WINDOWS, Part, UnderWay, as_bytes, cut
from .._shared_handle import shared_handle
from .folder import remove, sync
from .piece_checksums import PIECE_BYTES
from .tensor_frame import TensorFrame

FRAME_BYTES = 6 << 10  # around a tensor, at most; more if it has over 100 MiB


class LateTensor(NamedTuple):
    """A tensor whose bytes come when they are written.

    `memory` has its length, and slices of it, which are asked for from front to back, are tensors
    of bytes.
    """

    dtype: torch.dtype
    shape: Sequence[int]
    memory: Any


# An item as its planner has it: the bytes of an object, or a tensor.
Item = Callable[[], "io.BytesIO | torch.Tensor | LateTensor"]


class Extent(NamedTuple):
    """Where an item is in its file."""

    offset: int
    length: int
    frame: TensorFrame | None  # of a tensor that is nothing but its elements


def write_items(
    path: str, items: Iterable[Item], about_bytes: int, passed: Callable[[int], object]
) -> list[Extent]:
    """Makes the file, which must not exist, and returns when it is on the drive.

    The folder has to be synced after that. The file will have about that many bytes. `passed` is
    called with how many bytes of tensors have been written since its last call. If anything fails,
    the file is removed.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with File.borrow(descriptor) as file:
            # A file that grows while it is written makes each window wait for those before it.
            file.resize(about_bytes)
            extents = _Stream(items).write(file, passed)
            file.resize(extents[-1].offset + extents[-1].length)
        sync(descriptor, path)
        return extents
    except BaseException:
        remove(path)
        raise
    finally:
        os.close(descriptor)


class _Stream:
    def __init__(self, items: Iterable[Item]) -> None:
        self._items = items
        self._frames: list[TensorFrame] = []
        self._extents: list[Extent] = []
        self._crcs: PieceChecksums | None = None  # of the tensor that passes

    def write(self, file: File, passed: Callable[[int], object]) -> list[Extent]:
        handle = shared_handle()
        with UnderWay[int]() as under_way:
            for window in cut(self._parts()):
                if len(under_way) == WINDOWS:
                    passed(under_way.finish_oldest())
                count = 0
                for piece in window:
                    if piece.storage is not None:
                        count += len(piece.memory)
                        self._check(piece.memory, piece.last, self._frames[piece.storage])
                writes = [(piece.memory, file, piece.offset) for piece in window]
                under_way.add(handle.write_many(writes), count)
            while under_way:
                passed(under_way.finish_oldest())
        return self._extents

    def _check(self, memory: torch.Tensor, last: bool, frame: TensorFrame) -> None:
        if self._crcs is None:
            self._crcs = PieceChecksums(PIECE_BYTES)
        self._crcs.add(memory)
        if last:
            self._crcs.end()
            frame.set_crc(self._crcs.whole, self._crcs.pieces)
            self._crcs = None

    def _parts(self) -> Iterator[Part]:
        at = 0
        for item in self._items:
            begin, data = at, item()
            frame = None
            if isinstance(data, LateTensor) or (isinstance(data, torch.Tensor) and _plain(data)):
                frame = TensorFrame(data.dtype, data.shape, begin)
            for part in self._parts_of(data, begin, frame):
                at = part.offset + len(part.memory)
                yield part
            self._extents.append(Extent(begin, at - begin, frame))

    def _parts_of(
        self,
        data: io.BytesIO | torch.Tensor | LateTensor,
        at: int,
        frame: TensorFrame | None,
    ) -> Iterator[Part]:
        if isinstance(data, torch.Tensor) and frame is None:
            saved = io.BytesIO()
            torch.save(data.cpu(), saved)
            data = saved
        if isinstance(data, io.BytesIO):
            yield Part(at, memoryview(data.getvalue()), None)
            return
        assert frame is not None
        yield Part(at, memoryview(frame.head), None)
        if frame.tensor_bytes:
            number = len(self._frames)
            self._frames.append(frame)
            memory = data.memory if isinstance(data, LateTensor) else bytes_of(data)
            yield Part(at + len(frame.head), memory, number)
        yield Part(at + len(frame.head) + frame.tensor_bytes, memoryview(frame.tail), None)


def _plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but its elements."""
    ordinary = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return ordinary and tensor.layout is torch.strided and not tensor.is_quantized


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of the elements, one behind the other, in memory of the CPU."""
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    begin = tensor.storage_offset() * tensor.itemsize
    return as_bytes(tensor.untyped_storage())[begin : begin + tensor.nbytes]
