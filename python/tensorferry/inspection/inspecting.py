"""`tensorferry checkpoint inspect`: which tensors a checkpoint has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .opening import open_checkpoint
from .tensors import Checkpoint, StoredObject
from .text import plural, shown, size_text, table

_OBJECTS_SHOWN = 5
_DIGITS_SHOWN = 16


def inspect(paths: Sequence[str], as_json: bool) -> tuple[int, Any]:
    """Returns the exit status, and what to print: a text, or an object for JSON."""
    opened = [open_checkpoint(path) for path in paths]
    if as_json:
        return 0, {"checkpoints": [_described(checkpoint) for checkpoint in opened]}
    return 0, "\n\n".join(map(_text, opened))


def headline(checkpoint: Checkpoint) -> str:
    """ "model.safetensors: safetensors, 1 file"."""
    files = plural(len(checkpoint.files), "file")
    return f"{shown(checkpoint.path)}: {checkpoint.format}, {files}"


def objects_text(objects: list[StoredObject]) -> str:
    """ "step (int), config (dict) and 3 more"."""
    names = [f"{shown(one.name)} ({shown(one.kind)})" for one in objects[:_OBJECTS_SHOWN]]
    more = f" and {len(objects) - _OBJECTS_SHOWN} more" if len(objects) > _OBJECTS_SHOWN else ""
    return ", ".join(names) + more


def _described(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "path": checkpoint.path,
        "format": checkpoint.format,
        "files": checkpoint.files,
        "elements": sum(tensor.elements for tensor in checkpoint.tensors),
        "bytes": checkpoint.bytes,
        "metadata": checkpoint.metadata,
        "tensors": [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "bytes": tensor.bytes,
                "checksum": tensor.checksum,
                "places": [box._asdict() for box in tensor.boxes],
            }
            for tensor in checkpoint.tensors
        ],
        "objects": [one._asdict() for one in checkpoint.objects],
    }


def _checksum_text(checksum: str | None) -> str:
    """The first digits; of a tensor of several chunks, how many there are."""
    if checksum is None:
        return "-"
    kind, _, digits = checksum.partition(":")
    more = len(digits) // _DIGITS_SHOWN - 1
    return f"{kind} {digits[:_DIGITS_SHOWN]}" + (f" +{more}" if more > 0 else "")


def _text(checkpoint: Checkpoint) -> str:
    rows = [
        (
            shown(tensor.name),
            tensor.dtype,
            " × ".join(map(str, tensor.shape)) or "scalar",
            size_text(tensor.bytes),
            _checksum_text(tensor.checksum),
        )
        for tensor in checkpoint.tensors
    ]
    lines = [headline(checkpoint)]
    if rows:
        lines += ["", table(("tensor", "dtype", "shape", "size", "checksum"), rows, "shape size")]
    lines += ["", _totals(checkpoint)]
    if checkpoint.objects:
        count = plural(len(checkpoint.objects), "object")
        lines.append(f"Besides, {count}: {objects_text(checkpoint.objects)}.")
    if checkpoint.metadata:
        entries = (f"{shown(key)}={shown(value)}" for key, value in checkpoint.metadata.items())
        lines.append("Metadata: " + ", ".join(entries))
    return "\n".join(lines)


def _totals(checkpoint: Checkpoint) -> str:
    """All tensors together, and by dtype."""
    of_dtype: dict[str, int] = {}
    for tensor in checkpoint.tensors:
        of_dtype[tensor.dtype] = of_dtype.get(tensor.dtype, 0) + tensor.bytes
    elements = plural(sum(tensor.elements for tensor in checkpoint.tensors), "element")
    total = size_text(checkpoint.bytes)
    text = f"{plural(len(checkpoint.tensors), 'tensor')}, {elements}, {total}"
    if len(of_dtype) > 1:
        by_size = sorted(of_dtype.items(), key=lambda item: -item[1])
        text += ": " + ", ".join(f"{dtype} {size_text(count)}" for dtype, count in by_size)
    return text + "."
