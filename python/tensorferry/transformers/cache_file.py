"""Files without a name for keys and values: they end with the program, however it ends."""

from __future__ import annotations

import os
import tempfile
import weakref

from .._core import File
from .._memory.buffers import NvmePath


class CacheFile:
    """A file in a directory, without a name. Regions of it are given out, and taken back."""

    def __init__(self, directory: str) -> None:
        self._descriptor = _open(directory)
        self._end = weakref.finalize(self, os.close, self._descriptor)
        self.file = File.borrow(self._descriptor)
        self._size = 0
        self._free: dict[int, list[int]] = {}  # bytes of a region -> where such regions begin

    def take(self, nbytes: int) -> int:
        """Returns the first byte of a region. What is not written there takes no space."""
        if free := self._free.get(nbytes):
            return free.pop()
        begin, self._size = self._size, self._size + nbytes
        os.truncate(self._descriptor, self._size)
        return begin

    def give_back(self, begin: int, nbytes: int) -> None:
        self._free.setdefault(nbytes, []).append(begin)

    @property
    def used_bytes(self) -> int:
        """What it takes of the drive."""
        return os.fstat(self._descriptor).st_blocks * 512

    def close(self) -> None:
        self.file.close()
        self._end()


def open_files(nvme_path: NvmePath) -> list[CacheFile]:
    """Opens a file in each directory."""
    paths = [nvme_path] if isinstance(nvme_path, (str, os.PathLike)) else list(nvme_path)
    if not paths:
        raise ValueError("nvme_path is an empty list: give a directory on a drive")
    return [CacheFile(os.fspath(path)) for path in paths]


def _open(directory: str) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    except (IsADirectoryError, OSError) as error:
        if not os.path.isdir(directory) or isinstance(error, PermissionError):
            raise
    # A file system that knows no files without a name.
    descriptor, path = tempfile.mkstemp(prefix=".tensorferry-", dir=directory)
    os.unlink(path)
    return descriptor
