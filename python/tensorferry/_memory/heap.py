"""Freed memory goes back to the system: glibc keeps more of it than is good for large tensors.

A block on its heap leaves a hole when it is freed, and that is too small for the next block of the
same size, as torch wants those aligned and something small lies beside it by then. Tensors that
come and go one after the other take as much memory as all of them together."""

import ctypes
import os

# How much is freed before it is given back: less is not worth the time.
_PORTION = 4 << 20

_library = ctypes.CDLL(None)
_freed = 0


def map_large_blocks():
    """Makes glibc map blocks of 4 MiB and more each by itself, unless the user has said otherwise.

    By default it learns to put them on its heap: a model of 1 GiB has 1.5 GiB of holes."""
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in os.environ.get(
        "GLIBC_TUNABLES", ""
    ):
        return
    mallopt = getattr(_library, "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3  # of malloc.h
        mallopt(mmap_threshold, 4 << 20)
        mallopt(trim_threshold, 8 << 20)


def note_freed(nbytes):
    """Says that tensors of so many bytes were freed. From time to time the pages of all holes go to
    the system, which takes about a millisecond."""
    global _freed
    _freed += nbytes
    if _freed >= _PORTION:
        _freed = 0
        trim = getattr(_library, "malloc_trim", None)
        if trim is not None:
            trim(0)
