"""Which tensors of a state_dict share memory, and under which name to save them."""

from __future__ import annotations

import torch

TYPE_CHECKING = False  # as in typing, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Iterable


def storage_ptr(tensor: torch.Tensor) -> int:
    """Returns the address of the storage of a tensor; 0 if it has none."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except Exception:  # a tensor without storage, such as a fake one
        return 0


def storage_size(tensor: torch.Tensor) -> int:
    """Returns the bytes of the storage of a tensor."""
    try:
        return int(tensor.untyped_storage().nbytes())
    except Exception:  # a tensor without storage
        return int(tensor.nelement() * tensor.element_size())


def find_shared_tensors(tensors: dict[str, torch.Tensor]) -> list[set[str]]:
    """Returns the names of all tensors in groups: those of one group overlap in memory."""
    storages: dict[tuple[object, int, int], list[str]] = {}
    for name, tensor in tensors.items():
        place = (tensor.device, storage_ptr(tensor), storage_size(tensor))
        if tensor.device.type != "meta" and place[1] and place[2]:
            storages.setdefault(place, []).append(name)
    groups: list[set[str]] = []
    for names in storages.values():
        end = None
        for begin, stop, name in sorted((*_extent(tensors[name]), name) for name in names):
            if end is None or begin >= end:
                groups.append({name})
            else:
                groups[-1].add(name)
            end = stop  # safetensors looks at neighbours only, too
    return groups


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    if not tensor.nelement():
        return begin, begin
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
    return begin, begin + (last + 1) * tensor.element_size()


def _is_complete(tensor: torch.Tensor) -> bool:
    if tensor.data_ptr() != storage_ptr(tensor):
        return False
    return bool(tensor.nelement() * tensor.element_size() == storage_size(tensor))


def duplicate_names(
    tensors: dict[str, torch.Tensor], preferred: Iterable[str] = ()
) -> dict[str, list[str]]:
    """Returns the names that a file leaves out, by the name under which it has their memory.

    That is one of `preferred` if there is one, else the first of the alphabet.
    """
    found: dict[str, list[str]] = {}
    wanted = set(preferred)
    for shared in find_shared_tensors(tensors):
        complete = {name for name in shared if _is_complete(tensors[name])}
        if not complete:
            raise RuntimeError(
                "Error while trying to find names to remove to save state dict, but found no "
                f"suitable name to keep for saving amongst: {shared}. None is covering the entire "
                "storage. Refusing to save/load the model since you could be storing much more "
                "memory than needed. See https://huggingface.co/docs/safetensors/"
                "torch_shared_tensors"
            )
        kept = min(complete & wanted or complete)
        others = sorted(shared - {kept})
        if others:
            found[kept] = others
    return found
