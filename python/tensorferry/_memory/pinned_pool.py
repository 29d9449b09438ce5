"""Page-locked memory that is given out in parts, without a swap space."""

from __future__ import annotations

import collections
import threading
import time
import weakref
from typing import Any

from .._core import PinnedBuffer
from .layout import page_up

_POLL_SECONDS = 0.0005


class PinnedPool:
    """Gives out parts of one stretch of page-locked memory, in whole pages. A part is free again
    when nobody holds it any more. Like the buffers of a SwapSpace, for those who write nothing."""

    def __init__(self, nbytes: int) -> None:
        self._memory = memoryview(PinnedBuffer(page_up(max(nbytes, 1))))
        self._taken: dict[int, int] = {}  # first byte -> end
        # Parts that have gone. Python may collect them at any moment, also inside take().
        self._gone: collections.deque[int] = collections.deque()
        self._lock = threading.Lock()

    def take(self, nbytes: int, timeout: float = 0) -> memoryview:
        """Returns a part of the memory. Raises TimeoutError if no part of so many bytes becomes
        free within `timeout` seconds. The user of the memory must hold this very object, as
        torch.frombuffer() does."""
        deadline = time.monotonic() + timeout
        while True:
            with self._lock:
                begin = self._find(page_up(nbytes))
                if begin is not None:
                    self._taken[begin] = begin + page_up(nbytes)
                    part = self._memory[begin : begin + nbytes]
                    weakref.finalize(part, self._gone.append, begin).atexit = False
                    return part
            if time.monotonic() >= deadline:
                raise TimeoutError(f"no {nbytes} bytes of page-locked memory are free")
            time.sleep(_POLL_SECONDS)

    def _find(self, nbytes: int) -> int | None:
        """Returns where the first gap of so many bytes begins."""
        while self._gone:
            del self._taken[self._gone.popleft()]
        end = 0
        for begin in sorted(self._taken):
            if begin - end >= nbytes:
                return end
            end = self._taken[begin]
        return end if len(self._memory) - end >= nbytes else None

    def stats(self) -> dict[str, Any]:
        with self._lock:
            self._find(0)
            used = sum(end - begin for begin, end in self._taken.items())
        return {"buffer_bytes": len(self._memory), "buffer_bytes_used": used}
