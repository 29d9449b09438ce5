"""The tensors that state_dict() returns of weights on the drive."""

import copy

import torch

from .. import _core
from .operators import is_view, mapped, written


class MappedWeight(torch.Tensor):
    """A weight as it is on the drive, mapped. It can be read, saved and loaded, not changed: what
    is written to its memory would not reach the model."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_subclass(cls, values)

    def __init__(self, values):
        self._values = values

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # Those of torch.distributed do not say what they change.
        silent = operator.namespace == "c10d"
        if silent or any(isinstance(tensor, cls) for tensor in written(operator, args, kwargs)):
            raise _fixed(str(operator))
        result = operator(*mapped(_plain, args), **mapped(_plain, kwargs))
        return mapped(_wrapped, result) if is_view(operator) else result

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, values):
        raise _fixed("this assignment")

    def numpy(self, *, force=False):
        array = self._values.numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self):
        return self._values.tolist()

    def _refuse(self, *_, **__):
        raise _fixed("this call")

    share_memory_ = __dlpack__ = _refuse

    def __deepcopy__(self, memo):
        return copy.deepcopy(self._values, memo)

    def __reduce_ex__(self, protocol):
        return self._values.__reduce_ex__(protocol)


def _fixed(what):
    return RuntimeError(
        f"{what} would change what state_dict() has returned of a weight on NVMe, and not the "
        "model: change a clone() and load_state_dict() it, or change weights inside "
        "`with weights.gather(module, modify=True)`"
    )


_core.never_fill(MappedWeight, _fixed)


def _plain(value):
    return value._values if isinstance(value, MappedWeight) else value


def _wrapped(value):
    return MappedWeight(value) if isinstance(value, torch.Tensor) else value
