"""Reads snapshots without the run that took them: checks them, and exports their weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from .. import checkpoint
from ..inspection.dcp_output import write_dcp_folder
from ..inspection.dtypes import PAIRED, in_safetensors, kind_of_torch
from ..inspection.safetensors_output import write_safetensors
from ..inspection.tensors import Checkpoint, Tensor, row_major
from ..inspection.torch_output import write_torch_file
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
    if not 0 <= rank < snapshot.ranks:
        raise folder.Unusable(f"{snapshot.path} has {snapshot.ranks} ranks, and no rank {rank}")
    if format is None:
        format = "safetensors" if target.name.endswith(".safetensors") else "torch"
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
            tensors = [
                _tensor(key, kind, reader, layout["stored"].get(key), memory["model"]["tensors"])
                for key, kind in layout["tensors"].items()
            ]
            made = Checkpoint(snapshot.path, "torch", tensors, lambda: iter(()))
            _write(made, os.fspath(target), format, priority)
        return {"tensors": len(tensors), "bytes": made.bytes}


def _tensor(
    name: str,
    kind: dict[str, Any],
    reader: Reader,
    stored: dict[str, Any] | None,
    in_memory: dict[str, torch.Tensor],
) -> Tensor:
    """A tensor of the model, as the writers of checkpoints take it."""
    shape = tuple(kind["size"])
    dtype = kind_of_torch(kind["dtype"])
    if dtype is None or dtype == PAIRED:
        raise folder.Unusable(f"{name} is {kind['dtype']}, which cannot be exported")
    if stored is None or 0 in shape:
        fill = _Late(lambda: in_memory[name]).fill
    elif tuple(stored["stride"]) == row_major(shape):
        fill = reader.bytes_of(name).fill
    else:
        fill = _Late(lambda: reader.weight(name)).fill
    return Tensor(name, dtype, shape, (), None, fill)


class _Late:
    """The bytes of a tensor, in the order of its elements. Its memory goes after the last ones."""

    def __init__(self, get: Callable[[], torch.Tensor]) -> None:
        self._get = get
        self._bytes: torch.Tensor | None = None

    def fill(self, begin: int, memory: memoryview) -> None:
        if self._bytes is None:
            self._bytes = self._get().detach().contiguous().view(-1).view(torch.uint8)
        end = begin + len(memory)
        torch.frombuffer(memory, dtype=torch.uint8).copy_(self._bytes[begin:end])
        if end == len(self._bytes):
            self._bytes = None


def _write(made: Checkpoint, target: str, format: Format, priority: Priority) -> None:
    if format == "safetensors":
        unknown = next((one for one in made.tensors if not in_safetensors(one.dtype)), None)
        if unknown is not None:
            raise folder.Unusable(
                f"{unknown.name} is {unknown.dtype}, which safetensors files do not have: choose "
                "another format"
            )
        write_safetensors(made, target, lambda _: None)
    elif format == "torch":
        write_torch_file(made, target, lambda _: None)
    else:
        write_dcp_folder(made, target, lambda _: None, priority)
