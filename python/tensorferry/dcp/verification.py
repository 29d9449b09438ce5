"""Compares a whole checkpoint with its checksums."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from .._progress import Progress
from .folder import metadata_ranks
from .metadata_file import forget_storage
from .reader import Reader


def verify(path: str | os.PathLike[str], *, progress: Progress = None) -> None:
    """Reads a checkpoint and compares all its checksums.

    Raises OSError (EBADMSG) with the path, the item and the offset of the first bytes that differ,
    and whatever a load raises if files are missing or cut off. Unpickles no objects. Needs memory
    for the largest item. safetensors files that have no checksums, as others write them, are only
    read.
    """
    for rank in metadata_ranks(os.fspath(path)):
        reader = Reader(path, weights_only=False, progress=progress)
        metadata = reader.read_metadata(rank=rank)
        for place in metadata.storage_data.values():
            forget_storage(place)  # so that what is around the tensors is compared too
        reader.set_up_storage_reader(metadata, True)
        requests = [_whole(index, metadata) for index in metadata.storage_data]
        reader.read_data(LoadPlan(requests), _Nowhere(metadata))


def _whole(index: MetadataIndex, metadata: Metadata) -> ReadItem:
    tensor = metadata.state_dict_metadata.get(index.fqn)
    none = torch.Size([])
    if not isinstance(tensor, TensorStorageMetadata):
        return ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none)
    sizes = next((c.sizes for c in tensor.chunks if c.offsets == index.offset), tensor.size)
    first = torch.Size([0] * len(sizes))
    return ReadItem(LoadItemType.TENSOR, index, first, index, first, sizes)


class _Nowhere(LoadPlanner):  # type: ignore[misc]  # mypy knows nothing of torch
    """Takes what is read, and keeps nothing."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        tensor = self._metadata.state_dict_metadata[read_item.storage_index.fqn]
        return torch.empty(read_item.lengths, dtype=tensor.properties.dtype)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        pass

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        pass

    def create_local_plan(self) -> LoadPlan:
        raise NotImplementedError

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        raise NotImplementedError

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        raise NotImplementedError
