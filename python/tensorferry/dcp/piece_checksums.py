"""Checksums of the pieces of a tensor, so that a part of it can be compared too."""

from __future__ import annotations

PIECE_BYTES = 256 << 10
RECORD = "crc32_per_256k"  # of an item; torch does not look at it


def piece_count(tensor_bytes: int) -> int:
    """How many checksums the record has. A tensor of one piece has the checksum of all."""
    count = -(-tensor_bytes // PIECE_BYTES)
    return count if count > 1 else 0
