"""Gives freed memory back to the system: glibc keeps too much of it when tensors are large.

A block on its heap leaves a hole when it is freed. The next block of the same size does not fit
there: torch aligns tensors, and by then something small lies beside the hole. So tensors that come
and go one after the other take as much memory as all of them together."""

from __future__ import annotations

import ctypes
import os

# How much is freed before it goes back: less is not worth the time.
_PORTION = 4 << 20
# What glibc maps by itself goes back at once.
_MAPPED = 4 << 20

_library = ctypes.CDLL(None)
_freed = 0


def map_large_blocks() -> None:
    """Makes glibc map each block of 4 MiB or more by itself, unless the user has set the limit.

    By default glibc learns to put them on its heap: a model of 1 GiB has 1.5 GiB of holes."""
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in os.environ.get(
        "GLIBC_TUNABLES", ""
    ):
        return
    mallopt = getattr(_library, "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3  # of malloc.h
        mallopt(mmap_threshold, _MAPPED)
        mallopt(trim_threshold, 8 << 20)


def ask_for_huge_pages() -> None:
    """Makes torch use huge pages for its large tensors, unless the user has decided. torch looks
    when it makes its first tensor: later calls change nothing.

    A block that glibc maps by itself gets new pages, which the kernel clears. With pages of 4 KiB
    that took a twelfth of an iteration with weights on NVMe, and a third of one whose activations
    go there."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def note_freed(nbytes: int) -> None:
    """Counts the bytes of freed tensors. From time to time the pages of all holes go back to the
    system, which takes about a millisecond."""
    global _freed
    _freed += nbytes
    if _freed >= _PORTION:
        _freed = 0
        trim = getattr(_library, "malloc_trim", None)
        if trim is not None:
            trim(0)


def note_block_freed(nbytes: int) -> None:
    """Counts the bytes of one freed tensor, if it lay on the heap after map_large_blocks()."""
    if nbytes < _MAPPED:
        note_freed(nbytes)
