"""Writes a file of torch.save, and what all outputs for torch need."""

from __future__ import annotations

import errno
import math
import mmap
import pickle
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .._core import NewFile
from ..checkpoint.skeleton import Skeleton, make_skeleton
from ..checkpoint.torch_writer import write_skeleton
from .dtypes import PAIRED, torch_dtype
from .gathering import source_of, tensor_over
from .tensors import Checkpoint, Tensor
from .windows import Stream

_PROTOCOL = 2  # torch.save's
_ALIGNMENT = 64


def write_torch_file(checkpoint: Checkpoint, path: str, passed: Callable[[int], object]) -> None:
    """Replaces the file by a dict of the tensors, as torch.save writes it.

    `passed` is called with how many bytes have been written since.
    """
    state = stand_ins(checkpoint.tensors)
    by_address = {
        state[tensor.name].data_ptr(): tensor for tensor in checkpoint.tensors if tensor.bytes
    }
    with NewFile(path) as new:
        skeleton = _skeleton(state, path)
        in_order = [by_address[storage.data_ptr()] for _, storage in skeleton.storages]
        stream = Stream(source_of(tensor) for tensor in in_order)
        try:
            before = 0
            for done in write_skeleton(
                new.file, skeleton, lambda storage: LateBytes(stream, storage.nbytes())
            ):
                passed(done - before)
                before = done
        finally:
            stream.close()
        new.commit()


def _skeleton(state: dict[str, torch.Tensor], path: str) -> Skeleton:
    try:
        return make_skeleton(state, path, pickle, _PROTOCOL)
    except RuntimeError as error:  # torch's word for all failures of the system
        place, reason = tempfile.gettempdir(), str(error).partition("\n")[0]
        hint = f"torch cannot make a sparse file there: {reason}; set TMPDIR to another place"
        raise OSError(errno.EIO, hint, place) from None


def stand_ins(tensors: Iterable[Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of the right kind, each with memory of its own that nobody may touch.

    The memory is an address range without pages: it costs nothing, however large it is.
    """
    shapes = {tensor.name: _torch_shape(tensor) for tensor in tensors}
    places: dict[str, tuple[int, Tensor]] = {}
    total = 0
    for tensor in tensors:
        places[tensor.name] = total, tensor
        total += -(-tensor.bytes // _ALIGNMENT) * _ALIGNMENT
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(total, 1), flags=flags, prot=mmap.PROT_READ)
    made = {}
    for name, (offset, tensor) in places.items():
        dtype = torch_dtype(tensor.dtype)
        if not tensor.bytes:
            made[name] = torch.empty(shapes[name], dtype=dtype)
            continue
        taken = tensor_over(memory, torch.uint8, offset, tensor.bytes)
        made[name] = taken.view(dtype).reshape(shapes[name])
    return made


def _torch_shape(tensor: Tensor) -> tuple[int, ...]:
    if tensor.dtype != PAIRED or not tensor.shape:
        return tensor.shape
    return (*tensor.shape[:-1], math.ceil(tensor.shape[-1] / 2))


class LateBytes:
    """The bytes of a tensor: slices are taken from the stream when they are asked for."""

    def __init__(self, stream: Stream, count: int) -> None:
        self._stream = stream
        self._bytes = count
        self._at = 0

    def __len__(self) -> int:
        return self._bytes

    def __getitem__(self, part: slice) -> Any:
        assert part.start == self._at, "bytes are asked for from front to back"
        self._at = part.stop
        return torch.frombuffer(self._stream.take(part.stop - part.start), dtype=torch.uint8)
