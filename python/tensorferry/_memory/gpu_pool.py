"""Memory of a GPU for states and weights from the drive, within a limit."""

from __future__ import annotations

import collections
import contextlib

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class GpuPool:
    """Gives out memory of one GPU, at most `nbytes` at a time. Memory is free again when its last
    tensor is gone and the GPU has ended its work on it."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.device = device
        self.nbytes = nbytes
        self._taken: list[tuple[StorageWeakRef, int]] = []  # (weak reference to memory, its bytes)
        # (event after the last use of some memory, its bytes), oldest first
        self._leaving: collections.deque[tuple[torch.cuda.Event, int]] = collections.deque()
        # A stream of its own, so that reads ahead do not wait for the computation.
        self._stream = torch.cuda.Stream(device)

    def take(self, nbytes: int, beyond: bool = False) -> torch.Tensor | None:
        """Takes memory. Returns None if that would exceed the limit. A request over the limit
        succeeds if nothing else is held, or with `beyond`."""
        memory = self.take_unnoted(nbytes, beyond)
        if memory is not None:
            self.note_use(memory)
        return memory

    def take_unnoted(self, nbytes: int, beyond: bool = False) -> torch.Tensor | None:
        """take() for callers who hold the memory until no other stream works on it."""
        if not beyond and not self._fits(nbytes):
            return None
        with torch.inference_mode(False), torch.cuda.stream(self._stream):
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self._taken.append((StorageWeakRef(memory.untyped_storage()), nbytes))
        return memory

    def _fits(self, nbytes: int) -> bool:
        self._taken = [taken for taken in self._taken if not taken[0].expired()]
        used = sum(size for _, size in self._taken)
        if self._taken and used + nbytes > self.nbytes:
            return False
        # Memory that no tensor has any more is not free while the GPU works on it.
        while self._leaving and self._leaving[0][0].query():
            self._leaving.popleft()
        while self._leaving and used + nbytes + sum(s for _, s in self._leaving) > self.nbytes:
            self._leaving.popleft()[0].synchronize()
        return True

    def note_use(self, memory: torch.Tensor) -> None:
        """Says that the current stream computes on this memory: torch gives it to others only
        after that."""
        memory.record_stream(torch.cuda.current_stream(self.device))

    def note_end(self, nbytes: int) -> None:
        """Records that `nbytes` bytes are free after the work of the current stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        self._leaving.append((event, nbytes))

    def reading(self) -> contextlib.AbstractContextManager[object]:
        """Inside, reads into this memory begin at once."""
        return torch.cuda.stream(self._stream)
