"""Where the values of a parameter are, when they are not in memory."""

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ._subgroups import CUT, check_dense, page_up

# Parameters are cut into tensors of about this many elements on the drive, so that an optimizer can
# take one after the other.
CHUNK = 512 * CUT

_homes = WeakTensorKeyDictionary()


def home_of(param):
    """The Home of a parameter whose values are on the drive; None where they are in memory."""
    return _homes.get(param)


class Home:
    """The place of one parameter on the drive, and in the memory of its unit when that is there."""

    def __init__(self, param, key, space, unit):
        check_dense(param)
        self.param = param
        self.key = key
        self.space = space
        self.unit = unit
        self.dtype = param.dtype
        self.size = param.size()
        self.stride = param.stride()
        self.numel = param.numel()
        self.nbytes = self.numel * self.dtype.itemsize
        self.offset = 0  # in the memory of its unit
        self.cuts = [(at, min(at + CHUNK, self.numel)) for at in range(0, self.numel, CHUNK)]
        # What the parameter has for values meanwhile: its shape, and nothing that passes for data.
        nothing = float("nan") if self.dtype.is_floating_point else 0
        self.absent = torch.full((1,), nothing, dtype=self.dtype).expand(self.size)
        _homes[param] = self

    def of(self, memory):
        """The values in the memory of the unit."""
        elements = memory[self.offset : self.offset + self.nbytes].view(self.dtype)
        return elements.as_strided(self.size, self.stride)

    def _pieces(self, begin, end):
        """(key, first byte, bytes) of the tensors on the drive that hold these elements."""
        for first, last in self.cuts:
            if begin <= first and last <= end:
                size = self.dtype.itemsize
                nbytes = page_up((last - first) * size)
                yield f"{self.key}/{first}", (first - begin) * size, nbytes

    def read(self, room, begin=0, end=None):
        """Starts to read elements, whole cuts, into room of whole pages. Returns operations."""
        end = self.numel if end is None else end
        if (memory := self.unit.settled_memory()) is not None:
            size = self.dtype.itemsize
            here = memory[self.offset + begin * size : self.offset + end * size]
            room[: here.numel()].copy_(here)
            return []
        return [
            self.space.get(key, room[at : at + nbytes])
            for key, at, nbytes in self._pieces(begin, end)
        ]

    def write(self, room, begin=0, end=None):
        """Starts to write them. Returns operations."""
        end = self.numel if end is None else end
        if (memory := self.unit.settled_memory()) is not None:
            size = self.dtype.itemsize
            here = memory[self.offset + begin * size : self.offset + end * size]
            if here.data_ptr() != room.data_ptr():
                here.copy_(room[: here.numel()])
        else:
            self.unit.forget()
        return [
            self.space.put(key, room[at : at + nbytes])
            for key, at, nbytes in self._pieces(begin, end)
        ]

    def view(self):
        """The values as they are on the drive, mapped."""
        pieces = self._pieces(0, self.numel)
        parts = [(key, 0, min(nbytes, self.nbytes - at)) for key, at, nbytes in pieces]
        if not parts:
            return torch.empty(self.size, dtype=self.dtype)
        elements = torch.frombuffer(self.space.view(parts), dtype=self.dtype)
        return elements.as_strided(self.size, self.stride)

    def leave(self):
        _homes.pop(self.param, None)
