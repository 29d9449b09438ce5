"""Reads tensors of data files into the tensors of a program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from .._core import File, crc32
from ..checkpoint._handle import shared_handle
from ..checkpoint.torch_layout import wrong_checksum
from ..checkpoint.windows import WINDOWS, UnderWay, as_bytes
from .boxes import Box
from .pieces import Piece, windows


class TensorRead:
    """Fills a tensor with a box, which is not empty, of a stored one.

    `name` is that of the tensor, for errors; `filled` is called when the tensor has its bytes.
    """

    def __init__(
        self,
        box: Box,
        target: torch.Tensor,
        source: tuple[File, int],  # where the item begins
        name: str,
        verify: bool,
        filled: Callable[[], object],
    ) -> None:
        self._file = source[0]
        self._offset = source[1] + box.stored.offset  # of the storage, in the file
        self._box = box
        self._target = target
        self._name = name
        self._filled = filled
        # If only some of its bytes are read, they have no checksum.
        self._verify = verify and box.whole and box.stored.crc is not None
        self._crc = 0
        self._own: torch.Tensor | None = None  # if the bytes do not go straight into the target
        self._bytes_left = 0

    def pieces(self) -> Iterator[Piece]:
        """What to read, in the order of the file. Makes memory when it is asked."""
        # A checksum needs the bytes in the order of the file.
        in_place = self._same_elements() and (self._box.in_file_order or not self._verify)
        runs = self._box.runs(self._target.stride()) if in_place else None
        if runs is None:
            self._bytes_left = self._box.span()
            self._own = torch.empty(self._bytes_left, dtype=torch.uint8)
            yield Piece(self._file, self._offset + self._box.first(), self._own, self)
            return
        self._bytes_left = self._box.bytes
        memory = as_bytes(self._target.untyped_storage())
        begin = self._target.storage_offset() * self._target.itemsize
        for source, target, count in runs:
            part = memory[begin + target : begin + target + count]
            yield Piece(self._file, self._offset + source, part, self)

    def fill_from(self, item: bytearray) -> None:
        """Takes the bytes from an item that is in memory, instead of reading them."""
        begin = self._box.stored.offset + self._box.first()
        self._bytes_left = self._box.span()
        self._own = torch.frombuffer(item, dtype=torch.uint8, offset=begin, count=self._bytes_left)
        self.passed(self._own)

    def passed(self, memory: torch.Tensor) -> None:
        """Takes note of bytes that have been read, in the order of the file."""
        if self._verify:
            self._crc = crc32(memory.cpu(), self._crc)
        self._bytes_left -= len(memory)
        if not self._bytes_left:
            self._finish()

    def _finish(self) -> None:
        stored = self._box.stored
        if self._verify and self._crc != stored.crc:
            what = f"{stored.record} of {self._name}"
            raise wrong_checksum(self._file.path, what, self._offset, stored.bytes)
        if self._own is not None:
            elements = self._own.view(stored.dtype)
            self._target.copy_(elements.as_strided(self._box.lengths, stored.stride))
            self._own = None
        self._filled()

    def _same_elements(self) -> bool:
        target = self._target
        return (
            type(target) in (torch.Tensor, torch.nn.Parameter)
            and target.layout is torch.strided
            and target.dtype == self._box.stored.dtype
            and target.device.type in ("cpu", "cuda")
            and not target.is_conj()
            and not target.is_neg()
        )


def carry_out(reads: Iterable[TensorRead], passed: Callable[[int], object]) -> None:
    """Carries out reads, which come in the order of their files.

    Calls `passed` with how many bytes have been read since its last call.
    """
    handle = shared_handle()
    with UnderWay[list[Piece]]() as under_way:

        def finish_oldest() -> None:
            pieces = under_way.finish_oldest()
            for piece in pieces:
                piece.owner.passed(piece.memory)
            passed(sum(len(piece.memory) for piece in pieces))

        for window in windows(piece for read in reads for piece in read.pieces()):
            if len(under_way) == WINDOWS:
                finish_oldest()
            transfers = [(piece.memory, piece.file, piece.offset) for piece in window]
            under_way.add(handle.read_many(transfers), window)
        while under_way:
            finish_oldest()
