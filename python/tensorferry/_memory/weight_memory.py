"""Memory for weights, and the reads from the drive that fill it."""

from __future__ import annotations

import contextlib

import torch

from .._core import SwapSpace
from .gpu_pool import GpuPool
from .pinned_pool import PinnedPool
from .reading import OlderValues, Reading


class WeightMemory:
    """Gives out memory for weights: page-locked memory, of a swap space or a pool, or memory of a
    GPU."""

    def __init__(self, space: SwapSpace | PinnedPool, gpu_pool: GpuPool | None = None) -> None:
        self.device = torch.device("cpu") if gpu_pool is None else gpu_pool.device
        self.nbytes = space.stats()["buffer_bytes"] if gpu_pool is None else gpu_pool.nbytes
        # By the first address of their memory; those that got it first come first.
        self.buffers: dict[int, WeightBuffer] = {}
        self._space = space
        self._gpu_pool = gpu_pool
        self.addresses = self._find_addresses()

    def _find_addresses(self) -> range:
        """Returns where the buffers lie, if they are one piece of memory; else an empty range."""
        if self._gpu_pool is not None or self.nbytes == 0:
            return range(0)
        if (whole := self.take(self.nbytes)) is None:
            return range(0)
        return range(whole.data_ptr(), whole.data_ptr() + self.nbytes)

    def take(self, nbytes: int, timeout: float = 0) -> torch.Tensor | None:
        """Takes memory. Returns None if so much is not free, and on the CPU does not become free
        within `timeout` seconds."""
        if self._gpu_pool is not None:
            try:
                return self._gpu_pool.take(nbytes)
            except torch.OutOfMemoryError:
                return None
        try:
            buffer = self._space.take(nbytes, timeout)
        except TimeoutError:
            return None
        with torch.inference_mode(False):  # autograd may need it later
            return torch.frombuffer(buffer, dtype=torch.uint8)

    def take_over_limit(self, nbytes: int) -> torch.Tensor:
        """Takes memory, however much is taken already."""
        if self._gpu_pool is not None:
            memory = self._gpu_pool.take(nbytes, beyond=True)
            assert memory is not None
            return memory
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8)

    def reading(self) -> contextlib.AbstractContextManager[object]:
        """Inside, reads into this memory begin at once."""
        return contextlib.nullcontext() if self._gpu_pool is None else self._gpu_pool.reading()

    def note_use(self, memory: torch.Tensor) -> None:
        """Says that the current stream computes on this memory."""
        if self._gpu_pool is not None:
            self._gpu_pool.note_use(memory)

    def note_end(self, memory: torch.Tensor) -> None:
        """Says that this memory is free after the work of the current stream."""
        if self._gpu_pool is not None:
            self._gpu_pool.note_end(memory.numel())


class WeightBuffer:
    """The memory that some weights share, while they have any, and the reads that fill it. Each
    weight has an offset there."""

    def __init__(self, source: WeightMemory) -> None:
        self.device = source.device
        self.memory: torch.Tensor | None = None  # also while reads fill it
        self.over_limit = False  # whether that memory exceeds the limit
        self.reads: list[tuple[int, Reading]] = []  # (offset of the weight, a read of it)
        self._source = source
        self._older: dict[int, OlderValues] = {}  # offset of a weight with older values -> why

    @property
    def held(self) -> torch.Tensor:
        """The memory, for callers who know that the buffer has some."""
        assert self.memory is not None
        return self.memory

    def hold(self, memory: torch.Tensor) -> None:
        """Takes this memory for the weights."""
        self.memory = memory
        self._source.buffers[memory.untyped_storage().data_ptr()] = self

    def forget(self) -> None:
        """Lets go of the memory. It is free when nobody else holds it."""
        if self.memory is None:
            return
        self._source.buffers.pop(self.memory.untyped_storage().data_ptr(), None)
        self._source.note_end(self.memory)
        self.memory = None
        self.over_limit = False
        self.reads = []
        self._older = {}

    def settled(self) -> torch.Tensor | None:
        """Returns the memory if all reads have ended."""
        if self.memory is None or not self.is_settled():
            return None
        self.wait()
        return self.memory

    def is_settled(self) -> bool:
        """Returns whether all reads have ended."""
        return all(read.done() for _, read in self.reads)

    def wait_for_first(self) -> None:
        """Waits for the first read. Reads share the drive evenly, so that the others end soon.
        wait() tells of failures."""
        for _, read in self.reads[:1]:
            with contextlib.suppress(OSError, OlderValues):
                read.wait()

    def wait(self) -> None:
        """Waits for the reads."""
        try:
            for offset, read in self.reads:
                try:
                    read.wait()
                except OlderValues as error:
                    self._older[offset] = error.with_traceback(None)
        except BaseException:
            self.forget()
            raise
        self.reads = []

    def check_newest(self, offset: int | None = None) -> None:
        """Raises OlderValues if the weight at `offset`, or any weight, has older values than were
        last computed."""
        for at, error in self._older.items():
            if offset is None or at == offset:
                raise OlderValues(str(error)) from error.__cause__

    def has_older(self, offset: int) -> bool:
        """Returns whether the weight at `offset` has older values than were last computed."""
        return offset in self._older

    def note_newest(self, offset: int) -> None:
        """Says that the weight at `offset` has got new values."""
        self._older.pop(offset, None)

    def reading(self) -> contextlib.AbstractContextManager[object]:
        """Inside, reads into the memory begin at once."""
        return self._source.reading()

    def note_use(self) -> None:
        """Says that the current stream computes on the memory."""
        self._source.note_use(self.held)
