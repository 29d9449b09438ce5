"""Resuming from a snapshot."""

from __future__ import annotations

import contextlib
import errno
import pickle
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import checkpoint
from .._memory.snapshot_part import Differs
from ..offload import snapshots as of_models
from . import folder, ranks
from .folder import Manifest, Snapshot
from .kinds import Resumed, bare
from .random_states import set_random_states
from .reading import Reader

if TYPE_CHECKING:
    from .kinds import Stateful


def resume(
    path: Path,
    model: torch.nn.Module | None,
    optimizer: Stateful | None,
    scheduler: Stateful | None,
    scaler: Stateful | None,
    name: str | None,
) -> Resumed | None:
    """See tensorferry.snapshot.resume()."""
    optimizer = bare(optimizer)
    rank, count = ranks.own_rank(), ranks.rank_count()
    choice: tuple[list[Snapshot], list[str]] = ([], [])
    with ranks.all_or_none("to find a snapshot"):
        if rank == 0:
            choice = _choice(path, name)
    found, problems = ranks.from_first(choice)
    for chosen in found:
        if chosen.ranks != count:
            raise Differs(
                f"{chosen.path} was taken by {chosen.ranks} ranks, and this run has {count}: start "
                "as many"
            )
        with contextlib.ExitStack() as reading:
            manifest: Manifest | None = None
            memory: dict[str, Any] = {}
            with ranks.all_or_none("to read a snapshot"):
                problem = None
                try:
                    reading.enter_context(folder.in_use(chosen))
                    manifest, memory = _read(chosen, rank)
                except folder.Damaged as error:
                    problem = str(error)
            damaged = [text for text in ranks.gathered(problem) if text is not None]
            problems += damaged
            if damaged or manifest is None:
                continue
            if problems and rank == 0:
                warnings.warn(f"{problems[0]}. This run goes on from {chosen.path}", stacklevel=3)
            with ranks.all_or_none("to resume from a snapshot"):
                if rank == 0:
                    with contextlib.suppress(OSError), folder.locked(path):
                        folder.trim(path)
                given = dict(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
                _check_parts(chosen, memory, given)
                _resume_parts(manifest, memory, model, optimizer)
                for key, one in (("scheduler", scheduler), ("scaler", scaler)):
                    if one is not None:
                        one.load_state_dict(memory[key])
                set_random_states(memory["random"])
            return Resumed(chosen, memory["extra"])
    if problems:
        raise folder.Unusable("; ".join(problems))
    return None


def _choice(path: Path, name: str | None) -> tuple[list[Snapshot], list[str]]:
    """The snapshots to try, the newest first, and what is damaged already."""
    found, problems = folder.look(path)
    if name is not None:
        return [folder.named(found, path, name)], []
    for problem in problems.values():
        if not isinstance(problem, folder.Damaged):
            raise problem  # a later tensorferry has taken it: it may be the newest
    return found[::-1], [str(problem) for problem in problems.values()]


def _read(chosen: Snapshot, rank: int) -> tuple[Manifest, dict[str, Any]]:
    """Raises Damaged for bytes that have changed."""
    file = folder.memory_path(Path(chosen.path), rank)
    try:
        manifest = folder.read_manifest(Path(chosen.path), rank)
        return manifest, checkpoint.load(file, map_location="cpu")
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EBADMSG):
            raise folder.Damaged(f"{chosen.path} is damaged: {error}") from error
        raise
    except (ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        if isinstance(error, folder.Unusable):
            raise
        raise folder.Damaged(f"{file} is damaged: {error}") from error


def _check_parts(chosen: Snapshot, memory: dict[str, Any], given: dict[str, Any]) -> None:
    for name, one in given.items():
        if one is not None and name not in memory:
            raise Differs(f"{chosen.path} has no {name}: take() was given none")


def _resume_parts(
    manifest: Manifest,
    memory: dict[str, Any],
    model: torch.nn.Module | None,
    optimizer: Stateful | None,
) -> None:
    if model is not None:
        with Reader(manifest) as reader:
            of_models.resume(model, manifest.part("model", memory), reader.weight)
    if optimizer is None:
        return
    if hasattr(optimizer, "resume_part"):
        optimizer.resume_part(manifest.part("optimizer", memory))
    else:
        optimizer.load_state_dict(memory["optimizer"])
