"""Memory that autograd keeps for the backward pass, as the drive has it, and tensors in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .._memory.layout import page_up
from .saved_tensors import Version

if TYPE_CHECKING:
    from .._core import Operation
    from .activation_store import ActivationStore


class Stretch(NamedTuple):
    """Some bytes of the storage of a tensor."""

    begin: int
    end: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Stretch:
        """The bytes from the first element of a tensor to its last one."""
        size = tensor.dtype.itemsize
        begin = tensor.storage_offset() * size
        if tensor.numel() == 0:
            return cls(begin, begin)
        last = sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride()))
        return cls(begin, begin + (last + 1) * size)

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    def widened(self, nbytes: int) -> Stretch:
        """All `nbytes` of a storage, if this is half of it or more: then other tensors in it, which
        autograd may keep too, are there already."""
        return Stretch(0, nbytes) if 2 * self.nbytes >= nbytes else self

    def has(self, other: Stretch) -> bool:
        return self.begin <= other.begin and other.end <= self.end


class SavedStorage:
    """A stretch of memory that autograd keeps: in a buffer, on the drive, or in both."""

    def __init__(self, number: int, nbytes: int, device: torch.device) -> None:
        self.number = number  # in the order in which autograd saved them
        self.key = f"activation/{number}"
        self.nbytes = nbytes
        self.held_bytes = page_up(nbytes)  # in a buffer
        self.device = device  # where autograd wants it
        self.users = 0  # tensors that autograd keeps in it
        self.memory: torch.Tensor | None = None  # in a buffer
        self.version = 0  # of that memory
        self.write: Operation | None = None
        self.read: Operation | None = None
        self.known_as: list[int] = []  # numbers of storages of torch's that have these bytes
        self.copied: torch.cuda.Event | None = None  # when a GPU has filled the buffer
        self.upload: tuple[torch.Tensor, torch.cuda.Event] | None = None  # on its way to a GPU

    def is_on_drive(self) -> bool:
        """Returns whether the drive has all of it."""
        write = self.write
        return write is not None and write.done() and write.exception() is None


class SavedActivation:
    """What autograd keeps in place of a tensor."""

    __slots__ = ("_dtype", "_offset", "_size", "_storage", "_store", "_stride", "_version")

    def __init__(
        self, store: ActivationStore, storage: SavedStorage, tensor: torch.Tensor, offset: int
    ) -> None:
        """`offset` is where the tensor begins in the stretch of the storage, in bytes."""
        self._store = store
        self._storage = storage
        storage.users += 1
        self._dtype = tensor.dtype
        self._size = tensor.size()
        self._stride = tensor.stride()
        self._offset = offset
        self._version = Version(tensor)

    def __del__(self) -> None:
        self._store.release(self._storage)

    def restored(self) -> torch.Tensor:
        self._version.check(self._size)
        memory = self._store.fetch(self._storage)
        last = sum((n - 1) * step for n, step in zip(self._size, self._stride))
        end = self._offset + (last + 1) * self._dtype.itemsize
        elements = memory[self._offset : end].view(self._dtype)
        return elements.as_strided(self._size, self._stride)
