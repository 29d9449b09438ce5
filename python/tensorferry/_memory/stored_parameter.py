"""Where the values of a parameter are, when they are not in memory."""

import copy
import weakref

import torch
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from .layout import CUT, check_dense, page_up
from .mapped_weight import MappedWeight

# Parameters are cut into tensors of about this many elements on the drive, so that an optimizer can
# take one after the other.
CHUNK = 512 * CUT

_homes = WeakTensorKeyDictionary()


def home_of(param):
    """The Home of a parameter whose values are on the drive; None where they are in memory."""
    return _homes.get(param)


class OlderValues(RuntimeError):
    """The drive has values from before a write that failed."""


class _NeverBegun:
    """Stands for a write that could not even begin."""

    def __init__(self, error):
        # Without the frames that it comes from.
        self._error = copy.copy(error) if isinstance(error, OSError) else OlderValues(repr(error))

    def wait(self):
        raise copy.copy(self._error)


class Reading:
    """A read of what the last write has put. Where that has failed, so does this."""

    def __init__(self, home, operation, put):
        self._home = home
        self._put = put
        self.operation = operation

    def done(self):
        return self.operation.done()

    def cancel(self):
        self.operation.cancel()

    def wait(self):
        # What is on its way to the drive comes from the memory it is written from, and no bytes
        # move: it is right, whatever becomes of the write.
        if self.operation.wait() == 0 or self._put is None:
            return
        try:
            self._put.wait()
        except (OSError, OlderValues) as error:
            raise OlderValues(
                f"a weight of {tuple(self._home.size)} could not be written ({error}), and the "
                "drive has an older one: load a checkpoint, with load_state_dict() of the model "
                "and of the optimizer"
            ) from error


