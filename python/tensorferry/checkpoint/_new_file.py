"""A file that takes its name only when it is whole."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat

from .._core import File

_SUFFIX = ".tensorferry-new"


class NewFile:
    """Until commit() the bytes are in a hidden file beside `path`, which stays as it is.

    A file that is replaced passes its mode on. A symbolic link stays: the file that it points to is
    replaced. Without commit(), leaving `with` removes the hidden file.
    """

    def __init__(self, path: str, permissions: int = 0o666) -> None:
        self.path = os.path.realpath(path)
        folder, name = os.path.split(self.path)
        mode = None
        with contextlib.suppress(FileNotFoundError):
            mode = os.stat(self.path).st_mode
        if mode is not None and not stat.S_ISREG(mode):
            code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
            raise OSError(code, "save: this is not a regular file; give another name", self.path)
        _remove_leftovers(folder, name)
        self._file: File | None = None
        self._hidden, self._descriptor = _create(folder, name, permissions)
        try:
            if mode is not None:
                os.fchmod(self._descriptor, stat.S_IMODE(mode))
            self._file = File.borrow(self._descriptor)
        except BaseException:
            self.discard()
            raise

    @property
    def file(self) -> File:
        assert self._file is not None
        return self._file

    def commit(self) -> None:
        """Syncs the file, gives it its name and syncs the directory."""
        os.fsync(self._descriptor)
        os.rename(self._hidden, self.path)
        self._hidden = ""
        directory = os.open(os.path.dirname(self.path), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
            self.discard()

    def discard(self) -> None:
        """Removes the hidden file, unless commit() has succeeded."""
        if self._descriptor < 0:
            return
        if self._hidden:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._hidden)
        if self._file is not None:
            self._file.close()
        os.close(self._descriptor)
        self._descriptor = -1

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *args: object) -> None:
        self.discard()


def _start_of(name: str) -> str:
    """What hidden names begin with: a name may have 255 bytes, so long ones are cut."""
    return "." + os.fsdecode(os.fsencode(name)[:200]) + "."


def _create(folder: str, name: str, permissions: int) -> tuple[str, int]:
    """Creates a hidden file and locks it: a file without a lock belongs to no living process."""
    while True:
        hidden = os.path.join(folder, _start_of(name) + secrets.token_hex(6) + _SUFFIX)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(hidden, flags, permissions)
        # Another process may have found it before it was locked, and then removes it.
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.stat(hidden)
            return hidden, descriptor
        os.close(descriptor)


def _remove_leftovers(folder: str, name: str) -> None:
    """Removes the hidden files that killed processes have left for this name."""
    start = _start_of(name)
    for found in os.listdir(folder):
        middle = found.removeprefix(start).removesuffix(_SUFFIX)
        if len(found) != len(start) + 12 + len(_SUFFIX) or len(middle) != 12:
            continue
        path = os.path.join(folder, found)
        with contextlib.suppress(OSError):  # another process has it, or has removed it
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
            finally:
                os.close(descriptor)
