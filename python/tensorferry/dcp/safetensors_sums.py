"""Checksums of tensors in safetensors files that several ranks write.

A checksum is made of those of pieces of 64 KiB. A rank computes those of the pieces that it has
alone. Those that ranks share are read back when all have written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .._core import File, checksums_of_pieces
from .._saving.windows import WINDOW_BYTES, WINDOWS, UnderWay
from .._shared_handle import shared_handle

_PIECE_BYTES = 64 << 10
_SUM_BYTES = 8


class PieceSums(NamedTuple):
    """The checksums of pieces that follow each other, from that number on."""

    first: int
    sums: bytes


class Missing(NamedTuple):
    """Bytes of a tensor whose pieces have no checksums yet."""

    offset: int
    bytes: int


def piece_count(tensor_bytes: int) -> int:
    return -(-tensor_bytes // _PIECE_BYTES)


def whole_pieces(memory: object, offset: int, tensor_bytes: int) -> list[PieceSums]:
    """Returns the checksums of the pieces that lie in the memory, which is at `offset`."""
    end = offset + len(memory)  # type: ignore[arg-type]  # a tensor of bytes
    first = piece_count(offset)
    last = piece_count(end) if end == tensor_bytes else end // _PIECE_BYTES
    if first >= last:
        return []
    stop = min(last * _PIECE_BYTES, end)
    part = memory[first * _PIECE_BYTES - offset : stop - offset]  # type: ignore[index]
    return [PieceSums(first, checksums_of_pieces(part))]


class TensorSums:
    """The checksums of all pieces of a tensor, as they become known."""

    def __init__(self, tensor_bytes: int) -> None:
        self._bytes = tensor_bytes
        self.pieces = bytearray(_SUM_BYTES * piece_count(tensor_bytes))
        self._known = bytearray(piece_count(tensor_bytes))

    def add(self, known: PieceSums) -> None:
        first, sums = known
        count = len(sums) // _SUM_BYTES
        self.pieces[_SUM_BYTES * first : _SUM_BYTES * (first + count)] = sums
        self._known[first : first + count] = b"\1" * count

    def missing(self) -> Iterator[Missing]:
        """Stretches of whole pieces, of a window at most."""
        most = WINDOW_BYTES // _PIECE_BYTES
        first = self._known.find(0)
        while first >= 0:
            stop = self._known.find(1, first, first + most)
            if stop < 0:
                stop = min(first + most, len(self._known))
            begin = first * _PIECE_BYTES
            yield Missing(begin, min(stop * _PIECE_BYTES, self._bytes) - begin)
            first = self._known.find(0, stop)


def read_back(file: File, parts: Iterable[tuple[TensorSums, int, Missing]]) -> None:
    """Reads parts of tensors and adds their checksums. Each comes with where its tensor begins."""
    with UnderWay[list[tuple[TensorSums, Missing, bytearray]]]() as under_way:

        def finish_oldest() -> None:
            for sums, part, memory in under_way.finish_oldest():
                sums.add(PieceSums(part.offset // _PIECE_BYTES, checksums_of_pieces(memory)))

        for window in _windows(parts):
            if len(under_way) == WINDOWS:
                finish_oldest()
            made = [(sums, part, bytearray(part.bytes)) for sums, _, part in window]
            offsets = [begin + part.offset for _, begin, part in window]
            transfers = [(memory, file, at) for (_, _, memory), at in zip(made, offsets)]
            under_way.add(shared_handle().read_many(transfers), made)
        while under_way:
            finish_oldest()


def _windows(
    parts: Iterable[tuple[TensorSums, int, Missing]],
) -> Iterator[list[tuple[TensorSums, int, Missing]]]:
    window: list[tuple[TensorSums, int, Missing]] = []
    for part in parts:
        window.append(part)
        if sum(missing.bytes for _, _, missing in window) >= WINDOW_BYTES:
            yield window
            window = []
    if window:
        yield window
