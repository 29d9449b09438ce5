"""Reads whole tensors of safetensors files, and compares them with their checksums."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from .._core import SafetensorsFile
from .._saving.windows import UnderWay, as_bytes
from .._shared_handle import shared_handle
from .stored_tensor import StoredTensor
from .tensor_reads import in_place

_GROUP_BYTES = 64 << 20
_GROUPS = 2  # under way at a time


class CheckedRead(NamedTuple):
    """A tensor to fill; `filled` is called when it has its bytes."""

    name: str
    stored: StoredTensor
    target: torch.Tensor
    filled: Callable[[], object]


# A tensor to fill, and the memory that its bytes are read to.
_Reading = tuple[CheckedRead, torch.Tensor]


def carry_out_checked(
    source: SafetensorsFile, reads: Iterable[CheckedRead], passed: Callable[[int], object]
) -> None:
    """Carries out reads. Raises OSError (EBADMSG) if bytes do not match their checksum.

    Calls `passed` with how many bytes have been read since its last call.
    """
    with UnderWay[list[_Reading]]() as under_way:

        def start(group: list[_Reading]) -> None:
            if len(under_way) == _GROUPS:
                finish_oldest()
            wanted = [(read.name, memory) for read, memory in group]
            under_way.add(source.read(shared_handle(), wanted, verify="if_present"), group)

        def finish_oldest() -> None:
            group = under_way.finish_oldest()
            for read, memory in group:
                if not _straight(read):
                    elements = memory.view(read.stored.dtype)
                    read.target.copy_(elements.view(read.stored.size))
                read.filled()
            passed(sum(len(memory) for _, memory in group))

        group: list[_Reading] = []
        for read in reads:
            # One operation reads a tensor once.
            if read.name in {other.name for other, _ in group} or _bytes_of(group) >= _GROUP_BYTES:
                start(group)
                group = []
            group.append((read, _memory_for(read)))
        if group:
            start(group)
        while under_way:
            finish_oldest()


def _bytes_of(group: list[_Reading]) -> int:
    return sum(len(memory) for _, memory in group)


def _straight(read: CheckedRead) -> bool:
    return in_place(read.target, read.stored.dtype) and read.target.is_contiguous()


def _memory_for(read: CheckedRead) -> torch.Tensor:
    if not _straight(read):
        return torch.empty(read.stored.bytes, dtype=torch.uint8)
    begin = read.target.storage_offset() * read.target.itemsize
    return as_bytes(read.target.untyped_storage())[begin : begin + read.stored.bytes]
