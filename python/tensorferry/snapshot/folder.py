"""The folder of snapshots: names of files, manifests, and which snapshots are whole.

    <path>/<name>/rank-0.links     where names of swap files are going to be made
    <path>/<name>/rank-0.pt        what was only in memory
    <path>/<name>/rank-0.json      the manifest of a rank
    <path>/<name>/commit.json      written last, by the first rank: the snapshot is whole

Every file takes its name when it is durable. Dropping a snapshot begins with commit.json and ends
with the links: they say that the folder is ours. Nothing else in it is ever removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .._core import Handle, NewFile, trim_snapshot_file
from .._memory.snapshot_part import SavedPart, SavedSpace

FORMAT = "tensorferry snapshot"
VERSION = 1
COMMIT = "commit.json"
PARTS = ("model", "optimizer")

_OWN_NAME = r"(rank-\d+\.(pt|links|json)|commit\.json)"
_HIDDEN = re.compile(rf"\.{_OWN_NAME}\.\d+-\d+\.tensorferry")  # has not got its name yet
_OURS = re.compile(rf"{_OWN_NAME}|{_HIDDEN.pattern}")


class Unusable(ValueError):
    """A snapshot that cannot be used: damaged, of another format, or of another run."""


class Damaged(Unusable):
    """A snapshot whose bytes have changed, or of which something is missing."""


@dataclass(frozen=True)
class Snapshot:
    """A snapshot that is whole."""

    path: str  # of its folder
    name: str
    number: int  # later ones have larger numbers
    created: str  # date and time, UTC
    ranks: int
    stored_bytes: int  # of tensors that stayed on the drives, of all ranks
    memory_bytes: int  # of what was only in memory

    __module__ = "tensorferry.snapshot"  # where users find it


@dataclass
class Manifest:
    """What one rank has in a snapshot, but for what was only in memory."""

    rank: int
    ranks: int
    layouts: dict[str, dict[str, Any]]  # of "model" and "optimizer"
    spaces: dict[str, list[SavedSpace]]  # of the same

    @property
    def all_spaces(self) -> list[SavedSpace]:
        return [space for part in self.spaces.values() for space in part]

    @property
    def stored_bytes(self) -> int:
        return sum(tensor[1] for space in self.all_spaces for tensor in space.tensors)

    def part(self, name: str, memory: dict[str, Any]) -> SavedPart:
        return SavedPart(self.layouts[name], memory[name], self.spaces[name])


# --- files ---


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replaces the file, durably and as a whole."""
    text = json.dumps(content, separators=(",", ":"))
    whole = {"format": FORMAT, "version": VERSION, "crc32": zlib.crc32(text.encode())}
    data = json.dumps(whole)[:-1] + ', "content": ' + text + "}\n"
    with NewFile(path, permissions=0o600) as new, Handle() as handle:
        handle.write_now(data.encode(), new.file)
        new.commit()


def read_json(path: Path) -> dict[str, Any]:
    """Raises Unusable for what write_json() has not written."""
    try:
        whole = json.loads(path.read_text())
        if whole["format"] != FORMAT:
            raise KeyError("format")
        version, crc, content = whole["version"], whole["crc32"], whole["content"]
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{path} is damaged, or not part of a snapshot: use another one") from error
    if version != VERSION:
        raise Unusable(
            f"{path} has format {version}, and this tensorferry reads {VERSION}: use the "
            "tensorferry that wrote it"
        )
    text = json.dumps(content, separators=(",", ":"))
    if zlib.crc32(text.encode()) != crc:
        raise Damaged(f"{path} is damaged, its checksum is wrong: use another snapshot")
    found: dict[str, Any] = content
    return found


def manifest_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def memory_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.pt"


def links_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.links"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_json(manifest_path(folder, manifest.rank), asdict(manifest))


