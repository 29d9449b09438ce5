"""How long computation waited, and for what: for stats() and for the trace."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from .._tracing import span

DRIVE, COPIES, STEP = "drive", "copies", "step"  # what takes the time


class Waits:
    """Adds up the seconds of one holder of tensors."""

    def __init__(self) -> None:
        self._seconds = {DRIVE: 0.0, COPIES: 0.0, STEP: 0.0}

    @contextlib.contextmanager
    def on(self, what: str, name: str) -> Iterator[None]:
        """Counts its body, which the trace shows by this name. A wait has a name that begins with
        "wait for": `tensorferry report` looks for that."""
        begin = time.monotonic()
        try:
            with span(name):
                yield
        finally:
            self._seconds[what] += time.monotonic() - begin

    def seconds(self, what: str) -> float:
        return self._seconds[what]
