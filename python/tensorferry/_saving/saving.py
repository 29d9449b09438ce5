"""What a save that nobody waits for returns."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

from .._core import NewFile
from .windows import UnderWay

# How often a waiting thread looks for operations whose priority it can raise.
_LOOK_SECONDS = 0.05


class _Cancelled(OSError):
    """What cancel() ends a save with."""


class Saving:
    """A save to a file that goes on in the background.

    It ends exactly once: when the new file is on the drive under its name, or with an exception;
    the old file is then as it was. Keep it or drop it: the save goes on. It can be waited for,
    polled, cancelled and awaited. A task that is cancelled while it awaits does not cancel it.
    """

    def __init__(self, path: str, total: int) -> None:
        self._path = path
        self._total = total
        self._done = 0
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._seen = False
        self._cancelled = False
        self._committing = False
        self._under_way: UnderWay[Any] | None = None
        self._callbacks: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self._process = os.getpid()

    @property
    def path(self) -> str:
        """The name that the new file gets."""
        return self._path

    @property
    def progress(self) -> tuple[int, int]:
        """The bytes that are written, and the bytes of the file."""
        return self._done, self._total

    def done(self) -> bool:
        """Returns whether the save has ended, with success or without."""
        self._check_process()
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the file is on the drive.

        Raises what the save failed with; an OSError (ECANCELED) if it was cancelled. Raises
        TimeoutError if `timeout` seconds pass first, and KeyboardInterrupt at Ctrl-C; the save then
        goes on. Waiting raises the priority of its writes to that of this thread.
        """
        self.wait_for_end(timeout)
        self._raise()

    def exception(self) -> BaseException | None:
        """Returns what the save failed with; None before the end and after success."""
        self._check_process()
        if self._ended.is_set():
            self._seen = True
        return self._error

    def cancel(self) -> None:
        """Asks the save to end early, with the old file as it was. Does not wait. One that has
        begun to put the new file in place is finished."""
        self._check_process()
        with self._lock:
            if self._committing or self._ended.is_set():
                return
            self._cancelled = True
        under_way = self._under_way
        if under_way is not None:
            under_way.cancel()

    def __await__(self) -> Generator[object, None, None]:
        import asyncio

        self._check_process()
        if not self._ended.is_set():
            loop = asyncio.get_running_loop()
            future = loop.create_future()

            def wake() -> None:
                if not future.done():
                    future.set_result(None)

            def ended() -> None:
                try:
                    loop.call_soon_threadsafe(wake)
                except RuntimeError:  # the loop is closed; nobody waits any longer
                    pass

            self.raise_for_waiter()
            self._when_ended(ended)
            yield from future
        self._raise()

    def __repr__(self) -> str:
        if not self._ended.is_set():
            state = f"{self._done} of {self._total} bytes written"
        else:
            state = "done" if self._error is None else f"failed: {self._error}"
        return f"<Saving {self._path!r}: {state}>"

    def wait_for_end(self, timeout: float | None = None) -> None:
        """Does what wait() does, but raises nothing that the save failed with."""
        self._check_process()
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._ended.is_set():
            self.raise_for_waiter()
            left = _LOOK_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"the save to {self._path} has not ended after {timeout} s")
            self._ended.wait(min(left, _LOOK_SECONDS))

    def raise_for_waiter(self) -> None:
        """Gives the writes under way the priority of this thread, if that is higher."""
        under_way = self._under_way
        if under_way is not None:
            for operation in under_way.operations():
                operation.raise_for_waiter()

    def _raise(self) -> None:
        self._seen = True
        if self._error is not None:
            raise self._error

    def _when_ended(self, callback: Callable[[], object]) -> None:
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise ChildProcessError(
                f"the parent process saves to {self._path}; a forked child cannot wait for that"
            )

    # What follows is for the thread that writes.

    def begin(self, under_way: UnderWay[Any]) -> None:
        """The writes begin. cancel() and threads that wait find them there."""
        self._under_way = under_way
        self.check()

    def check(self) -> None:
        """Raises an OSError if the save was cancelled."""
        if self._cancelled:
            raise self._cancellation()

    def wrote(self, done: int) -> None:
        """So many bytes of the file are written."""
        self._done = done

    def commit(self, new: NewFile) -> None:
        """Puts the new file in place, unless the save was cancelled before."""
        with self._lock:
            self.check()
            self._committing = True
        new.commit()

    def end(self, error: BaseException | None) -> None:
        """The save has ended."""
        if self._cancelled and error is not None and not isinstance(error, _Cancelled):
            error = self._cancellation()  # what the writes say of it
        with self._lock:
            if error is None:
                self._done = self._total
            self._error = error
            self._under_way = None
            self._ended.set()
        for callback in self._callbacks:
            callback()

    def _cancellation(self) -> OSError:
        return _Cancelled(
            errno.ECANCELED, "the save was cancelled; the old file is as it was", self._path
        )

    @property
    def failed_unseen(self) -> bool:
        """Whether it failed, and not by cancel(), and nobody has heard of it."""
        return self._error is not None and not self._seen and not self._cancelled

    def tell(self) -> BaseException | None:
        """Returns the error, and notes that somebody has heard of it."""
        self._seen = True
        return self._error
