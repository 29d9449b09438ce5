"""Where activations are between the forward and the backward pass: in buffers, or on the drive.

The newest are needed first. So the oldest go to the drive, and come back in the reverse order."""

from __future__ import annotations

import bisect
import collections
import contextlib
import heapq
import itertools
import os
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .._tracing import span
from .gpu_copies import GpuCopies
from .saved_storage import SavedActivation, SavedStorage, Stretch
from .saved_tensors import Version, changed_error

if TYPE_CHECKING:
    from .._core import Operation, SwapSpace

# Reads that are under way at a time: as many as keep the drive busy. Reads share it evenly, so more
# of them would delay the one that is needed first.
_READS = 2
_READ_BYTES = 64 << 20
# How long a buffer may take to come back when its write has ended.
_SOON_SECONDS = 0.01


class Known(NamedTuple):
    """A storage of torch's whose bytes are saved."""

    storage: StorageWeakRef  # keeps its number from being given to another
    address: int
    stretch: Stretch
    saved: SavedStorage
    version: Version


class ActivationStore:
    """Keeps the bytes of tensors that autograd saves, in the buffers of a swap space and in its
    files. Half of the buffers holds the newest, of which nothing is written; in the other half are
    those on their way to the drive, or read ahead from it."""

    def __init__(self, space: SwapSpace, max_bytes: int) -> None:
        self.space = space
        self._max_bytes = max_bytes
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._storages: dict[int, SavedStorage] = {}  # by their numbers
        self._known: dict[int, list[Known]] = {}  # by the number of torch's storage
        self._in_memory: list[int] = []  # a heap, with some that have gone
        self._used: collections.deque[int] = collections.deque()  # by the backward pass
        self._unwritten: collections.deque[int] = collections.deque()
        self._unwritten_bytes = 0
        self._on_drive: list[int] = []  # and nowhere else; sorted
        self._reads: list[tuple[Operation, int]] = []  # under way, with their bytes
        self._released: collections.deque[SavedStorage] = collections.deque()
        self._copies: dict[torch.device, GpuCopies] = {}
        self._saved_bytes = 0
        self._kept_bytes = 0
        self._overflow_bytes = 0
        self._waited_seconds = 0.0

    def stats(self) -> dict[str, Any]:
        with self._lock:
            self._bury()
            return {
                **self.space.stats(),
                "saved_bytes": self._saved_bytes,
                "kept_bytes": self._kept_bytes,
                "overflow_bytes": self._overflow_bytes,
                "waited_seconds": self._waited_seconds,
            }

    def close(self) -> None:
        with self._lock:
            for copies in self._copies.values():
                copies.end()
            for saved in self._storages.values():
                if saved.read is not None:
                    saved.read.cancel()
                    with contextlib.suppress(OSError):  # nobody needs it
                        saved.read.wait()
            self._released.clear()
            self.space.close()

    # --- saving ---

    def note_kept(self, nbytes: int) -> None:
        """Counts what stays where it is."""
        with self._lock:
            self._kept_bytes += nbytes

    def save(self, tensor: torch.Tensor) -> SavedActivation:
        """Takes what autograd saves."""
        with self._lock:
            self._bury()
            part = Stretch.of(tensor)
            known = self._find(tensor, part)
            if known is not None:
                saved, begin = known
            else:
                stretch = part.widened(tensor.untyped_storage().nbytes())
                saved, begin = self._add(tensor, stretch), stretch.begin
            return SavedActivation(self, saved, tensor, part.begin - begin)

    def _find(self, tensor: torch.Tensor, part: Stretch) -> tuple[SavedStorage, int] | None:
        """Returns the memory that was saved with a tensor in it, and where that begins."""
        storage = tensor.untyped_storage()
        for known in self._known.get(StorageWeakRef(storage).cdata, ()):
            is_same = known.address == storage.data_ptr() and known.version.is_current()
            if is_same and known.stretch.has(part):
                return known.saved, known.stretch.begin
        return None

    def _add(self, tensor: torch.Tensor, stretch: Stretch) -> SavedStorage:
        saved = SavedStorage(next(self._numbers), stretch.nbytes, tensor.device)
        source = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        source.set_(tensor.untyped_storage(), stretch.begin, (stretch.nbytes,))
        memory = self._take(saved.held_bytes)
        self._storages[saved.number] = saved
        try:
            if memory is None:  # nothing of this can be held: it goes to the drive as it is
                saved.write = self.space.put(saved.key, source)
                self._wait(saved.write)
                bisect.insort(self._on_drive, saved.number)
            else:
                self._fill(saved, source, memory)
                self._write_behind()
        except BaseException:
            self._end(saved)
            raise
        self._saved_bytes += saved.nbytes
        self._note_known(saved, tensor, stretch)
        return saved

    def _fill(self, saved: SavedStorage, source: torch.Tensor, memory: torch.Tensor) -> None:
        if source.is_cpu:
            memory[: saved.nbytes].copy_(source)
        else:
            saved.copied = self._copies_of(source.device).down(source, memory)
        self._hold(saved, memory)
        self._unwritten.append(saved.number)
        self._unwritten_bytes += saved.held_bytes

    def _note_known(self, saved: SavedStorage, tensor: torch.Tensor, stretch: Stretch) -> None:
        """Says that a storage of torch's has the bytes of this one."""
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        number = reference.cdata
        others = [one for one in self._known.get(number, ()) if one.saved is not saved]
        known = Known(reference, storage.data_ptr(), stretch, saved, Version(tensor))
        self._known[number] = [*others, known]
        saved.known_as.append(number)

    def _write_behind(self) -> None:
        """Starts to write the oldest, so that half of the buffers is enough for the others."""
        while self._unwritten and self._unwritten_bytes > self._max_bytes // 2:
            self._start_write(self._unwritten[0])

    def _start_write(self, number: int) -> None:
        """Starts to write the first one that is not written. Others may have gone."""
        saved = self._storages.get(number)
        if saved is not None and saved.memory is not None:
            if saved.copied is not None:
                saved.copied.synchronize()
            saved.write = self.space.put(saved.key, saved.memory)
            self._unwritten_bytes -= saved.held_bytes
        self._unwritten.popleft()

    # --- room ---

    def _take(self, nbytes: int) -> torch.Tensor | None:
        """Returns a buffer. The oldest give way. Returns None if the rest is in use."""
        soon = 0.0
        while True:
            if (memory := self._take_free(nbytes, soon)) is not None:
                return memory
            if nbytes > self._max_bytes or not self._evict_oldest():
                return None
            soon = _SOON_SECONDS

    def _take_free(self, nbytes: int, seconds: float = 0.0) -> torch.Tensor | None:
        """Returns a buffer, if there is one that nobody needs."""
        while nbytes <= self._max_bytes:
            try:
                buffer = self.space.take(nbytes, seconds)
                return torch.frombuffer(buffer, dtype=torch.uint8)
            except TimeoutError:
                pass
            uploading = any(copies.settle_one() for copies in self._copies.values())
            if not uploading and not self._drop_used():
                break
        return None

    def _drop_used(self) -> bool:
        """Drops the memory of one that the backward pass has used, and that the drive has too."""
        while self._used:
            saved = self._storages.get(self._used.popleft())
            if saved is None or saved.memory is None or saved.read is not None:
                continue
            if saved.is_on_drive():
                self._let_go(saved)
                return True
        return False

    def _evict_oldest(self) -> bool:
        """Waits until the drive has the oldest, and drops its memory. Returns False if none is
        left."""
        while self._in_memory:
            saved = self._storages.get(self._in_memory[0])
            if saved is None or saved.memory is None:
                heapq.heappop(self._in_memory)
                continue
            while saved.write is None:
                self._start_write(self._unwritten[0])
            with span("wait for room"):
                self._wait(saved.write)
            heapq.heappop(self._in_memory)
            self._let_go(saved)
            return True
        return False

    def _hold(self, saved: SavedStorage, memory: torch.Tensor) -> None:
        saved.memory = memory
        saved.version = memory._version
        heapq.heappush(self._in_memory, saved.number)

    def _let_go(self, saved: SavedStorage) -> None:
        if saved.copied is not None:
            saved.copied.synchronize()
        saved.memory = saved.read = saved.copied = None
        bisect.insort(self._on_drive, saved.number)

    def _wait(self, operation: Operation) -> None:
        begin = time.monotonic()
        try:
            operation.wait()
        finally:
            self._waited_seconds += time.monotonic() - begin

    # --- and back ---

    def fetch(self, saved: SavedStorage) -> torch.Tensor:
        """Returns the bytes of a storage, on its device, and reads those ahead that autograd saved
        before it."""
        with self._lock:
            if self.space.closed:
                raise RuntimeError(
                    "this backward pass needs activations that were on NVMe, and their "
                    "OffloadedActivations is closed: call backward() before close()"
                )
            self._bury()
            memory = saved.memory
            if memory is None:
                memory = self._read(saved)
            elif memory._version != saved.version:
                raise changed_error(memory, torch.Size([saved.nbytes]), saved.version)
            self._read_ahead(saved.number)
            if saved.read is not None:
                with span("wait for activations"):
                    self._wait(saved.read)
                saved.read = None
            self._used.append(saved.number)
            if saved.device.type == "cpu":
                result = memory[: saved.nbytes]
            else:
                result = self._uploaded(saved, memory)
            self._note_known(saved, result, Stretch(0, saved.nbytes))
            return result

    def _read(self, saved: SavedStorage) -> torch.Tensor:
        """Starts to read one that is needed now, over the limit if need be."""
        memory = self._take(saved.held_bytes)
        if memory is None:
            self._overflow_bytes += saved.held_bytes
            memory = torch.empty(saved.held_bytes, dtype=torch.uint8)
        self._start_read(saved, memory)
        return memory

    def _start_read(self, saved: SavedStorage, memory: torch.Tensor) -> None:
        size = self.space.size(saved.key)
        saved.read = self.space.get(saved.key, memory[:size])
        self._reads.append((saved.read, saved.held_bytes))
        self._hold(saved, memory)
        at = bisect.bisect_left(self._on_drive, saved.number)
        del self._on_drive[at]

    def _read_ahead(self, number: int) -> None:
        """Starts to read what autograd saved before this one, as far as there is room."""
        at = bisect.bisect_left(self._on_drive, number)
        while at > 0 and not self._is_busy():
            at -= 1
            saved = self._storages[self._on_drive[at]]
            memory = self._take_free(saved.held_bytes)
            if memory is None:
                return
            self._start_read(saved, memory)

    def _is_busy(self) -> bool:
        self._reads = [read for read in self._reads if not read[0].done()]
        return len(self._reads) >= _READS and sum(size for _, size in self._reads) >= _READ_BYTES

    # --- GPUs ---

    def _copies_of(self, device: torch.device) -> GpuCopies:
        if device not in self._copies:
            self._copies[device] = GpuCopies(device)
        return self._copies[device]

    def _uploaded(self, saved: SavedStorage, memory: torch.Tensor) -> torch.Tensor:
        """Returns a storage in the memory of its GPU, and begins to copy the next one there."""
        copies = self._copies_of(saved.device)
        result = copies.up(saved, memory)
        before = self._storages.get(saved.number - 1)
        if before is None or before.device != saved.device or before.read is not None:
            return result
        if before.memory is not None:
            copies.begin_up(before, before.memory)
        return result

    # --- the end of a storage ---

    def release(self, saved: SavedStorage) -> None:
        """Autograd keeps one tensor less in this storage. May be called at any time, in any thread,
        also in the middle of another call."""
        if os.getpid() != self._process:  # a forked child has copies of graphs, and no files
            return
        self._released.append(saved)
        if self._lock.acquire(blocking=False):
            try:
                self._bury()
            finally:
                self._lock.release()

    def _bury(self) -> None:
        """Ends the storages in which autograd keeps no tensor any more."""
        while self._released and not self.space.closed:
            saved = self._released.popleft()
            saved.users -= 1
            if saved.users == 0:
                self._end(saved)
        # Storages end in any order: what is left of them here goes with the first and the last.
        while self._unwritten and self._unwritten[0] not in self._storages:
            self._unwritten.popleft()
        while self._unwritten and self._unwritten[-1] not in self._storages:
            self._unwritten.pop()
        while self._used and self._used[0] not in self._storages:
            self._used.popleft()
        while self._in_memory and self._in_memory[0] not in self._storages:
            heapq.heappop(self._in_memory)

    def _end(self, saved: SavedStorage) -> None:
        del self._storages[saved.number]
        for number in saved.known_as:
            others = [one for one in self._known.pop(number, ()) if one.saved is not saved]
            if others:
                self._known[number] = others
        if saved.copied is not None:
            saved.copied.synchronize()
        for operation in (saved.read, saved.write):
            if operation is not None:
                operation.cancel()
                operation.exception()  # nobody needs it, so its failure is nobody's
        if saved.write is not None:
            self.space.drop(saved.key)
        elif saved.memory is not None:
            self._unwritten_bytes -= saved.held_bytes
        at = bisect.bisect_left(self._on_drive, saved.number)
        if self._on_drive[at : at + 1] == [saved.number]:
            del self._on_drive[at]