def read_manifest(folder: Path, rank: int) -> Manifest:
    path = manifest_path(folder, rank)
    content = read_json(path)
    try:
        spaces = {
            name: [
                SavedSpace(
                    one["name"],
                    one["files"],
                    [
                        (key, nbytes, [(file, at, n) for file, at, n in extents], checksum)
                        for key, nbytes, extents, checksum in one["tensors"]
                    ],
                )
                for one in part
            ]
            for name, part in content["spaces"].items()
        }
        return Manifest(content["rank"], content["ranks"], content["layouts"], spaces)
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(f"{path} is not the manifest of a snapshot: use another snapshot") from error


def make(folder: Path) -> None:
    """Makes a folder, and those above it, durably."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for one in missing:
        sync(one.parent)


def sync(folder: Path) -> None:
    """Makes the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# --- snapshots ---


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Inside, no other process takes or drops snapshots in this folder."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OSError(
                errno.EBUSY,
                "another process is taking or dropping a snapshot there: try again, and give each "
                "run a folder of its own",
                str(path),
            ) from error
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def in_use(snapshot: Snapshot) -> Iterator[None]:
    """Inside, nobody drops the snapshot. Raises Unusable if somebody has."""
    with contextlib.ExitStack() as opened:
        try:
            file = opened.enter_context(open(Path(snapshot.path) / COMMIT, "rb"))
            fcntl.flock(file, fcntl.LOCK_SH)
            dropped = os.fstat(file.fileno()).st_nlink == 0
        except FileNotFoundError:
            dropped = True
        if dropped:
            raise Unusable(f"{snapshot.path} has been dropped meanwhile: use another snapshot")
        yield


