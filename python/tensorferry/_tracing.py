"""What Python does, in the trace that TENSORFERRY_TRACE asks for."""

import contextlib
import time

from ._core import trace_span, tracing


@contextlib.contextmanager
def _recorded(name):
    begin = time.monotonic_ns()
    try:
        yield
    finally:
        trace_span(name, begin, time.monotonic_ns())


_nothing = contextlib.nullcontext()


def span(name):
    """A with statement whose body is shown in the trace, if there is one."""
    return _recorded(name) if tracing() else _nothing
