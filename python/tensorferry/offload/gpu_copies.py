"""Copies between the memory of a GPU and page-locked buffers, beside its computation."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .saved_storage import SavedStorage


class GpuCopies:
    """Copies activations of one GPU, in a stream of its own for each way."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down = torch.cuda.Stream(device)
        self._up = torch.cuda.Stream(device)
        # Buffers that are copied to the GPU, oldest first: they must not be filled before.
        self._uploads: collections.deque[tuple[torch.cuda.Event, torch.Tensor]] = (
            collections.deque()
        )

    def down(self, source: torch.Tensor, memory: torch.Tensor) -> torch.cuda.Event:
        """Starts to copy memory of the GPU to a buffer. Returns what tells the end."""
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            memory[: source.numel()].copy_(source, non_blocking=True)
            source.record_stream(self._down)
            return self._recorded()

    def begin_up(self, saved: SavedStorage, buffer: torch.Tensor) -> None:
        """Starts to copy a storage from its buffer to the GPU."""
        if saved.upload is not None:
            return
        if saved.copied is not None:
            self._up.wait_event(saved.copied)
        with torch.cuda.stream(self._up):
            memory = torch.empty(saved.nbytes, dtype=torch.uint8, device=self._device)
            memory.copy_(buffer[: saved.nbytes], non_blocking=True)
            event = self._recorded()
        self._uploads.append((event, buffer))
        saved.upload = memory, event

    def up(self, saved: SavedStorage, buffer: torch.Tensor) -> torch.Tensor:
        """Returns a storage in memory of the GPU, for the current stream."""
        self.begin_up(saved, buffer)
        assert saved.upload is not None
        memory, event = saved.upload
        saved.upload = None
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(event)
        memory.record_stream(stream)
        while self._uploads and self._uploads[0][0].query():
            self._uploads.popleft()
        return memory

    def settle_one(self) -> bool:
        """Waits for the oldest copy to the GPU. Returns False if there is none."""
        if not self._uploads:
            return False
        self._uploads.popleft()[0].synchronize()
        return True

    def end(self) -> None:
        """Waits for all copies."""
        self._down.synchronize()
        self._up.synchronize()
        self._uploads.clear()

    def _recorded(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event
