"""An open file that must not change while weights are read from it."""

from __future__ import annotations

import errno
import os
from typing import NamedTuple

from .._core import File


class Stamp(NamedTuple):
    """What tells whether a file is the same, with the same bytes."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int
    links: int

    @classmethod
    def of(cls, found: os.stat_result) -> Stamp:
        return cls(
            found.st_dev,
            found.st_ino,
            found.st_size,
            found.st_mtime_ns,
            found.st_ctime_ns,
            found.st_nlink,
        )


class WatchedFile:
    """A file, opened once. Another file that takes its name does not matter: this one stays open.
    Any thread may call check()."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.file = File.borrow(self._descriptor)
            self._stamp = self._now()
        except BaseException:
            os.close(self._descriptor)
            raise

    def _now(self) -> Stamp:
        return Stamp.of(os.fstat(self._descriptor))

    @property
    def size(self) -> int:
        """In bytes, when it was opened."""
        return self._stamp.size

    @property
    def memory_alignment(self) -> int:
        """Of memory that its drive fills in place."""
        return self.file.memory_alignment

    @property
    def descriptor(self) -> int:
        return self._descriptor

    def has_its_name(self) -> bool:
        """Returns whether the path still leads to this file, which has not changed."""
        try:
            return Stamp.of(os.stat(self.path)) == self._stamp
        except OSError:
            return False

    def check(self) -> None:
        """Raises OSError (EBADMSG) if the file has changed since it was opened."""
        now = self._now()
        if now == self._stamp:
            return
        was = self._stamp
        if now.size != was.size:
            raise self._changed(f"it had {was.size} bytes and has {now.size} now")
        if now.modified_ns != was.modified_ns:
            raise self._changed("somebody has written to it")
        # Names that come and go change the time too, and no bytes: as when it is renamed over.
        if now.links == was.links and self._is_at_path(now):
            raise self._changed("somebody has written to it, or changed its attributes")
        self._stamp = now

    def _is_at_path(self, now: Stamp) -> bool:
        try:
            found = os.stat(self.path)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == (now.device, now.inode)

    def _changed(self, how: str) -> OSError:
        hint = (
            f"{how} since the model was opened, so that its weights may be wrong; do not change "
            "a checkpoint that is in use, but replace it by rename, and open the model again"
        )
        error = OSError(errno.EBADMSG, f"read weights: the file has changed: {hint}", self.path)
        error.operation = "read weights"  # type: ignore[attr-defined]
        error.hint = hint  # type: ignore[attr-defined]
        return error

    def close(self) -> None:
        if self._descriptor >= 0:
            self.file.close()
            os.close(self._descriptor)
            self._descriptor = -1
