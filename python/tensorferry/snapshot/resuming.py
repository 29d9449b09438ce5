"""Resuming from a snapshot."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import checkpoint
from .._memory.snapshot_part import Differs
from ..offload import snapshots as of_models
from . import folder, ranks
from .folder import Manifest, Snapshot
from .kinds import Resumed
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
    with ranks.all_or_none("to find a snapshot"):
        chosen = folder.choose(path, name)
    chosen = ranks.from_first(chosen)
    if chosen is None:
        return None
    rank, count = ranks.own_rank(), ranks.rank_count()
    if chosen.ranks != count:
        raise Differs(
            f"{chosen.path} was taken by {chosen.ranks} ranks, and this run has {count}: start as "
            "many"
        )
    with ranks.all_or_none("to resume from a snapshot"):
        if rank == 0:
            with contextlib.suppress(OSError), folder.locked(path):
                folder.trim(path)
        manifest = folder.read_manifest(Path(chosen.path), rank)
        memory = checkpoint.load(folder.memory_path(Path(chosen.path), rank), map_location="cpu")
        given = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        _check_parts(chosen, memory, given)
        _resume_parts(manifest, memory, model, optimizer)
        for key, one in (("scheduler", scheduler), ("scaler", scaler)):
            if one is not None:
                one.load_state_dict(memory[key])
        set_random_states(memory["random"])
    return Resumed(chosen, memory["extra"])


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
