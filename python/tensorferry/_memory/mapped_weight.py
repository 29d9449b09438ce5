"""The tensors that state_dict() returns of weights on the drive."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch._ops import OpOverload

from .. import _core
from .operators import is_view, mapped, written

# By the address of their memory. What takes only its storage of a tensor asks here.
_by_address: weakref.WeakValueDictionary[int, MappedWeight] = weakref.WeakValueDictionary()


def is_mapped_weight(storage: torch.UntypedStorage) -> bool:
    """Whether it belongs to a mapped weight: nothing changes it."""
    return storage.device.type == "cpu" and storage.data_ptr() in _by_address


class MappedWeight(torch.Tensor):
    """A weight, mapped from the drive. It can be read, saved and loaded, but not changed: a change
    of its memory would not reach the model."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> MappedWeight:
        return torch.Tensor._make_subclass(cls, values)

    def __init__(self, values: torch.Tensor) -> None:
        self.plain = values
        _by_address[values.untyped_storage().data_ptr()] = self

    @classmethod
    def __torch_dispatch__(
        cls,
        operator: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # The operators of torch.distributed do not say what they change.
        silent = operator.namespace == "c10d"
        if silent or any(isinstance(tensor, cls) for tensor in written(operator, args, kwargs)):
            raise _read_only(str(operator))
        result = operator(*mapped(_plain, args), **mapped(_plain, kwargs))
        return mapped(_wrapped, result) if is_view(operator) else result

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> NoReturn:
        raise _read_only("this assignment")

    def numpy(self, *, force: bool = False) -> Any:
        array = self.plain.numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        return self.plain.tolist()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise _read_only("this call")

    share_memory_ = __dlpack__ = _refuse

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(self.plain, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)


def _read_only(what: str) -> RuntimeError:
    return RuntimeError(
        f"{what} would change what state_dict() returned of a weight on NVMe, not the model: "
        "change a clone() and load it with load_state_dict(), or change weights inside "
        "`with weights.gather(module, modify=True)`"
    )


_core.never_fill(MappedWeight, _read_only)


def _plain(value: Any) -> Any:
    return value.plain if isinstance(value, MappedWeight) else value


def _wrapped(value: Any) -> Any:
    return MappedWeight(value) if isinstance(value, torch.Tensor) else value