class Home:
    """The place of one parameter on the drive, and in the memory of its unit when that is there."""

    def __init__(self, param, key, space, unit):
        check_dense(param)
        self._param = TensorWeakRef(param)  # the home is as old as the parameter, not the reverse
        self.key = key
        self.space = space
        self.unit = unit
        self.dtype = param.dtype
        self.device = unit.residency.device
        self.size = param.size()
        self.stride = param.stride()
        self.numel = param.numel()
        self.nbytes = self.numel * self.dtype.itemsize
        self.offset = 0  # in the memory of its unit
        self._mapped = lambda: None  # what view() has given out
        self._puts = {}  # key -> the last write of that tensor
        self.cuts = [(at, min(at + CHUNK, self.numel)) for at in range(0, self.numel, CHUNK)]
        # What the parameter has for values meanwhile: its shape, and nothing that passes for data.
        self._has_nan = self.dtype.is_floating_point or self.dtype.is_complex
        self._nothing = torch.zeros((), dtype=self.dtype, device=self.device)
        self._forget_values()
        self.absent = self._nothing.expand(self.size)
        _homes[param] = self

    @property
    def version(self):
        """How often autograd has seen the parameter change; None where it does not look."""
        param = self.param
        return None if param is None or param.is_inference() else param._version

    @property
    def param(self):
        """The parameter; None when nobody has it any more."""
        return self._param()

    def check_unchanged(self):
        """The parameter takes its values as they are on the drive, and nobody has given it others
        meanwhile."""
        param = self.param
        if param is None:
            return
        self._check_kind(param)
        if not self._is_nothing() or param.data_ptr() != self.absent.data_ptr():
            self._forget_values()
            self.show(self.absent)
            raise RuntimeError(
                f"a parameter of {tuple(self.size)} was given values while its own were on NVMe: "
                "those are lost; change weights inside `with weights.gather(module, modify=True)`"
            )

    def _is_nothing(self):
        if self.device.type != "cpu":  # to look would be to wait for the GPU
            return True
        value = self._nothing.item()
        return value != value if self._has_nan else value == 0

    def _check_kind(self, param):
        same = param.dtype == self.dtype and param.size() == self.size
        if not same or param.device != self.device:
            raise RuntimeError(
                f"a parameter whose values are on NVMe as {self.dtype} of {tuple(self.size)} has "
                f"become {param.dtype} of {tuple(param.size())} on {param.device}: convert a model "
                "before its weights are offloaded"
            )

    def _forget_values(self):
        self._nothing.fill_(float("nan") if self._has_nan else 0)

    def show(self, values):
        """Gives the parameter these values."""
        if (param := self.param) is not None:
            param.data = values

    def is_elsewhere(self, memory):
        """Whether the parameter was shown here, and has been given other memory since."""
        param = self.param
        return param is not None and param.data_ptr() != memory.data_ptr() + self.offset

    @torch.no_grad()
    def collect(self, memory):
        """Takes the values from where the parameter has them now."""
        self._check_kind(self.param)
        self.of(memory).copy_(self.param)

    def of(self, memory):
        """The values in the memory of the unit."""
        elements = memory[self.offset : self.offset + self.nbytes].view(self.dtype)
        return elements.as_strided(self.size, self.stride)

    def _pieces(self, begin, end):
        """(key, first byte, bytes) of the tensors on the drive that hold these elements."""
        inside = [(first, last) for first, last in self.cuts if begin <= first and last <= end]
        if sum(last - first for first, last in inside) != end - begin:
            raise RuntimeError(
                "this optimizer was made before the weights went to NVMe: call "
                "offload.parameters() first"
            )
        size = self.dtype.itemsize
        for first, last in inside:
            nbytes = page_up((last - first) * size)
            yield f"{self.key}/{first}", (first - begin) * size, nbytes

    def read(self, room, begin=0, end=None):
        """Starts to read elements, whole cuts, into room of whole pages. Returns operations."""
        end = self.numel if end is None else end
        pieces = list(self._pieces(begin, end))
        if (memory := self.unit.settled_memory()) is not None:
            size = self.dtype.itemsize
            here = memory[self.offset + begin * size : self.offset + end * size]
            self.unit.check_newest(self)
            room[: here.numel()].copy_(here)
            return []
        return [self.get(key, room[at : at + nbytes]) for key, at, nbytes in pieces]

    def get(self, key, room):
        """Starts to read one of its tensors."""
        return Reading(self, self.space.get(key, room), self._puts.get(key))

    def write(self, room, begin=0, end=None):
        """Starts to write them. Returns operations."""
        end = self.numel if end is None else end
        pieces = list(self._pieces(begin, end))
        if self.version is not None:
            torch.autograd.graph.increment_version(self.param)
        if (memory := self.unit.settled_memory()) is not None:
            size = self.dtype.itemsize
            here = memory[self.offset + begin * size : self.offset + end * size]
            if here.data_ptr() != room.data_ptr():
                here.copy_(room[: here.numel()])
        else:
            self.unit.forget()
        return [self.put(key, room[at : at + nbytes]) for key, at, nbytes in pieces]

    def put(self, key, piece):
        """Starts to write one of its tensors."""
        self._mapped = lambda: None
        try:
            self._puts[key] = self.space.put(key, piece)
        except BaseException as error:
            self._puts[key] = _NeverBegun(error)
            raise
        return self._puts[key]

    def view(self):
        """The values as they are on the drive, mapped: the same tensor for all that share them."""
        if (mapped := self._mapped()) is None:
            mapped = MappedWeight(self._view())
            self._mapped = weakref.ref(mapped)
        return mapped

    def _view(self):
        for operation in self._puts.values():  # one that an optimizer has begun may have failed
            operation.wait()
        pieces = self._pieces(0, self.numel)
        parts = [(key, 0, min(nbytes, self.nbytes - at)) for key, at, nbytes in pieces]
        if not parts:
            return torch.empty(self.size, dtype=self.dtype)
        elements = torch.frombuffer(self.space.view(parts), dtype=self.dtype)
        return elements.as_strided(self.size, self.stride)

    def leave(self):
        if (param := self.param) is not None:
            _homes.pop(param, None)
