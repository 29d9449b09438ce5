"""Memory of a GPU for states and weights that come from the drive, as much as was agreed."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class GpuRoom:
    """Gives out memory of one GPU, up to `nbytes` together. It is free again when all tensors on it
    are gone and no operation uses it."""

    def __init__(self, device, nbytes):
        self.device = device
        self.nbytes = nbytes
        self._taken = []  # (weak reference to the memory, its bytes)
        # Reads ahead are queued behind nothing that is computed meanwhile.
        self._stream = torch.cuda.Stream(device)

    def take(self, nbytes):
        """None where there is no room. Whoever is alone gets what they need."""
        self._taken = [taken for taken in self._taken if not taken[0].expired()]
        if self._taken and sum(size for _, size in self._taken) + nbytes > self.nbytes:
            return None
        with torch.inference_mode(False), torch.cuda.stream(self._stream):
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        # It is computed on by the user's stream: torch gives it to others only after that.
        memory.record_stream(torch.cuda.current_stream(self.device))
        self._taken.append((StorageWeakRef(memory.untyped_storage()), nbytes))
        return memory

    def reading(self):
        """Inside, reads into this memory begin at once."""
        return torch.cuda.stream(self._stream)
