"""The handle that all saves and loads of checkpoints share in a process."""

from __future__ import annotations

import os

from ._core import Handle

# By process: a forked child cannot use the handle of its parent, and leaves it alone.
_handles: dict[int, Handle] = {}


def shared_handle() -> Handle:
    """Returns the handle of this process. The first call opens it; it closes with Python."""
    handle = _handles.get(os.getpid())
    if handle is None or handle.closed:
        handle = _handles.setdefault(os.getpid(), Handle())
        if handle.closed:
            handle = _handles[os.getpid()] = Handle()
    return handle
