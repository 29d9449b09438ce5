"""The tensors of a checkpoint by name, and the open files that they are in."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Any

import torch

from .._core import Handle
from .._memory.file_values import FileValues, Stored, Stretch
from .._memory.layout import PAGE
from .._memory.pinned_pool import PinnedPool
from .._memory.watched_file import WatchedFile
from ..inspection.dtypes import PAIRED, torch_dtype
from ..inspection.opening import open_checkpoint
from ..inspection.tensors import Checkpoint, Tensor, Unusable

CheckpointPath = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]  # one or several

_ATTEMPTS = 3


class StoredFiles:
    """The files of a checkpoint, open, and what reads them. Nothing is written."""

    def __init__(self, path: CheckpointPath, handle_options: dict[str, Any]) -> None:
        given = [path] if isinstance(path, (str, os.PathLike)) else path
        self.paths = [os.fspath(item) for item in given]
        if not self.paths:
            raise ValueError("path is an empty list: give a folder, an index or files")
        self._files: dict[str, WatchedFile] = {}
        self.tensors = self._open()
        self._handle = Handle(**handle_options)
        self.buffers: PinnedPool | None = None

    # --- opening ---

    def _open(self) -> dict[str, Tensor]:
        """Opens the files, and returns what they hold. Their headers are read once more when all
        are open: so what they say is true of the files that stay open."""
        for _ in range(_ATTEMPTS):
            paths = sorted(_paths_of(self._describe()))
            try:
                self._files = {path: WatchedFile(path) for path in paths}
                found = self._describe()
                same = all(file.has_its_name() for file in self._files.values())
                if same and _paths_of(found) <= self._files.keys():
                    return self._named(found)
            except BaseException:
                self._close_files()
                raise
            self._close_files()
        raise OSError(
            errno.EBADMSG,
            "open checkpoint: its files change while they are opened: wait until it is whole",
            self.paths[0],
        )

    def _describe(self) -> list[Checkpoint]:
        try:
            found = [open_checkpoint(path) for path in self.paths]
        except Unusable as error:
            raise ValueError(str(error)) from None
        for checkpoint in found:
            if checkpoint.format == "torch":
                for _ in checkpoint.checks():  # compares the headers of all storages
                    pass
        return found

    def _named(self, found: list[Checkpoint]) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for checkpoint, path in zip(found, self.paths):
            for tensor in checkpoint.tensors:
                if tensor.name in tensors:
                    raise ValueError(f"{path} has {tensor.name}, and so has a file before it")
                tensors[tensor.name] = tensor
        return tensors

    # --- tensors ---

    def stored(self, name: str) -> Stored:
        """Returns where the bytes of a tensor are. Raises ValueError if torch cannot use them."""
        tensor = self.tensors[name]
        dtype = torch_dtype(tensor.dtype)
        if dtype is None or tensor.dtype == PAIRED:
            raise ValueError(
                f"{name} has the dtype {tensor.dtype}, which torch cannot compute with"
            )
        size = torch.Size(tensor.shape)
        stride = torch.empty(size, device="meta").stride()
        stretches = tensor.stretches()
        if stretches is not None:
            places = tuple(self._stretch(name, s.path, s.offset, s.bytes) for s in stretches)
            return Stored(dtype, size, stride, places)
        if len(tensor.boxes) != 1:
            raise ValueError(
                f"{name} is cut into {len(tensor.boxes)} parts that are not whole rows: convert "
                "the checkpoint with `tensorferry checkpoint convert`"
            )
        (box,) = tensor.boxes
        last = sum((n - 1) * step for n, step in zip(box.sizes, box.strides))
        nbytes = (last + 1) * dtype.itemsize
        place = self._stretch(name, box.path, box.offset, nbytes)
        return Stored(dtype, size, tuple(box.strides), (place,))

    def _stretch(self, name: str, path: str, offset: int, nbytes: int) -> Stretch:
        file = self._files[path]
        if offset + nbytes > file.size:
            raise OSError(
                errno.EBADMSG,
                f"open checkpoint: {name} ends at byte {offset + nbytes}, and the file has "
                f"{file.size}: load another copy of the file",
                path,
            )
        return Stretch(file, offset, nbytes)

    def values(
        self, name: str, stored: Stored, dtype: torch.dtype, stride: tuple[int, ...]
    ) -> FileValues:
        """Returns the values of the weight `name` of the model."""
        return FileValues(name, stored, self._handle, dtype, stride)

    # --- as a swap space ---

    def take_buffers(self, nbytes: int) -> PinnedPool:
        """Takes the memory for weights on the CPU."""
        self.buffers = PinnedPool(max(nbytes, PAGE))
        return self.buffers

    def stats(self) -> dict[str, Any]:
        handle = self._handle.stats()
        tensors = self.tensors.values()
        return {
            "tensors": len(self.tensors),
            "tensor_bytes": sum(tensor.bytes for tensor in tensors),
            "file_bytes": sum(file.size for file in self._files.values()),
            "read_bytes": handle["read_bytes"],
            "written_bytes": handle["written_bytes"],
            **({} if self.buffers is None else self.buffers.stats()),
        }

    @property
    def closed(self) -> bool:
        return self._handle.closed

    def close(self) -> None:
        """Waits for all reads and closes the files."""
        try:
            self._handle.close()
        finally:
            self._close_files()

    def _close_files(self) -> None:
        for file in self._files.values():
            file.close()

    def __repr__(self) -> str:
        shown = ", ".join(self.paths[:3]) + (", ..." if len(self.paths) > 3 else "")
        return f"<{len(self.tensors)} tensors in {len(self._files)} files of {shown}>"


def _paths_of(found: list[Checkpoint]) -> set[str]:
    return {path for checkpoint in found for path in checkpoint.files}
