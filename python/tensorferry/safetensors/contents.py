"""A safetensors file as a save in the background writes it: the tensors, then the header."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .._core import File, checksums_of_pieces, make_safetensors_header
from .._memory.mapped_weight import MappedWeight
from .._saving.windows import Part
from .._shared_handle import shared_handle

# Each of them has a checksum of this many bytes.
_PIECE_BYTES = 64 << 10
_CHECKSUM_BYTES = 8

Row = tuple[str, str, list[int], Any]  # (name, dtype, shape, memory)


def bytes_of_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a contiguous tensor, as a tensor of its class."""
    flat = tensor.view(-1)
    if flat.stride(0) != 1:  # of one element, whose stride does not matter to anybody but torch
        flat = flat.as_strided((len(flat),), (1,))
    return flat.view(torch.uint8)


class SafetensorsContents:
    """What `_core.save_safetensors()` writes, for `_saving`."""

    def __init__(
        self,
        path: str,
        rows: list[Row],
        metadata: dict[str, str] | None,
        *,
        checksums: bool,
        alignment: int,
    ) -> None:
        self.path = path
        self._names = [(name, dtype, shape) for name, dtype, shape, _ in rows]
        self._memory = [memory for *_, memory in rows]
        self._metadata = metadata
        self._alignment = alignment
        self._pieces = [_Pieces() for _ in rows] if checksums else []
        # The checksums have a fixed width: the header is as long with those that come later.
        unknown = [
            bytes(-(-len(memory) // _PIECE_BYTES) * _CHECKSUM_BYTES) for memory in self._memory
        ]
        self._header, self._order = self._header_with(unknown)
        self.nbytes = len(self._header) + sum(map(len, self._memory))

    def parts(self) -> Iterator[Part]:
        yield Part(0, memoryview(self._header), None)
        at = len(self._header)
        for number in self._order:
            memory = self._memory[number]
            yield Part(at, memory, number)
            at += len(memory)

    def stays(self, storage: int) -> bool:
        return isinstance(self._memory[storage], MappedWeight)

    def passed(self, memory: torch.Tensor, storage: int, last: bool) -> None:
        if self._pieces:
            self._pieces[storage].add(memory, last)

    def staged(self) -> None:
        self._memory.clear()

    def end(self, file: File) -> None:
        if self._pieces:
            header, _ = self._header_with([bytes(pieces.checksums) for pieces in self._pieces])
            assert len(header) == len(self._header)
            shared_handle().write_now(header, file)

    def _header_with(self, pieces: list[bytes]) -> tuple[bytes, list[int]]:
        return make_safetensors_header(
            self._names,
            metadata=self._metadata,
            alignment=self._alignment,
            pieces=pieces if self._pieces else None,
        )


class _Pieces:
    """The checksums of the pieces of a tensor, whose bytes come in stretches of any length."""

    def __init__(self) -> None:
        self.checksums = bytearray()
        self._begun = bytearray()  # a piece whose end has not come yet

    def add(self, memory: torch.Tensor, last: bool) -> None:
        if self._begun:
            missing = min(_PIECE_BYTES - len(self._begun), len(memory))
            self._begun += memoryview(memory[:missing].numpy())
            memory = memory[missing:]
            if len(self._begun) == _PIECE_BYTES or last:
                self.checksums += checksums_of_pieces(self._begun)
                self._begun = bytearray()
        whole = len(memory) if last else len(memory) - len(memory) % _PIECE_BYTES
        if whole:
            self.checksums += checksums_of_pieces(memory[:whole])
        if whole < len(memory):
            self._begun += memoryview(memory[whole:].numpy())
