"""What a snapshot keeps of a model or of an optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .._core import SwapSpace

# (key, bytes, [(number of the file, offset, bytes), ...], checksum)
StoredTensor = tuple[str, int, list[tuple[int, int, int]], int | None]


@dataclass
class SnapshotPart:
    """What a holder of tensors gives to a snapshot."""

    layout: dict[str, Any]  # for JSON: what the run that resumes must have alike
    memory: dict[str, Any]  # what is only in memory: numbers, text and tensors
    spaces: list[tuple[SwapSpace, list[str]]] = field(default_factory=list)  # and the keys there


@dataclass
class SavedSpace:
    """The tensors of one swap space in a snapshot."""

    name: str  # by which the space knows the snapshot
    files: list[str]
    tensors: list[StoredTensor]


@dataclass
class SavedPart:
    """What a holder of tensors gets back from a snapshot."""

    layout: dict[str, Any]
    memory: dict[str, Any]
    spaces: list[SavedSpace]


class Differs(ValueError):
    """A snapshot belongs to another model or to another optimizer."""


def compare(what: str, saved: object, own: object, path: str = "") -> None:
    """Raises Differs with the first difference between two layouts."""
    if isinstance(saved, dict) and isinstance(own, dict):
        for key in [*saved, *(key for key in own if key not in saved)]:
            place = f"{path}.{key}" if path else str(key)
            if key not in own:
                raise Differs(f"the snapshot has {what} {place}, and this run has none")
            if key not in saved:
                raise Differs(f"this run has {what} {place}, and the snapshot has none")
            compare(what, saved[key], own[key], place)
    elif isinstance(saved, list) and isinstance(own, list) and len(saved) == len(own):
        for number, pair in enumerate(zip(saved, own)):
            compare(what, *pair, f"{path}[{number}]")
    elif saved != own:
        raise Differs(f"{what} {path} is {saved} in the snapshot and {own} in this run")