def is_in_use(snapshot: Snapshot) -> bool:
    """Whether somebody reads it at this moment."""
    with contextlib.suppress(FileNotFoundError):
        with open(Path(snapshot.path) / COMMIT, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False


def uncommit(folder: Path) -> bool:
    """From now on the snapshot is not whole any more, also after a power cut: the first step of
    dropping it. Returns False, and does nothing, if somebody reads it now."""
    with contextlib.ExitStack() as opened:
        with contextlib.suppress(FileNotFoundError):
            file = opened.enter_context(open(folder / COMMIT, "rb"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            (folder / COMMIT).unlink()  # who waits for the lock sees that
        sync(folder)
    return True


def look(path: Path) -> tuple[list[Snapshot], dict[str, Unusable]]:
    """The whole snapshots in a folder, oldest first, and what is wrong with others, by name."""
    found, problems = [], {}
    for folder in path.iterdir() if path.is_dir() else ():
        if folder.is_symlink():  # a second name for a snapshot
            continue
        try:
            found.append(_snapshot(folder, read_json(folder / COMMIT)))
        except (FileNotFoundError, NotADirectoryError):
            pass
        except PermissionError:  # lost+found
            if folder.stat().st_uid == os.geteuid():
                raise
        except Unusable as error:
            if is_ours(folder):
                problems[folder.name] = error
    return sorted(found, key=lambda snapshot: snapshot.number), problems


def _snapshot(folder: Path, record: dict[str, Any]) -> Snapshot:
    try:
        return Snapshot(str(folder), **record | {"name": folder.name})
    except TypeError as error:
        raise Damaged(f"{folder / COMMIT} is no record of a snapshot: use another one") from error


def find(path: Path) -> list[Snapshot]:
    """The whole snapshots in a folder, oldest first. Those that are damaged are left out."""
    return look(path)[0]


def named(found: list[Snapshot], path: Path, name: str) -> Snapshot:
    """The one of that name. Raises Unusable if there is none."""
    chosen = next((one for one in found if one.name == name), None)
    if chosen is None:
        others = ", ".join(one.name for one in found) or "none"
        raise Unusable(f"{path} has no snapshot '{name}': it has {others}")
    return chosen


def existing(path: Path, name: str | None) -> Snapshot:
    """The snapshot of that name, or the newest. Raises Unusable if there is none."""
    found, problems = look(path)
    if name is not None:
        return named(found, path, name)
    if not found:
        raise next(iter(problems.values()), Unusable(f"{path} has no snapshot"))
    return found[-1]


def is_ours(folder: Path) -> bool:
    """Whether take() has made the folder: it first writes where names of swap files will be."""
    for links in folder.glob("rank-*.links"):
        with contextlib.suppress(Unusable, OSError):
            read_json(links)
            return True
    return False


def is_free(folder: Path) -> bool:
    """Whether a snapshot may take this name: nothing is there, or what a take() left that was
    killed as it began."""
    if not os.path.lexists(folder):
        return True
    whole = not folder.is_symlink() and folder.is_dir()
    return whole and all(_HIDDEN.fullmatch(file.name) for file in folder.iterdir())


def remains(path: Path) -> list[Path]:
    """Folders of snapshots that were never finished, or were dropped in part. They are not whole
    after a power cut either."""
    found = [
        folder
        for folder in path.iterdir()
        if not folder.is_symlink()
        and folder.is_dir()
        and not os.path.lexists(folder / COMMIT)
        and is_ours(folder)
    ]
    for folder in found:
        sync(folder)
    return found


def write_links(folder: Path, rank: int, prefix: str, directories: list[str]) -> None:
    """Says where names of swap files are going to be made, so that they can be removed."""
    write_json(links_path(folder, rank), {"prefix": prefix, "directories": directories})


def drop(path: Path, name: str) -> None:
    """See tensorferry.snapshot.drop()."""
    with locked(path):
        found, problems = look(path)
        own = path / name if name in problems else Path(named(found, path, name).path)
        if not uncommit(own):
            raise OSError(errno.EBUSY, "another process is reading this snapshot", str(own))
        remove_rest(own)
        trim(path)


def remove_links(folder: Path, rank: int | None = None) -> None:
    """Removes the names of swap files that a rank, or each one, has made. Drives that are not
    mounted keep theirs."""
    for links in folder.glob("rank-*.links" if rank is None else f"rank-{rank}.links"):
        with contextlib.suppress(Unusable):
            place = read_json(links)
            for directory in place["directories"]:
                own = Path(directory) / f"tensorferry-snapshots-{os.geteuid()}"
                for name in own.glob(f"{place['prefix']}.*"):
                    name.unlink(missing_ok=True)


def remove_rest(folder: Path) -> None:
    """Removes what is left of a snapshot without a commit record, and nothing that is not ours. The
    files that mark it as ours go last."""
    remove_links(folder)
    ours = [file for file in folder.iterdir() if _OURS.fullmatch(file.name)]
    for file in sorted(ours, key=lambda file: file.name.endswith(".links")):
        file.unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()
    sync(folder.parent)


def trim(path: Path) -> None:
    """Frees the space of swap files that no snapshot in this folder needs: what a run had besides,
    and what dropped snapshots had. Leaves files of living runs alone."""
    kept: dict[tuple[int, int], tuple[str, list[tuple[int, int]], int]] = {}
    for snapshot in find(path):
        for rank in range(snapshot.ranks):
            try:
                manifest = read_manifest(Path(snapshot.path), rank)
            except (Unusable, OSError):
                return
            for space in manifest.all_spaces:
                _add_kept(space, kept)
    for file, extents, names in kept.values():
        with contextlib.suppress(OSError):
            trim_snapshot_file(file, extents, names)


def _add_kept(
    space: SavedSpace, kept: dict[tuple[int, int], tuple[str, list[tuple[int, int]], int]]
) -> None:
    for number, file in enumerate(space.files):
        with contextlib.suppress(OSError):
            facts = os.stat(file)
            own = [
                place[1:] for tensor in space.tensors for place in tensor[2] if place[0] == number
            ]
            inode = (facts.st_dev, facts.st_ino)
            _, extents, names = kept.get(inode, (file, [], 0))
            kept[inode] = (file, extents + own, names + 1)
