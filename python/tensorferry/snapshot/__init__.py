"""Snapshots of runs whose weights and states are on NVMe: without a copy, to resume from.

>>> import tensorferry.optim, tensorferry.snapshot, torch
>>> model = torch.nn.Linear(64, 64)
>>> optimizer = tensorferry.optim.AdamW(model.parameters(), lr=1e-3, nvme_path=".")
>>> model(torch.ones(8, 64)).sum().backward()
>>> optimizer.step()
>>> taken = tensorferry.snapshot.take("snapshots", model=model, optimizer=optimizer, keep=2)
>>> tensorferry.snapshot.resume("snapshots", model=model, optimizer=optimizer).snapshot.name
'snapshot-00000001'
>>> optimizer.close()

Tensors that are on the drive stay where they are: a snapshot keeps their extents from being used
again and names them. What is only in memory is written beside. A later process, also after a kill
or a power cut, goes on from the newest snapshot with the same bits.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._core import PriorityScope

# Not torch: who only lists or drops snapshots does not need it.
from . import folder
from .folder import Snapshot, Unusable
from .kinds import Resumed

if TYPE_CHECKING:
    import torch

    from .kinds import Stateful
    from .verifying import Format, Priority

__all__ = ["Resumed", "Snapshot", "Unusable", "drop", "export", "find", "resume", "take", "verify"]

AnyPath = str | os.PathLike[str]


def take(
    path: AnyPath,
    *,
    model: torch.nn.Module | None = None,
    optimizer: Stateful | None = None,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    extra: Any = None,
    name: str | None = None,
    keep: int | None = None,
    priority: Priority = "background",
) -> Snapshot:
    """Takes a snapshot in the folder `path` and returns it when it is durable.

    Call it between steps. It keeps weights, buffers, states, settings of the parameter groups,
    scheduler, scaler, the states of random number generators, and `extra`: numbers, text, tensors,
    lists and dictionaries. Gradients are not part of it. The run goes on at once: what the next
    step writes goes to other places on the drives.

    A snapshot outlives its process. `keep` drops older ones in this folder when the new one is
    whole, so that so many are left; without it, only drop() does. A run needs room on its drives
    for the states, for each snapshot that is kept, and for one more. If that is not there, take()
    raises OSError (ENOSPC); the run and older snapshots are not affected. What is written gives way
    to other operations of the process, unless you name another priority.

    With torch.distributed all ranks call it, with the same `path`, which all of them see. The
    snapshot is whole when all ranks have written their parts.
    """
    if keep is not None and keep < 1:
        raise ValueError(f"keep is {keep}: it must be at least 1, the new snapshot itself")
    if name is not None and (not name or "/" in name or name.startswith(".")):
        raise ValueError(f"{name!r} cannot be the name of a folder: choose another name")
    from . import taking

    with PriorityScope(priority):
        held = model, optimizer, scheduler, scaler
        return taking.take(_absolute(path), *held, extra, name, keep, priority)


def resume(
    path: AnyPath,
    *,
    model: torch.nn.Module | None = None,
    optimizer: Stateful | None = None,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    name: str | None = None,
) -> Resumed | None:
    """Goes on from the newest snapshot in the folder `path`, or from the one of that name. Returns
    None if there is none. If the newest is damaged, it goes on from an older one that is not, and
    warns.

    Make the model and the optimizer as the run did that took it, and move them to the drive; this
    call then replaces all values. It reads what was in memory, and no tensors that are on the
    drive: the first use of each reads it and compares its checksum, if there is one. The snapshot
    itself never changes. Another model, other options of the optimizer, another number of ranks or
    a missing drive raise an error that says what differs.
    """
    from . import resuming

    return resuming.resume(_absolute(path), model, optimizer, scheduler, scaler, name)


def find(path: AnyPath) -> list[Snapshot]:
    """Returns the snapshots in a folder, oldest first, without those that were not finished."""
    return folder.find(_absolute(path))


def verify(
    path: AnyPath, name: str | None = None, *, priority: Priority = "background"
) -> dict[str, int]:
    """Reads all of the newest snapshot in a folder, or of the one of that name, and compares the
    checksums. Beside a run it reads in the background, unless you name another priority. Returns
    how many tensors and bytes it has read and how many tensors have no checksum.
    Raises OSError (EBADMSG) for bytes that have changed, and Unusable if there is no snapshot."""
    from . import verifying

    with PriorityScope(priority):
        return verifying.verify(_absolute(path), name)


def export(
    path: AnyPath,
    target: AnyPath,
    name: str | None = None,
    *,
    rank: int = 0,
    format: Format | None = None,
    priority: Priority = "background",
) -> dict[str, int]:
    """Writes the weights and buffers of a snapshot to a checkpoint: a file of torch.save, or a
    safetensors file if the name ends in ".safetensors" or format="safetensors"; format="dcp" writes
    a folder of torch.distributed.checkpoint. The run may go on meanwhile: reads and writes have the
    priority "background", unless you name another. It reads each tensor once and compares its
    checksum: if one is wrong, `target` stays as it was. Returns how many tensors and bytes it has
    written. With several ranks these are the weights of one of them. For states of an optimizer,
    resume() and save its state_dict()."""
    from . import verifying

    with PriorityScope(priority):
        return verifying.export(_absolute(path), Path(target), name, rank, format, priority)


def drop(path: AnyPath, name: str) -> None:
    """Removes a snapshot and frees its space. If the run that took it still goes on, it uses the
    space again from its next snapshot on."""
    folder.drop(_absolute(path), name)


def _absolute(path: AnyPath) -> Path:
    """A path that stays true when the program changes its directory."""
    return Path(path).absolute()
