"""Finds out which format a checkpoint has."""

from __future__ import annotations

import os

from .safetensors_files import open_safetensors
from .tensors import Checkpoint, Unusable
from .torch_file import open_torch_file
from .torch_set import names_torch_files, open_torch_set

_INDEX = ".index.json"
_TORCH_FILE = b"PK\3\4"
_OLD_TORCH_FILES = (b"\x80\x02", b"\x80\x03", b"\x80\x04")


def open_checkpoint(path: str) -> Checkpoint:
    """Opens a file, or a folder. Reads no tensors.

    Raises Unusable if it is not a checkpoint, and OSError if it is damaged or cannot be read.
    """
    if os.path.isdir(path):
        return _open_folder(path)
    if not os.path.isfile(path):
        raise Unusable(f"{path}: is neither a file nor a folder")
    if path.endswith(_INDEX):
        return _open_index(path, path)
    with open(path, "rb") as file:
        start = file.read(16)
    if start[:4] == _TORCH_FILE:
        return open_torch_file(path)
    if path.endswith(".safetensors") or start[8:9] == b"{":
        return open_safetensors(path, path)
    if start[:2] in _OLD_TORCH_FILES:
        raise Unusable(
            f"{path}: is a pickle, perhaps of a torch before 1.6: load it with "
            "torch.load and save it again"
        )
    raise Unusable(
        f"{path}: is not a checkpoint that we know: give a safetensors file, its index, a file of "
        "torch.save, or a folder of torch.distributed.checkpoint"
    )


def _open_index(index: str, shown: str) -> Checkpoint:
    return (open_torch_set if names_torch_files(index) else open_safetensors)(index, shown)


def _open_folder(path: str) -> Checkpoint:
    names = sorted(os.listdir(path))
    if ".metadata" in names or any(name.endswith(".metadata") for name in names):
        # It imports torch, which takes seconds.
        from .dcp_folder import open_dcp_folder

        return open_dcp_folder(path)
    indexes = [name for name in names if name.endswith(_INDEX)]
    files = [name for name in names if name.endswith(".safetensors")]
    if len(indexes) > 1:
        raise Unusable(f"{path}: has {len(indexes)} indexes: give one of {', '.join(indexes)}")
    if indexes:
        return _open_index(os.path.join(path, indexes[0]), path)
    if len(files) == 1:
        return open_safetensors(os.path.join(path, files[0]), path)
    if files:
        from .dcp_folder import open_safetensors_folder

        return open_safetensors_folder(path)
    raise Unusable(
        f"{path}: has no checkpoint: no .metadata of torch.distributed.checkpoint, and no "
        "safetensors files; give a folder that has, or a file"
    )
