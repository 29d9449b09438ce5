"""torch.distributed.checkpoint's StorageReader: each rank reads the bytes that it needs."""

from __future__ import annotations

import functools
import io
import itertools
import math
import os
import pickle
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from .._core import SafetensorsFile
from .._progress import Progress, ProgressReport
from .boxes import Box
from .checked_reads import CheckedRead, carry_out_checked
from .checkpoint_folder import CheckpointFolder
from .folder import metadata_name
from .items import Item, opened
from .metadata_file import load_metadata
from .safetensors_set import TensorPlace, has_safetensors, read_set
from .stored_tensor import noted_tensor
from .tensor_reads import PIECES_FROM_BYTES, TensorRead, carry_out


class Reader(CheckpointFolder, StorageReader):  # type: ignore[misc]  # mypy knows nothing of torch
    """Reads checkpoints that Writer or torch's FileSystemWriter wrote, at the speed of the drive.

    Tensors on the CPU and on GPUs of CUDA are filled in place. Of a tensor that is sharded
    otherwise than it was saved, a rank reads the bytes of its shard.

    With `verify`, items that are read whole are compared with their checksums, and rows of items of
    Writer from 1 MiB on with those of their pieces: a difference raises OSError (EBADMSG) with the
    path, the tensor and the offset. Other parts of items have no checksum.

    The metadata file is a pickle, and so are objects that are not tensors. The metadata makes
    objects of a few harmless classes, and nothing else. Objects are loaded as
    torch.load(weights_only=True) does; `weights_only=False` loads any object, and runs what a
    hostile file says.

    `progress=True` prints a bar on the coordinating rank; a function gets (bytes done, bytes in
    all) of its rank, and ends the load if it raises.

    >>> import tensorferry.dcp, torch, torch.distributed.checkpoint as dcp
    >>> state = {"weight": torch.arange(6.0).reshape(2, 3), "step": 7}
    >>> _ = dcp.save(state, storage_writer=tensorferry.dcp.Writer("checkpoint"))
    >>> loaded = {"weight": torch.empty(2, 3), "step": 0}
    >>> dcp.load(loaded, storage_reader=tensorferry.dcp.Reader("checkpoint"))
    >>> loaded["step"], torch.equal(loaded["weight"], state["weight"])
    (7, True)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        weights_only: bool = True,
        verify: bool = True,
        progress: Progress = None,
    ) -> None:
        super().__init__(path)
        self._weights_only = weights_only
        self._verify = verify
        self._progress = progress
        self._load_id = str(uuid.uuid4())
        self._metadata: Metadata | None = None
        self._is_coordinator = True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a load, of another folder if one is given."""
        self._metadata = None
        self._move_to(checkpoint_id)
        self._load_id = str(uuid.uuid4())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the metadata, of all ranks or of the one that `rank` names."""
        path = os.path.join(self._path, metadata_name(kwargs.get("rank")))
        if not os.path.exists(path) and has_safetensors(self._path):
            metadata = read_set(self._path, self._verify)
        else:
            metadata = load_metadata(path)
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self._load_id
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Learns where the items are."""
        self._metadata = metadata
        self._is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Returns the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Returns the plans."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads the items of this rank."""
        assert self._metadata is not None
        items = [self._item(request) for request in plan.items]
        progress = None if self._progress is True and not self._is_coordinator else self._progress
        total = sum(item.wanted_bytes for item in items)
        report = ProgressReport(progress, "load", total)
        done = 0

        def passed(count: int) -> None:
            nonlocal done
            done += count
            report.update(min(done, total))

        checked = sorted(
            (item for item in items if item.checked_by is not None),
            key=lambda item: (item.checked_by, item.path, item.offset),
        )
        for name, group in itertools.groupby(checked, lambda item: item.checked_by):
            source = SafetensorsFile(os.path.join(self._path, str(name)))
            carry_out_checked(source, self._checked_reads(group, planner), passed)
        others = [item for item in items if item.checked_by is None]
        carry_out(self._reads(others, planner), passed)
        report.update(total)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _item(self, request: ReadItem) -> Item:
        assert self._metadata is not None
        place = self._metadata.storage_data[request.storage_index]
        tensor = self._metadata.state_dict_metadata.get(request.storage_index.fqn)
        if not isinstance(tensor, TensorStorageMetadata):
            return Item(request, 0, place, self._path, None)
        wanted = math.prod(request.lengths) * tensor.properties.dtype.itemsize
        if isinstance(place, TensorPlace):
            item = Item(request, wanted, place, self._path, place.tensor)
            if self._verify and wanted == place.length > 0:
                item.checked_by = place.checked_by
            return item
        stored = noted_tensor(tensor, request.storage_index, place)
        if stored is not None and wanted != stored.bytes and wanted >= PIECES_FROM_BYTES:
            stored = None  # a part has checksums that are not noted
        return Item(request, wanted, place, self._path, stored)

    def _checked_reads(self, items: Iterable[Item], planner: LoadPlanner) -> Iterator[CheckedRead]:
        for item in items:
            stored = item.tensor(self._verify)
            assert stored is not None
            item.check_size(stored.size)
            target = _target_of(item, planner)
            filled = functools.partial(planner.commit_tensor, item.request, target)
            yield CheckedRead(item.name, stored, target, filled)

    def _reads(self, items: list[Item], planner: LoadPlanner) -> Iterator[TensorRead]:
        """Loads what is small or no tensor, and returns the reads of the others."""
        for item in opened(items):
            request = item.request
            if request.type == LoadItemType.BYTE_IO:
                planner.load_bytes(request, self._object(item))
                continue
            target = _target_of(item, planner)
            filled = functools.partial(planner.commit_tensor, request, target)
            stored = item.tensor(self._verify)
            if stored is None:
                target.copy_(self._loaded_by_torch(item))
                filled()
                continue
            item.check_size(stored.size)
            box = Box(stored, request.storage_offsets, request.lengths)
            if not box.bytes:
                filled()
                continue
            source = (item.file, item.offset)
            read = TensorRead(box, target, source, item.name, self._verify, filled)
            if read.wants_pieces and (pieces := item.piece_checksums(stored)):
                read.verify_pieces(pieces)
            if item.in_memory is not None:
                read.fill_from(item.in_memory)
            else:
                yield read

    def _loaded_by_torch(self, item: Item) -> torch.Tensor:
        """Returns what a request asks for of a tensor that is more than its bytes."""
        data = item.data(self._verify)
        try:
            loaded = torch.load(data, map_location="cpu", weights_only=True)
        except Exception as error:
            raise item.damaged(f"torch cannot load it: {error}", 0) from error
        item.check_size(loaded.size())
        request = item.request
        for dim, (at, count) in enumerate(zip(request.storage_offsets, request.lengths)):
            if count != loaded.size(dim):
                loaded = loaded.narrow(dim, at, count)
        return loaded

    def _object(self, item: Item) -> io.BytesIO:
        """Returns the bytes of an object for a planner, which unpickles them whatever they say."""
        data = item.data(self._verify)
        if not self._weights_only:
            return data
        try:
            loaded = torch.load(data, weights_only=True)
        except pickle.UnpicklingError as error:
            raise pickle.UnpicklingError(
                f"{item.path}: {item.name} is not a tensor and needs more than weights_only=True "
                "allows. If you trust the file, load it with Reader(path, weights_only=False), or "
                f"allow its classes with torch.serialization.add_safe_globals. {error}"
            ) from None
        except Exception as error:
            raise item.damaged(f"torch cannot load it: {error}", 0) from error
        # The planner gets a pickle that was made here.
        pickled = io.BytesIO()
        torch.save(loaded, pickled)
        pickled.seek(0)
        return pickled


def _target_of(item: Item, planner: LoadPlanner) -> torch.Tensor:
    target = planner.resolve_tensor(item.request).detach()
    if target.size() != torch.Size(item.request.lengths):
        raise ValueError(
            f"{item.name}: the tensor to fill is {tuple(target.size())} and the part of the saved "
            f"one {tuple(item.request.lengths)}"
        )
    return target
