"""`tensorferry checkpoint convert`: writes the tensors of a checkpoint in another format.

Tensors pass in windows from one file to the other, so a checkpoint of any size needs the same
memory. The new checkpoint takes its name when all of it is on the drive.
"""

from __future__ import annotations

import os
from typing import Any

from .dtypes import in_safetensors, torch_dtype
from .inspecting import objects_text
from .opening import open_checkpoint
from .tensors import Checkpoint, Unusable
from .text import Bar, plural, shown, size_text

_TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")


def convert(
    source: str, target: str, to: str | None, *, without_objects: bool, as_json: bool
) -> tuple[int, Any]:
    """Returns the exit status, and what to print: a text, or an object for JSON."""
    checkpoint = open_checkpoint(source)
    to = to or _format_named(target)
    _check_target(checkpoint, target, to)
    if checkpoint.objects and not without_objects:
        raise Unusable(
            f"{source}: has {plural(len(checkpoint.objects), 'object')} beside tensors: "
            f"{objects_text(checkpoint.objects)}; to leave them out, add --without-objects"
        )
    with Bar("Converting", checkpoint.bytes) as bar:
        if to == "safetensors":
            from .safetensors_output import write_safetensors

            write_safetensors(checkpoint, target, bar.add)
        elif to == "torch":
            from .torch_output import write_torch_file

            write_torch_file(checkpoint, target, bar.add)
        else:
            from .dcp_output import write_dcp_folder

            write_dcp_folder(checkpoint, target, bar.add)
    left_out = [one.name for one in checkpoint.objects]
    if as_json:
        return 0, {
            "source": source,
            "target": target,
            "format": to,
            "tensors": len(checkpoint.tensors),
            "bytes": checkpoint.bytes,
            "left_out": left_out,
        }
    tensors = plural(len(checkpoint.tensors), "tensor")
    text = f"{shown(target)}: {to}, {tensors}, {size_text(checkpoint.bytes)}"
    if left_out:
        text += f"\nLeft out: {objects_text(checkpoint.objects)}"
    return 0, text


def _format_named(target: str) -> str:
    """The format that the name of the target asks for."""
    if target.endswith(".safetensors"):
        return "safetensors"
    if target.endswith(_TORCH_ENDINGS):
        return "torch"
    if target.endswith(".index.json"):
        raise Unusable(f"{target}: convert writes one file, not a set; give a name.safetensors")
    if os.path.isdir(target) or target.endswith("/") or not os.path.splitext(target)[1]:
        return "dcp"
    raise Unusable(
        f"{target}: its name does not say which format to write: add --to safetensors, torch or dcp"
    )


def _check_target(checkpoint: Checkpoint, target: str, to: str) -> None:
    """Refuses what could not be written, before any byte is."""
    if os.path.exists(target):
        sources = (checkpoint.path, *checkpoint.files)
        if any(os.path.samefile(path, target) for path in sources):
            raise Unusable(f"{target}: is the source; give another target")
    if to != "dcp" and (os.path.isdir(target) or target.endswith("/")):
        raise Unusable(f"{target}: is a folder, and the format {to} is a file; give its name")
    if to == "dcp" and os.path.exists(target):
        if not os.path.isdir(target):
            raise Unusable(f"{target}: is a file, and the format dcp is a folder")
        names = os.listdir(target)
        if names and ".metadata" not in names:
            raise Unusable(f"{target}: has other files than a checkpoint; give an empty folder")
    for tensor in checkpoint.tensors:
        if to == "safetensors" and not in_safetensors(tensor.dtype):
            raise Unusable(
                f"{checkpoint.path}: {tensor.name} is {tensor.dtype}, which safetensors files do "
                "not have; convert it with torch first, or choose another format"
            )
        if to != "safetensors" and torch_dtype(tensor.dtype) is None:
            raise Unusable(
                f"{checkpoint.path}: {tensor.name} is {tensor.dtype}, which torch does not have"
            )
