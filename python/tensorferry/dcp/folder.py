"""The files of a checkpoint folder: how they are named, made, and removed.

A save gives its data files names that no other save has. A checkpoint is the files that a metadata
file names, so that renaming a new metadata file replaces it as a whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator

from .metadata_file import load_metadata

METADATA = ".metadata"

# Those of torch have no random part.
_DATA_FILE = re.compile(r"__(\d+)_\d+(\.[0-9a-f]{12})?\.distcp")
_RANK_METADATA = re.compile(r"__(\d+)\.metadata")

# A process that was killed may have left a child that has its lock.
_WAIT_SECONDS = 30

_log = logging.getLogger("tensorferry")


def new_data_file_name(prefix: str, number: int) -> str:
    return f"{prefix}{number}.{secrets.token_hex(6)}.distcp"


def metadata_name(rank: int | None) -> str:
    """The metadata file of all ranks, or of one that saves by itself."""
    return METADATA if rank is None else f"__{rank}{METADATA}"


def metadata_ranks(path: str) -> list[int | None]:
    """The ranks that have metadata of their own; [None] if those of all ranks count."""
    names = [] if os.path.exists(os.path.join(path, METADATA)) else os.listdir(path)
    ranks = [int(match[1]) for match in map(_RANK_METADATA.fullmatch, names) if match]
    return [*sorted(ranks)] if ranks else [None]


def make_folder(path: str) -> None:
    """Makes the folder and those above it, durably."""
    missing = []
    folder = os.path.abspath(path)
    while not os.path.isdir(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for folder in reversed(missing):
        os.makedirs(folder, exist_ok=True)  # another rank may have been faster
        sync_folder(os.path.dirname(folder))


def sync(descriptor: int, path: str) -> None:
    """Returns when what was written is on the drive. The error has the path."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, f"sync: {os.strerror(error.errno or 0)}", path) from None


def sync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(descriptor, path)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def alone_in(path: str) -> Iterator[None]:
    """Within it, no other save of this machine publishes or removes files of the folder.

    Two saves to one folder spoil each other. Of those that do, one fails at least, and whatever
    metadata are in the folder name files that are there.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        limit = time.monotonic() + _WAIT_SECONDS
        while not _locked(descriptor) and time.monotonic() < limit:
            time.sleep(0.01)
        yield
    finally:
        with contextlib.suppress(OSError):  # a child may have been forked: closing is not enough
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    """Whether nobody else has the lock. Some file systems have no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def remove_unused(path: str, rank: int | None) -> None:
    """Removes the data files that no metadata file in the folder names: all, or those of a rank.

    That is what killed and failed saves have left. Does nothing if a metadata file cannot be read.
    """
    names = os.listdir(path)
    used: set[str] = set()
    try:
        for name in names:
            if name == METADATA or _RANK_METADATA.fullmatch(name):
                places = load_metadata(os.path.join(path, name)).storage_data
                used.update(place.relative_path for place in places.values())
    except OSError as error:
        _log.warning("old data files stay in %s: %s", path, error)
        return
    remove_data_files(path, names, used, rank)


def remove_data_files(path: str, names: Iterable[str], but: set[str], rank: int | None) -> None:
    """Removes those of the names that are data files, of all ranks or of one."""
    for name in names:
        match = _DATA_FILE.fullmatch(name)
        if match and name not in but and (rank is None or int(match[1]) == rank):
            remove(os.path.join(path, name))


def take_back(path: str, metadata_path: str, new: set[str]) -> None:
    """Removes the data files of a save whose metadata could not be written.

    They stay if the metadata have their name already: nobody knows whether the drive will keep it.
    """
    try:
        places = load_metadata(metadata_path).storage_data
    except FileNotFoundError:
        places = {}
    except OSError:
        return  # what they name is not known
    if new.isdisjoint(place.relative_path for place in places.values()):
        for name in new:
            remove(os.path.join(path, name))


def remove_rank_metadata(path: str, names: Iterable[str]) -> None:
    for name in names:
        if _RANK_METADATA.fullmatch(name):
            remove(os.path.join(path, name))


def remove(path: str) -> None:
    """A file that cannot be removed takes space, and does no other harm."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        _log.warning("an old file stays: %s", error)
