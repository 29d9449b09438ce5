"""The handle that all saves and loads of checkpoints share in a process."""

from __future__ import annotations

import os

from ._core import Handle

# Workers compare checksums and copy to GPUs what the drive brings: where processors are many, more
# of them than the drive alone needs.
_PROCESSORS_PER_WORKER = 4
_WORKERS_MAX = 4

# By process: a forked child cannot use the handle of its parent, and leaves it alone.
_handles: dict[int, Handle] = {}


def shared_handle() -> Handle:
    """Returns the handle of this process. The first call opens it; it closes with Python."""
    handle = _handles.get(os.getpid())
    if handle is None or handle.closed:
        handle = _handles.setdefault(os.getpid(), _open())
        if handle.closed:
            handle = _handles[os.getpid()] = _open()
    return handle


def _open() -> Handle:
    workers = min(len(os.sched_getaffinity(0)) // _PROCESSORS_PER_WORKER, _WORKERS_MAX)
    return Handle(workers=workers if workers > 1 else None)
