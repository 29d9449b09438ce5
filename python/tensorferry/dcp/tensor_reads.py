"""Reads tensors of data files into the tensors of a program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from .._core import File, PieceChecksums, crc32
from .._saving.windows import WINDOWS, UnderWay, as_bytes
from .._shared_handle import shared_handle
from ..checkpoint.torch_layout import wrong_checksum
from .boxes import Box
from .file_parts import FilePart, windows
from .piece_checksums import PIECE_BYTES

# A smaller part of a tensor would cost too much beside it.
PIECES_FROM_BYTES = 1 << 20


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
        self._verify = verify and box.stored.crc is not None
        self._whole = self._verify and box.whole  # compares the checksum of all bytes
        self._crc = 0
        self._pieces: tuple[int, ...] = ()  # the expected checksums of all pieces
        self._first_piece = 0
        self._crcs = PieceChecksums(PIECE_BYTES)
        self._own: torch.Tensor | None = None  # if the bytes do not go straight into the target
        self._edges: list[tuple[torch.Tensor, torch.Tensor]] = []  # (from, to)
        self._bytes_left = 0

    @property
    def wants_pieces(self) -> bool:
        """Whether checksums of pieces can be compared: some bytes, in a row, of a large tensor."""
        box = self._box
        if self._whole or not self._verify or box.stored.pieces is None:
            return False
        in_a_row = box.one_run and self._in_place() and self._target.is_contiguous()
        return box.bytes >= PIECES_FROM_BYTES and in_a_row

    def verify_pieces(self, checksums: tuple[int, ...]) -> None:
        """Reads whole pieces, and compares them with these checksums of all pieces."""
        self._first_piece = self._box.first() // PIECE_BYTES
        self._pieces = checksums

    def parts(self) -> Iterator[FilePart]:
        """What to read, in the order of the file. Makes memory when it is asked."""
        if self._pieces:
            yield from self._whole_pieces()
            return
        # A checksum needs the bytes in the order of the file.
        in_order = self._box.in_file_order or not self._whole
        runs = self._box.runs(self._target.stride()) if self._in_place() and in_order else None
        if runs is None:
            self._bytes_left = self._box.span()
            self._own = torch.empty(self._bytes_left, dtype=torch.uint8)
            yield FilePart(self._file, self._offset + self._box.first(), self._own, self)
            return
        self._bytes_left = self._box.bytes
        memory, begin = self._target_bytes()
        for source, target, count in runs:
            part = memory[begin + target : begin + target + count]
            yield FilePart(self._file, self._offset + source, part, self)

    def _whole_pieces(self) -> Iterator[FilePart]:
        """The box and, in memory of its own, the rest of its first and its last piece."""
        first, end = self._box.first(), self._box.first() + self._box.bytes
        begin = first - first % PIECE_BYTES
        stop = min(-(-end // PIECE_BYTES) * PIECE_BYTES, self._box.stored.bytes)
        self._bytes_left = stop - begin
        memory, at = self._target_bytes()
        target = memory[at : at + self._box.bytes]
        inner, outer = first, end
        if begin < first:
            inner = begin + PIECE_BYTES
            edge = torch.empty(PIECE_BYTES, dtype=torch.uint8)
            self._edges.append((edge[first - begin :], target[: inner - first]))
            yield FilePart(self._file, self._offset + begin, edge, self)
        if end < stop:
            outer = end - end % PIECE_BYTES
        if inner < outer:
            part = target[inner - first : outer - first]
            yield FilePart(self._file, self._offset + inner, part, self)
        if end < stop:
            edge = torch.empty(stop - outer, dtype=torch.uint8)
            self._edges.append((edge[: end - outer], target[outer - first :]))
            yield FilePart(self._file, self._offset + outer, edge, self)

    def _target_bytes(self) -> tuple[torch.Tensor, int]:
        """All bytes of the storage of the target, and where the target begins in them."""
        storage = as_bytes(self._target.untyped_storage())
        return storage, self._target.storage_offset() * self._target.itemsize

    def fill_from(self, item: bytearray) -> None:
        """Takes the bytes from an item that is in memory, instead of reading them."""
        begin = self._box.stored.offset + self._box.first()
        self._bytes_left = self._box.span()
        self._own = torch.frombuffer(item, dtype=torch.uint8, offset=begin, count=self._bytes_left)
        self.passed(self._own)

    def passed(self, memory: torch.Tensor) -> None:
        """Takes note of bytes that have been read, in the order of the file."""
        if self._whole:
            self._crc = crc32(memory.cpu(), self._crc)
        elif self._pieces:
            self._crcs.add(memory.cpu())
        self._bytes_left -= len(memory)
        if not self._bytes_left:
            self._finish()

    def _finish(self) -> None:
        self._compare()
        stored = self._box.stored
        if self._own is not None:
            elements = self._own.view(stored.dtype)
            self._target.copy_(elements.as_strided(self._box.lengths, stored.stride))
            self._own = None
        for edge, target in self._edges:
            target.copy_(edge)
        self._edges.clear()
        self._filled()

    def _compare(self) -> None:
        stored = self._box.stored
        what = f"{stored.record} of {self._name}"
        if self._whole and self._crc != stored.crc:
            raise wrong_checksum(self._file.path, what, self._offset, stored.bytes)
        self._crcs.end()  # the last piece of a tensor may be shorter than the others
        for number, crc in enumerate(self._crcs.pieces, self._first_piece):
            if crc != self._pieces[number]:
                offset = self._offset + number * PIECE_BYTES
                raise wrong_checksum(self._file.path, what, offset, PIECE_BYTES)

    def _in_place(self) -> bool:
        return in_place(self._target, self._box.stored.dtype)


def in_place(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether bytes of such elements can be read straight into the memory of a tensor."""
    return (
        type(target) in (torch.Tensor, torch.nn.Parameter)
        and target.layout is torch.strided
        and target.dtype == dtype
        and target.device.type in ("cpu", "cuda")
        and not target.is_conj()
        and not target.is_neg()
    )


def carry_out(reads: Iterable[TensorRead], passed: Callable[[int], object]) -> None:
    """Carries out reads, which come in the order of their files.

    Calls `passed` with how many bytes have been read since its last call.
    """
    handle = shared_handle()
    with UnderWay[list[FilePart]]() as under_way:

        def finish_oldest() -> None:
            parts = under_way.finish_oldest()
            for part in parts:
                part.owner.passed(part.memory)
            passed(sum(len(part.memory) for part in parts))

        for window in windows(part for read in reads for part in read.parts()):
            if len(under_way) == WINDOWS:
                finish_oldest()
            transfers = [(part.memory, part.file, part.offset) for part in window]
            under_way.add(handle.read_many(transfers), window)
        while under_way:
            finish_oldest()
