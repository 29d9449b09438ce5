"""Callbacks and `await`: one thread, started at first use, that waits for operations to end.

The engine's threads never run Python. They add a number to a list and wake this thread.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading

from ._core import Completions, Operation

TYPE_CHECKING = False  # as in typing, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    Callback = Callable[[Operation], object]

_log = logging.getLogger("tensorferry")


class _Listener:
    def __init__(self) -> None:
        self._completions = Completions()
        self._waiting: dict[int, tuple[Operation, Callback]] = {}  # by number
        self._numbers = itertools.count()
        threading.Thread(target=self._run, name="tensorferry-callbacks", daemon=True).start()

    def add(self, operation: Operation, callback: Callback) -> None:
        number = next(self._numbers)
        self._waiting[number] = (operation, callback)
        self._completions.watch(operation, number)

    def _run(self) -> None:
        while True:
            os.eventfd_read(self._completions.fileno())
            for number in self._completions.take():
                _call(*self._waiting.pop(number))


def _call(operation: Operation, callback: Callback) -> None:
    try:
        callback(operation)
    except BaseException:  # SystemExit too: the thread serves all operations
        try:
            _log.exception("a callback of %r raised", operation)
        except BaseException:  # a handler of the log may raise too
            pass


_listener: _Listener | None = None
_lock = threading.Lock()


def _forget() -> None:
    # A forked child has no such thread, and the parent's operations never end in it.
    global _listener, _lock
    _listener = None
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget)


def add(operation: Operation, callback: Callback) -> None:
    """Does the work of Operation.add_done_callback."""
    global _listener
    if operation.done():
        _call(operation, callback)
        return
    operation.check_process()  # the parent's operations never end in a forked child
    with _lock:
        if _listener is None:
            _listener = _Listener()
        listener = _listener
    listener.add(operation, callback)


def wait(operation: Operation) -> Generator[object, None, int]:
    """Does the work of Operation.__await__. Cancelling the awaiting task cancels the operation."""
    import asyncio

    if not operation.done():
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        def ended(_: Operation) -> None:
            try:
                loop.call_soon_threadsafe(wake)
            except RuntimeError:  # the loop is closed; nobody waits any longer
                pass

        operation.raise_for_waiter()
        add(operation, ended)
        try:
            yield from future
        except asyncio.CancelledError:
            operation.cancel()
            raise
    return operation.wait()
