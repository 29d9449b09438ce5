"""Reads snapshots without the run that took them: checks them, and exports their weights."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Literal

from .. import checkpoint
from . import folder
from .reading import Reader

Format = Literal["torch", "safetensors", "dcp"]
Priority = Literal["urgent", "normal", "background"]


def verify(path: Path, name: str | None) -> dict[str, int]:
    """See tensorferry.snapshot.verify()."""
    snapshot = folder.existing(path, name)
    counts = {"tensors": 0, "bytes": 0, "without_checksum": 0}
    with folder.in_use(snapshot):
        for rank in range(snapshot.ranks):
            with Reader(folder.read_manifest(Path(snapshot.path), rank)) as reader:
                for key, count in reader.check().items():
                    counts[key] += count
            checkpoint.load(folder.memory_path(Path(snapshot.path), rank), map_location="cpu")
    return counts


def export(
    path: Path, target: Path, name: str | None, rank: int, format: Format | None, priority: Priority
) -> dict[str, int]:
    """See tensorferry.snapshot.export()."""
    if format not in (None, "torch", "safetensors", "dcp"):
        raise ValueError(f"format is {format!r}; it must be 'torch', 'safetensors' or 'dcp'")
    snapshot = folder.existing(path, name)
    if rank >= snapshot.ranks:
        raise folder.Unusable(f"{snapshot.path} has {snapshot.ranks} ranks, and no rank {rank}")
    own = Path(snapshot.path)
    with folder.in_use(snapshot):
        manifest = folder.read_manifest(own, rank)
        if "model" not in manifest.layouts:
            raise folder.Unusable(f"{snapshot.path} has no model: take() was given none")
        layout = manifest.layouts["model"]
        if layout["in_files"]:
            first, places = next(iter(layout["in_files"].items()))
            raise folder.Unusable(
                f"{first} is not part of the snapshot, it is in {places[0][0]}: that is a "
                "checkpoint already"
            )
        memory = checkpoint.load(folder.memory_path(own, rank), map_location="cpu")
        with Reader(manifest) as reader:
            reader.check("model")
            tensors: dict[str, Any] = {
                key: reader.weight(key)
                if key in layout["stored"]
                else memory["model"]["tensors"][key].detach()
                for key in layout["tensors"]
            }
            if format == "dcp":
                _save_distributed(tensors, target, priority)
            else:
                checkpoint.save(tensors, target, format=format)
            return {"tensors": len(tensors), "bytes": sum(t.nbytes for t in tensors.values())}


def _save_distributed(tensors: dict[str, Any], target: Path, priority: Priority) -> None:
    import torch.distributed.checkpoint

    from .. import dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that no other rank takes part
        torch.distributed.checkpoint.save(
            tensors, storage_writer=dcp.Writer(target, priority=priority), no_dist=True
        )
