"""Taking a snapshot."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import checkpoint
from .._core import PriorityScope, SwapSpace
from .._memory.snapshot_part import SavedSpace, SnapshotPart
from ..offload import snapshots as of_models
from . import folder, ranks
from .folder import Manifest, Snapshot
from .kinds import bare
from .plain import check_plain
from .random_states import random_states

if TYPE_CHECKING:
    from .kinds import Stateful
    from .verifying import Priority


def take(
    path: Path,
    model: torch.nn.Module | None,
    optimizer: Stateful | None,
    scheduler: Stateful | None,
    scaler: Stateful | None,
    extra: object,
    name: str | None,
    keep: int | None,
    priority: Priority,
) -> Snapshot:
    """See tensorferry.snapshot.take()."""
    check_plain("extra", extra)
    optimizer = bare(optimizer)
    rank, count = ranks.own_rank(), ranks.rank_count()
    with contextlib.ExitStack() as at_end:
        rests: list[Path] = []
        older: list[Snapshot] = []
        going: list[Snapshot] = []
        made_folder = (0, "", "")
        with ranks.all_or_none("to begin a snapshot"):
            if rank == 0:
                folder.make(path)
                at_end.enter_context(folder.locked(path))
                rests, older = folder.remains(path), folder.find(path)
            parts = _parts(model, optimizer)
        rests, older = ranks.from_first((rests, older))
        _remove(rests, rank)
        with ranks.all_or_none("to make the folder of a snapshot"):
            if rank == 0:
                made_folder = _make(path, older, name)
                going = [one for one in _going(older, keep) if not folder.is_in_use(one)]
            for part in parts.values():
                for space, _ in part.spaces:
                    _forget_dropped(space)
        (number, own_name, identity), going = ranks.from_first((made_folder, going))
        into = path / own_name
        taking = _Taking(into, rank, identity, priority)
        try:
            with ranks.all_or_none("a snapshot"):
                memory = {"random": random_states(), "extra": extra}
                for key, one in (("scheduler", scheduler), ("scaler", scaler)):
                    if one is not None:
                        memory[key] = one.state_dict()
                manifest = taking.run(parts, memory, count, older, going)
            taking.committing = True
            totals = ranks.gathered((manifest.stored_bytes, taking.memory_bytes))
            with ranks.all_or_none("to commit a snapshot"):
                made = Snapshot(
                    str(into),
                    own_name,
                    number,
                    ranks.from_first(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())),
                    count,
                    sum(stored for stored, _ in totals),
                    sum(in_memory for _, in_memory in totals),
                )
                if rank == 0:
                    content = {k: v for k, v in vars(made).items() if k != "path"}
                    folder.write_json(into / folder.COMMIT, content)
        except BaseException:
            taking.undo()
            raise
        _drop(going, [space for part in parts.values() for space, _ in part.spaces], path, rank)
    return made


def _parts(model: torch.nn.Module | None, optimizer: Stateful | None) -> dict[str, SnapshotPart]:
    """What the holders of tensors give. Waits for their writes."""
    parts = {}
    if model is not None:
        parts["model"] = of_models.part_of(model)
    if optimizer is not None:
        if hasattr(optimizer, "snapshot_part"):
            parts["optimizer"] = optimizer.snapshot_part()
        else:
            parts["optimizer"] = SnapshotPart({}, optimizer.state_dict())
    return parts


def _forget_dropped(space: SwapSpace) -> None:
    """Lets a space use again what snapshots kept that another process has dropped since."""
    if not all(Path(own).is_dir() for own in space.directories):
        return  # the drive has been moved: the names are somewhere else
    folders = {
        _directory(own) / f"tensorferry-snapshots-{os.geteuid()}" for own in space.directories
    }
    for name in space.snapshots():
        if not any(any(own.glob(f"{name}.*")) for own in folders):
            space.drop_snapshot(name)


def _directory(own: str) -> Path:
    """The directory that the user gave: <directory>/tensorferry-swap-<uid>/<run> is ours."""
    return Path(own).resolve().parents[1]


def _going(older: list[Snapshot], keep: int | None) -> list[Snapshot]:
    """The snapshots that are dropped when the new one is whole."""
    return [] if keep is None else older[: max(len(older) - keep + 1, 0)]


def _make(path: Path, older: list[Snapshot], name: str | None) -> tuple[int, str, str]:
    """Makes the folder. Returns (number, name, a name for files that no other snapshot has)."""
    number = older[-1].number + 1 if older else 1
    while name is None and not folder.is_free(path / _usual_name(number)):
        number += 1  # a damaged snapshot, or what somebody else keeps there
    own_name = name or _usual_name(number)
    if not folder.is_free(path / own_name):
        hint = "a snapshot or a folder of that name exists: choose another name"
        raise FileExistsError(errno.EEXIST, hint, str(path / own_name))
    (path / own_name).mkdir(exist_ok=True)
    folder.sync(path)
    return number, own_name, secrets.token_hex(8)


def _usual_name(number: int) -> str:
    return f"snapshot-{number:08d}"


def _drop(going: list[Snapshot], spaces: list[SwapSpace], path: Path, rank: int) -> None:
    """Drops snapshots, but for those that another process reads now. When no power cut can bring
    them back, the spaces use again what they kept."""
    with ranks.all_or_none("to drop older snapshots"):
        if rank == 0:
            going = [one for one in going if folder.uncommit(Path(one.path))]
    going = ranks.from_first(going)
    for snapshot in going:
        for name in _space_names(snapshot, rank):
            for space in spaces:
                space.drop_snapshot(name)
    _remove([Path(snapshot.path) for snapshot in going], rank)
    if rank == 0 and going:
        folder.trim(path)


def _remove(rests: list[Path], rank: int) -> None:
    """Removes snapshots that are not committed: each rank the names on its own drives first."""
    with ranks.all_or_none("to remove the rest of a snapshot"):
        for rest in rests:
            folder.remove_links(rest, rank)
    with ranks.all_or_none("to remove the rest of a snapshot"):
        for rest in rests if rank == 0 else ():
            folder.remove_rest(rest)


def _space_names(snapshot: Snapshot, rank: int) -> list[str]:
    try:
        manifest = folder.read_manifest(Path(snapshot.path), rank)
    except (OSError, folder.Unusable):
        return []
    return [space.name for space in manifest.all_spaces]


class _Taking:
    """What one rank does, and how it is undone."""

    def __init__(self, into: Path, rank: int, identity: str, priority: Priority) -> None:
        self._into = into
        self._priority = priority
        self._rank = rank
        self._prefix = f"{identity}.{rank}"
        self._taken: list[tuple[SwapSpace, str]] = []
        self.committing = False
        self.memory_bytes = 0

    def run(
        self,
        parts: dict[str, SnapshotPart],
        memory: dict[str, Any],
        count: int,
        older: list[Snapshot],
        going: list[Snapshot],
    ) -> Manifest:
        """Makes everything durable, the manifest last."""
        memory = memory | {name: part.memory for name, part in parts.items()}
        spaces = [space for part in parts.values() for space, _ in part.spaces]
        self._write_links(spaces, older)
        file = folder.memory_path(self._into, self._rank)
        checkpoint.save(memory, file)
        self.memory_bytes = os.path.getsize(file)
        replaced = [name for one in going for name in _space_names(one, self._rank)]
        manifest = Manifest(
            self._rank,
            count,
            {name: part.layout for name, part in parts.items()},
            {name: [] for name in parts},
        )
        given = [
            (name, f"{self._prefix}.{name}-{number}", space, keys)
            for name, part in parts.items()
            for number, (space, keys) in enumerate(part.spaces)
        ]
        with ThreadPoolExecutor(max(len(given), 1)) as threads:  # all drives sync at once
            saving = [threads.submit(self._snapshot, *one[1:], replaced) for one in given]
            wait(saving)  # if that is interrupted, leaving `with` waits on
        for (name, *_), saved in zip(given, saving):
            manifest.spaces[name].append(saved.result())
        folder.write_manifest(self._into, manifest)
        return manifest

    def _snapshot(
        self, own: str, space: SwapSpace, keys: list[str], replaced: list[str]
    ) -> SavedSpace:
        self._taken.append((space, own))
        with PriorityScope(self._priority):
            files, tensors = space.snapshot(own, keys, replaced)
        return SavedSpace(own, files, tensors)

    def _write_links(self, spaces: list[SwapSpace], older: list[Snapshot]) -> None:
        directories = {str(_directory(own)) for space in spaces for own in space.directories}
        for snapshot in older:
            with contextlib.suppress(OSError, folder.Unusable):
                manifest = folder.read_manifest(Path(snapshot.path), self._rank)
                for space in manifest.all_spaces:
                    directories |= {str(Path(file).parents[1]) for file in space.files}
        folder.write_links(self._into, self._rank, self._prefix, sorted(directories))

    def undo(self) -> None:
        """Frees what nobody else needs. The next snapshot removes what this leaves: all of it, if
        the snapshot may be whole."""
        if self.committing and not self._taken_back():
            return
        for space, name in self._taken:
            with contextlib.suppress(OSError):
                space.drop_snapshot(name)
        with contextlib.suppress(OSError):
            folder.remove_links(self._into, self._rank)
            if self._rank == 0:
                folder.remove_rest(self._into)

    def _taken_back(self) -> bool:
        """Only the first rank knows whether there is a commit record."""
        with contextlib.suppress(OSError):
            return self._rank == 0 and folder.uncommit(self._into)
        return False
