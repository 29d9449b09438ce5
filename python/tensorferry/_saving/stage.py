"""Page-locked memory for saves in the background, in windows, and the copies into them.

All saves of a process share it. It stays for the next save: to lock memory takes as long as to fill
it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from .._core import PinnedBuffer
from .windows import WINDOW_BYTES, Piece

# Memory is locked so many windows at a time.
_SLAB_WINDOWS = 16


class StagedWindow:
    """A window of a new file: its pieces, and memory for them.

    A piece has the same place in the memory as in the window of the file. So a drive writes the
    memory as it is, whatever the tensors were aligned to.
    """

    def __init__(self, pieces: list[Piece], stays: Callable[[int], bool]) -> None:
        self.begin = pieces[0].offset
        self.end = pieces[-1].offset + len(pieces[-1].memory)
        self.memory: torch.Tensor | None = None
        # Those that come when the window is written.
        self._later = [piece.storage is None or stays(piece.storage) for piece in pieces]
        self._pieces = pieces
        self._events: list[torch.cuda.Event] = []
        self.needs_memory = not all(self._later)  # before it is written

    def fill(self, copies: Copies) -> None:
        """Begins to copy what may change."""
        for number, piece in enumerate(self._pieces):
            if not self._later[number]:
                place = self._place(piece)
                copies.add(place, piece.memory)
                # From now on nobody needs the tensor of the caller.
                self._pieces[number] = piece._replace(memory=place)
        self._events = copies.events()

    def wait_for_copies(self) -> None:
        """Waits for those from GPUs."""
        for event in self._events:
            event.synchronize()

    def complete(self, passed: Callable[[torch.Tensor, int, bool], object]) -> torch.Tensor:
        """Returns the bytes of the window, after `passed` has seen those of storages."""
        assert self.memory is not None
        self.wait_for_copies()
        for later, piece in zip(self._later, self._pieces):
            place = self._place(piece)
            if piece.storage is None:
                # Not before: `passed` puts checksums of what is in front of it into its bytes.
                memoryview(place.numpy())[:] = piece.memory
            else:
                if later:
                    place.copy_(piece.memory)
                passed(place, piece.storage, piece.last)
        first = self.begin % WINDOW_BYTES
        return self.memory[first : first + self.end - self.begin]

    def _place(self, piece: Piece) -> torch.Tensor:
        assert self.memory is not None
        at = piece.offset % WINDOW_BYTES
        return self.memory[at : at + len(piece.memory)]


class Stage:
    """Memory for windows. Any thread may call this."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._free: list[torch.Tensor] = []
        self._count = 0  # of windows in all
        self._used = 0

    def begin(self, most: int) -> None:
        """A save begins that may have memory for so many windows. Frees all if it is more and
        nobody uses any."""
        with self._changed:
            if self._used == 0 and self._count > most:
                self._free.clear()
                self._count = 0

    def free(self) -> None:
        """Frees all, if nobody uses any."""
        self.begin(0)

    def try_give(self, window: StagedWindow, most: int, wanted: int) -> bool:
        """Gives the window memory, if some is free or there is less than for `most` windows: then
        it makes some for up to `wanted` of them."""
        with self._changed:
            if not self._free:
                self._make(min(most - self._count, wanted, _SLAB_WINDOWS))
            if not self._free:
                return False
            self._used += 1
            window.memory = self._free.pop()
            return True

    def wait_and_give(self, window: StagedWindow, most: int, seconds: float) -> bool:
        """The same, but waits so long for memory."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._free), seconds)
        return self.try_give(window, most, 1)

    def take_back(self, window: StagedWindow) -> None:
        """Nobody uses the memory of the window any more. Does nothing if it has none."""
        with self._changed:
            if window.memory is None:
                return
            self._free.append(window.memory)
            window.memory = None
            self._used -= 1
            self._changed.notify()

    def stats(self) -> dict[str, int]:
        """How many bytes are locked, and how many of them are in use."""
        with self._changed:
            return {"bytes": self._count * WINDOW_BYTES, "used_bytes": self._used * WINDOW_BYTES}

    def _make(self, count: int) -> None:
        if count > 0:
            slab = torch.frombuffer(PinnedBuffer(count * WINDOW_BYTES), dtype=torch.uint8)
            self._free += slab.split(WINDOW_BYTES)
            self._count += count


class Copies:
    """Copies of one save into windows: those from GPUs on a stream of their own, behind what the
    stream of the caller has to do."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._new: set[torch.device] = set()  # those with copies since events()

    def add(self, to: torch.Tensor, source: torch.Tensor) -> None:
        if not source.is_cuda:
            to.copy_(source)
            return
        stream = self._streams.get(source.device)
        if stream is None:
            stream = self._streams[source.device] = torch.cuda.Stream(source.device)
            stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
        self._new.add(source.device)

    def events(self) -> list[torch.cuda.Event]:
        """What tells that the copies since the last call have ended."""
        made = []
        for device in self._new:
            event = torch.cuda.Event(blocking=True)
            event.record(self._streams[device])
            made.append(event)
        self._new.clear()
        return made

    def finish(self) -> None:
        """Waits for all copies."""
        for stream in self._streams.values():
            stream.synchronize()
