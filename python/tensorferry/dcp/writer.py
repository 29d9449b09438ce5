"""torch.distributed.checkpoint's StorageWriter: each rank writes its items, rank 0 the metadata."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
import uuid
from collections.abc import Callable, Mapping
from multiprocessing import current_process
from typing import Any, Literal

from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from .._core import PriorityScope
from .._progress import Progress, ProgressReport
from .checkpoint_folder import CheckpointFolder
from .data_file import FRAME_BYTES, write_items
from .folder import (
    METADATA,
    alone_in,
    make_folder,
    metadata_name,
    new_data_file_name,
    remove,
    remove_data_files,
    remove_rank_metadata,
    remove_unused,
    sync_folder,
    take_back,
)
from .metadata_file import note_storage, save_metadata
from .safetensors_set import (
    INDEX,
    FileSet,
    make_files,
    publish,
    remove_hidden,
    remove_leftovers,
    write_tensors,
)
from .tensor_frame import TensorFrame

Priority = Literal["urgent", "normal", "background"]


class Writer(CheckpointFolder, StorageWriter):  # type: ignore[misc]  # mypy knows nothing of torch
    """Writes checkpoints that torch's FileSystemReader reads, at the speed of the drive.

    A checkpoint in the folder stays whole until the new one is on the drive, and then gives way to
    it at once, also if ranks are killed on the way. What killed and failed saves leave is removed
    by the next one. Only one save may write to a folder at a time.

    `single_file_per_rank=False` gives each item a file. `overwrite=False` raises FileExistsError if
    the folder has a checkpoint. `progress=True` prints a bar on the coordinating rank; a function
    gets (bytes done, bytes in all) of its rank, and ends the save if it raises.

    `layout="huggingface"` writes whole tensors to safetensors files with an index, as Hugging
    Face's programs read them: every rank writes its shards to their places. Such a checkpoint has
    tensors alone. `fqn_to_index_mapping` says which file a tensor goes to, from 1 on.

    `priority` is that of its writes: "background" for async_save(), which saves on a thread or in a
    process of its own, and "normal" on the main thread, unless you name one.

    The other options are those of torch's FileSystemWriter and have no effect: every file is
    synced, and one thread keeps the drive busy.

    >>> import tensorferry.dcp, torch, torch.distributed.checkpoint as dcp
    >>> state = {"weight": torch.arange(6.0).reshape(2, 3), "step": 7}
    >>> metadata = dcp.save(state, storage_writer=tensorferry.dcp.Writer("checkpoint"))
    >>> sorted(metadata.state_dict_metadata)
    ['step', 'weight']
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 0,
        overwrite: bool = True,
        *,
        progress: Progress = None,
        layout: Literal["torch", "huggingface"] = "torch",
        fqn_to_index_mapping: Mapping[str, int] | None = None,
        priority: Priority | None = None,
    ) -> None:
        super().__init__(path)
        if priority is not None:
            PriorityScope(priority)  # raises if there is no such priority
        if layout not in ("torch", "huggingface"):
            raise ValueError(f"layout is {layout!r}; it must be 'torch' or 'huggingface'")
        self._safetensors = layout == "huggingface"
        self._file_numbers = fqn_to_index_mapping or {}
        self._files: FileSet | None = None  # of the save that goes on, on the coordinating rank
        self._single_file_per_rank = single_file_per_rank
        self._overwrite = overwrite
        self._progress = progress
        self._priority = priority
        self._save_id = str(uuid.uuid4())
        self._rank: int | None = None  # of a rank that saves by itself
        self._is_coordinator = True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a save, to another folder if one is given."""
        self._move_to(checkpoint_id)
        self._save_id = str(uuid.uuid4())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learns which rank this is, and whether ranks save together."""
        self._is_coordinator = is_coordinator
        together = kwargs.get("use_collectives", True)
        self._rank = None if together else kwargs.get("rank")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Makes the folder."""
        make_folder(self._path)
        head = os.path.join(self._path, INDEX) if self._safetensors else self._metadata_path(0)
        if not self._overwrite and os.path.exists(head):
            raise FileExistsError(
                f"{self._path} has a checkpoint; save with overwrite=True, or to another folder"
            )
        if self._rank is None and not self._safetensors:
            return plan
        if os.path.exists(os.path.join(self._path, METADATA)):
            raise FileExistsError(
                f"{self._path} has a checkpoint of all ranks in torch's layout, which readers "
                "would prefer to this one; save to another folder"
            )
        if self._safetensors and self._rank is not None:
            raise ValueError("use_collectives=False needs layout='torch'")
        return dataclasses.replace(plan, storage_data=self._rank)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Removes what earlier saves have left; no rank writes yet."""
        if self._safetensors:
            with alone_in(self._path):
                remove_leftovers(self._path)
            items = [item for plan in plans for item in plan.items]
            self._files = make_files(self._path, items, self._file_numbers)
            return [dataclasses.replace(plan, storage_data=self._files) for plan in plans]
        with alone_in(self._path):
            remove_unused(self._path, self._rank)
        if self._rank is not None:  # it has only its own plan
            return plans
        return [dataclasses.replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes the items of this rank, and returns when they are on the drive.

        If anything fails, this rank removes its new files. All ranks write to the same ones with
        layout="huggingface": it removes all of them.
        """
        progress = None if self._progress is True and not self._is_coordinator else self._progress
        total = sum(map(_bytes_of, plan.items))
        report = ProgressReport(progress, "save", total)
        done = 0

        def passed(count: int) -> None:
            nonlocal done
            done += count
            report.update(done)

        future: Future[list[WriteResult]] = Future()
        with contextlib.ExitStack() as undo, PriorityScope(self._priority or _usual_priority()):
            if self._safetensors:
                files, resolve = plan.storage_data, planner.resolve_data
                undo.callback(remove_hidden, self._path, files)
                future.set_result(write_tensors(self._path, files, plan.items, resolve, passed))
            else:
                future.set_result(self._write_items(plan, planner, passed, undo))
            report.update(total)
            undo.pop_all()  # nothing has failed
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Has the new checkpoint take the place of the old one, then removes the old one."""
        with alone_in(self._path):
            if self._safetensors:
                assert self._files is not None
                publish(self._path, self._files, results)
            else:
                self._publish(metadata, results)

    def _publish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {
            result.index: result.storage_data for of_rank in results for result in of_rank
        }
        metadata.storage_meta = self.storage_meta()
        used = self._check_data_files(metadata)
        names = os.listdir(self._path)
        try:
            save_metadata(metadata, self._metadata_path(self._rank))
        except BaseException:
            take_back(self._path, self._metadata_path(self._rank), used)
            raise
        if self._rank is None:
            remove_rank_metadata(self._path, names)
            remove_data_files(self._path, names, used, None)
        else:
            remove_unused(self._path, self._rank)

    def storage_meta(self) -> StorageMeta:
        """Returns what tells this save from others."""
        return StorageMeta(checkpoint_id=self._path, save_id=self._save_id)

    def _write_items(
        self,
        plan: SavePlan,
        planner: SavePlanner,
        passed: Callable[[int], object],
        undo: contextlib.ExitStack,
    ) -> list[WriteResult]:
        # A planner may keep its plan for other saves: the names are not in it.
        prefix = f"__{plan.storage_data}_"
        # As torch does: objects first.
        items = sorted(plan.items, key=lambda item: item.type != WriteItemType.BYTE_IO)
        files = [items] if self._single_file_per_rank else [[item] for item in items]
        results: list[WriteResult] = []
        for number, in_file in enumerate(filter(None, files)):
            name = new_data_file_name(prefix, number)
            path = os.path.join(self._path, name)
            resolved = [functools.partial(planner.resolve_data, item) for item in in_file]
            about_bytes = sum(_bytes_of(item) + FRAME_BYTES for item in in_file)
            extents = write_items(path, resolved, about_bytes, passed)
            undo.callback(remove, path)
            for item, (offset, length, frame) in zip(in_file, extents):
                place = _StorageInfo(name, offset, length)
                if frame is not None and _as_planned(frame, item):
                    note_storage(place, len(frame.head), frame.crc)
                results.append(WriteResult(item.index, length, place))
        sync_folder(self._path)
        return results

    def _metadata_path(self, rank: int | None) -> str:
        return os.path.join(self._path, metadata_name(None if self._rank is None else rank))

    def _check_data_files(self, metadata: Metadata) -> set[str]:
        """Returns the names of the data files. They are there, and long enough.

        They are not if ranks write to folders of the same name on different machines, or if
        another save to this folder has taken them for leftovers.
        """
        ends: dict[str, int] = {}
        for place in metadata.storage_data.values():
            end = place.offset + place.length
            ends[place.relative_path] = max(end, ends.get(place.relative_path, 0))
        for name, end in ends.items():
            if os.stat(os.path.join(self._path, name)).st_size < end:
                raise OSError(f"{os.path.join(self._path, name)} is shorter than it was written")
        return set(ends)


def _usual_priority() -> Priority:
    """Nobody waits for a thread that async_save() has started, or for its daemon."""
    waited_for = threading.current_thread() is threading.main_thread()
    return "normal" if waited_for and not current_process().daemon else "background"


def _as_planned(frame: TensorFrame, item: WriteItem) -> bool:
    """Whether the metadata describe the tensor that was written: a planner may change it."""
    planned = item.tensor_data
    return (
        planned is not None
        and frame.dtype == planned.properties.dtype
        and frame.shape == planned.chunk.sizes
    )


def _bytes_of(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    count = item.tensor_data.properties.dtype.itemsize
    for size in item.tensor_data.chunk.sizes:
        count *= size
    return int(count)
