"""Checksums of the pieces of a tensor, so that a part of it can be compared too."""

from __future__ import annotations

import torch

from .._core import crc32

PIECE_BYTES = 256 << 10
RECORD = "crc32_per_256k"  # of an item; torch does not look at it


def piece_count(tensor_bytes: int) -> int:
    """How many checksums the record has. A tensor of one piece has the checksum of all."""
    count = -(-tensor_bytes // PIECE_BYTES)
    return count if count > 1 else 0


class RunningChecksums:
    """The checksum of all bytes that have passed, and that of each piece of the tensor."""

    def __init__(self, position: int = 0, of_pieces: bool = True) -> None:
        self.whole = 0
        self.pieces: list[int] = []
        self._of_pieces = of_pieces
        self._position = position  # in the tensor: where a piece begins
        self._piece = 0

    def add(self, memory: torch.Tensor) -> None:
        """Takes the bytes that come next."""
        at = 0
        while at < len(memory):
            stop = min(at + PIECE_BYTES - self._position % PIECE_BYTES, len(memory))
            part = memory[at:stop]
            self.whole = crc32(part, self.whole)
            if self._of_pieces:
                self._piece = crc32(part, self._piece)
            self._position += stop - at
            at = stop
            if self._position % PIECE_BYTES == 0:
                self.end()

    def end(self) -> None:
        """Ends the piece that is under way, which is the last one."""
        if self._of_pieces:
            self.pieces.append(self._piece)
            self._piece = 0
