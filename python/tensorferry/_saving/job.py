"""One save on its way from the thread that saves to the thread that writes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from .._progress import Progress, ProgressReport
from .saving import Saving
from .windows import Part

if TYPE_CHECKING:
    import torch

    from .._core import File, NewFile
    from .stage import StagedWindow

_LOOK_SECONDS = 0.05


class NewContents(Protocol):
    """What a format writes to a new file."""

    path: str
    nbytes: int

    def parts(self) -> Iterable[Part]:
        """The parts of the file from front to back; those of no storage belong to the contents."""

    def stays(self, storage: int) -> bool:
        """Whether nobody can change the memory of a storage: it is then read when it is written."""

    def passed(self, memory: torch.Tensor, storage: int, last: bool) -> object:
        """The thread that writes has these bytes of a storage now, from front to back."""

    def staged(self) -> object:
        """Nobody needs the memory that the caller may change any more."""

    def end(self, file: File) -> object:
        """All parts are written: writes what could not be known before."""


class Job:
    """The windows of a save, which one thread adds and another one takes."""

    def __init__(self, contents: NewContents, new: NewFile, progress: Progress) -> None:
        self.contents = contents
        self.new = new
        self.saving = Saving(contents.path, contents.nbytes)
        self.report = ProgressReport(progress, "save", contents.nbytes)
        self._changed = threading.Condition()
        self._windows: deque[StagedWindow] = deque()
        self._whole = False
        self._closed = False

    def add(self, window: StagedWindow) -> bool:
        """Returns False, and does nothing, if nobody takes windows any more."""
        with self._changed:
            if not self._closed:
                self._windows.append(window)
                self._changed.notify()
            return not self._closed

    def end(self) -> None:
        """All windows have been added."""
        with self._changed:
            self._whole = True
            self._changed.notify()

    def next(self, wait: bool) -> StagedWindow | None:
        """Takes a window. Returns None if all have been taken, or if there is none and it is not to
        wait for one."""
        with self._changed:
            while wait and not self._windows and not self._whole:
                self._changed.wait(_LOOK_SECONDS)
                self.saving.check()
            return self._windows.popleft() if self._windows else None

    def close(self) -> list[StagedWindow]:
        """Takes no more windows. Returns those that are left."""
        with self._changed:
            self._closed = True
            left = list(self._windows)
            self._windows.clear()
            return left
