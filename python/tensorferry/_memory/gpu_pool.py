"""Memory of a GPU for states and weights that come from the drive, as much as was agreed."""

import collections

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class GpuPool:
    """Gives out memory of one GPU, up to `nbytes` together. It is free again when all tensors on it
    are gone and no operation uses it."""

    def __init__(self, device, nbytes):
        self.device = device
        self.nbytes = nbytes
        self._taken = []  # (weak reference to the memory, its bytes)
        self._leaving = collections.deque()  # (event after its last use, bytes), oldest first
        # Reads ahead are queued behind nothing that is computed meanwhile.
        self._stream = torch.cuda.Stream(device)

    def take(self, nbytes, beyond=False):
        """None where there is no room. Whoever is alone gets what they need, and so does who may go
        beyond."""
        if not beyond and not self._has_room(nbytes):
            return None
        with torch.inference_mode(False), torch.cuda.stream(self._stream):
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.note_use(memory)
        self._taken.append((StorageWeakRef(memory.untyped_storage()), nbytes))
        return memory

    def _has_room(self, nbytes):
        self._taken = [taken for taken in self._taken if not taken[0].expired()]
        used = sum(size for _, size in self._taken)
        if self._taken and used + nbytes > self.nbytes:
            return False
        # What the GPU still works on is not free, though nobody has it any more.
        while self._leaving and self._leaving[0][0].query():
            self._leaving.popleft()
        while self._leaving and used + nbytes + sum(s for _, s in self._leaving) > self.nbytes:
            self._leaving.popleft()[0].synchronize()
        return True

    def note_use(self, memory):
        """The current stream computes on it: torch gives it to others only after that."""
        memory.record_stream(torch.cuda.current_stream(self.device))

    def note_end(self, nbytes):
        """So much is let go of, after what the current stream has to do."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        self._leaving.append((event, nbytes))

    def reading(self):
        """Inside, reads into this memory begin at once."""
        return torch.cuda.stream(self._stream)
