"""Callbacks and `await`: one thread, started at first use, that waits for operations to end.

The engine's threads never run Python. They add a number to a list and wake this thread.
"""

import itertools
import logging
import os
import threading

from ._core import Completions, Operation

_log = logging.getLogger("tensorferry")


class _Listener:
    def __init__(self):
        self._completions = Completions()
        self._waiting = {}  # number -> (operation, callback)
        self._numbers = itertools.count()
        threading.Thread(target=self._run, name="tensorferry-callbacks", daemon=True).start()

    def add(self, operation, callback):
        number = next(self._numbers)
        self._waiting[number] = (operation, callback)
        self._completions.watch(operation, number)

    def _run(self):
        while True:
            os.eventfd_read(self._completions.fileno())
            for number in self._completions.take():
                _call(*self._waiting.pop(number))


def _call(operation, callback):
    try:
        callback(operation)
    except BaseException:  # SystemExit too: the thread serves everybody
        try:
            _log.exception("a callback of %r raised", operation)
        except BaseException:  # as does a handler of the log that raises
            pass


_listener = None
_lock = threading.Lock()


def _forget():
    # In the child of a fork there is no thread, and the parent's operations never end.
    global _listener, _lock
    _listener = None
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget)


def add(operation: Operation, callback) -> None:
    """Operation.add_done_callback."""
    global _listener
    if operation.done():
        _call(operation, callback)
        return
    operation.check_process()  # in the child of a fork the parent's operations never end
    with _lock:
        if _listener is None:
            _listener = _Listener()
        listener = _listener
    listener.add(operation, callback)


def wait(operation: Operation):
    """Operation.__await__: the operation is cancelled if the task that awaits it is."""
    import asyncio

    if not operation.done():
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def wake():
            if not future.done():
                future.set_result(None)

        def ended(_):
            try:
                loop.call_soon_threadsafe(wake)
            except RuntimeError:  # the loop is closed; nobody waits any more
                pass

        add(operation, ended)
        try:
            yield from future
        except asyncio.CancelledError:
            operation.cancel()
            raise
    return operation.wait()
