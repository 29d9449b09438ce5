"""Adds the work of Python to the trace that TENSORFERRY_TRACE asks for."""

from __future__ import annotations

import contextlib
import time

from ._core import trace_span, tracing

TYPE_CHECKING = False  # as in typing, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def _recorded(name: str) -> Iterator[None]:
    begin = time.monotonic_ns()
    try:
        yield
    finally:
        trace_span(name, begin, time.monotonic_ns())


class Rounds:
    """Shows in the trace what lies between two calls of end()."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begin: int | None = None

    def end(self) -> None:
        now = time.monotonic_ns()
        if self._begin is not None and tracing():
            trace_span(self._name, self._begin, now)
        self._begin = now


_nothing = contextlib.nullcontext()


def span(name: str) -> contextlib.AbstractContextManager[None]:
    """`with span(name):` shows its body in the trace, if a trace is being written."""
    return _recorded(name) if tracing() else _nothing
