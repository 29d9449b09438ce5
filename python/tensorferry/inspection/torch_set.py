"""Opens sets of files of torch.save that an index names, as transformers has written them."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator

from .tensors import Check, Checkpoint, Unusable
from .torch_file import open_torch_file


def names_torch_files(index: str) -> bool:
    """Whether an index is one of torch files: `pytorch_model.bin.index.json`."""
    return not index.endswith(".safetensors.index.json") and any(
        not name.endswith(".safetensors") for name in _files(index)
    )


def open_torch_set(index: str, shown: str) -> Checkpoint:
    """Opens all files that the index names."""
    folder = os.path.dirname(index)
    parts = [open_torch_file(os.path.join(folder, name)) for name in _files(index)]

    def checks() -> Iterator[Check]:
        return itertools.chain.from_iterable(part.checks() for part in parts)

    tensors = [tensor for part in parts for tensor in part.tensors]
    objects = [one for part in parts for one in part.objects]
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise Unusable(f"{index}: two of its files have a tensor of the same name")
    return Checkpoint(shown, "torch", tensors, checks, objects)


def _files(index: str) -> list[str]:
    """The names of the files, which lie beside the index."""
    try:
        with open(index, "rb") as file:
            names = set(json.load(file)["weight_map"].values())
        if all(isinstance(name, str) and name == os.path.basename(name) for name in names):
            return sorted(names)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    raise Unusable(
        f"{index}: is not an index: it needs a weight_map from tensors to names of files beside it"
    )
