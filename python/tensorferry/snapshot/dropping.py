"""Checking snapshots, and removing them."""

from __future__ import annotations

import errno
from pathlib import Path

from .. import checkpoint
from . import folder
from .folder import Snapshot, Unusable
from .reading import Reader
from .resuming import choose


def existing(path: Path, name: str | None) -> Snapshot:
    """The snapshot of that name, or the newest. Raises Unusable if there is none."""
    found = choose(path, name)
    if found is None:
        raise Unusable(f"{path} has no snapshot")
    return found


def verify(path: Path, name: str | None) -> dict[str, int]:
    """See tensorferry.snapshot.verify()."""
    snapshot = existing(path, name)
    counts = {"tensors": 0, "bytes": 0, "without_checksum": 0}
    with folder.in_use(snapshot):
        for rank in range(snapshot.ranks):
            with Reader(folder.read_manifest(Path(snapshot.path), rank)) as reader:
                for key, count in reader.check().items():
                    counts[key] += count
            checkpoint.load(folder.memory_path(Path(snapshot.path), rank), map_location="cpu")
    return counts


def drop(path: Path, name: str) -> None:
    """See tensorferry.snapshot.drop()."""
    with folder.locked(path):
        snapshot = existing(path, name)
        if folder.is_in_use(snapshot):
            raise OSError(errno.EBUSY, "another process reads this snapshot now", snapshot.path)
        folder.uncommit(snapshot)
        folder.remove_rest(Path(snapshot.path))
        folder.trim(path)
