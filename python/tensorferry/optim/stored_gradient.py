"""The tensor that stands in p.grad for a gradient on the drive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from .._memory.operators import is_view, mapped, written

if TYPE_CHECKING:
    from .gradients import Entry

_aten = torch.ops.aten

# Operators that change each element by itself: noted, and made when somebody reads the gradient.
_ELEMENTWISE = {
    _aten.mul_,
    _aten.div_,
    _aten.clamp_,
    _aten.clamp_min_,
    _aten.clamp_max_,
    _aten._foreach_mul_,
    _aten._foreach_div_,
    _aten._foreach_clamp_min_,
    _aten._foreach_clamp_max_,
}
_ZEROING = {_aten.zero_, _aten._foreach_zero_}
_NORMS = {_aten.linalg_vector_norm, _aten._foreach_norm}
_UNSCALING = _aten._amp_foreach_non_finite_check_and_unscale_
_HALF = (torch.bfloat16, torch.float16)


class StoredGradient(torch.Tensor):
    """Has the shape, dtype and device of a gradient and no memory; `entry` knows the drive.

    torch computes with it as with any other gradient: operators read it when they need its values,
    one at a time, and write it when they change it. Only operators that need its memory, such as
    views, are refused."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, entry: Entry) -> StoredGradient:
        return torch.Tensor._make_wrapper_subclass(
            cls, entry.size, strides=entry.stride, dtype=entry.dtype, device=entry.device
        )

    def __init__(self, entry: Entry) -> None:
        self.entry = entry

    @classmethod
    def __torch_dispatch__(
        cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not operator._schema.name.startswith(("aten::_foreach_", "aten::_amp_foreach_")):
            return _call(operator, args, kwargs or {})
        # One after the other: all at once may not fit into memory.
        count = len(args[0])
        results: list[Any] = []
        for at in range(count):
            own = (
                [value[at]] if isinstance(value, (list, tuple)) and len(value) == count else value
                for value in args
            )
            results += _call(operator, tuple(own), kwargs or {}) or []
        return results if operator._schema.returns else None

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        if entry_of(values) is self.entry:  # as when a model is moved to where it is
            return
        if values.size() != self.size() or values.dtype != self.dtype:
            raise RuntimeError(
                f"a gradient on the drive, {self.dtype} of {tuple(self.size())}, cannot take "
                f"values of {values.dtype} and {tuple(values.size())}: give it values of its own "
                "dtype and shape"
            )
        self.detach().copy_(values)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise _no_memory("this call")

    data_ptr = numpy = tolist = share_memory_ = __dlpack__ = _refuse

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self.clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return f"<gradient on the drive: {self.dtype} of {tuple(self.size())}, {self.device}>"


def entry_of(gradient: Any) -> Entry | None:
    """The entry of a gradient on the drive; None for one in memory and for None."""
    if hasattr(gradient, "to_local"):
        gradient = gradient.detach().to_local()
    return gradient.entry if isinstance(gradient, StoredGradient) else None


def _no_memory(what: str) -> RuntimeError:
    return RuntimeError(
        f"{what} needs the memory of a gradient that is on the drive (offload_gradients=True): "
        "read it with p.grad.clone(), and assign p.grad to change it"
    )


def _call(operator: Any, args: Any, kwargs: Any) -> Any:
    """One operator on one gradient, or on lists with one."""
    first = args[0][0] if isinstance(args[0], (list, tuple)) and args[0] else args[0]
    if isinstance(first, StoredGradient):
        done, result = _without_reading(operator, first, args, kwargs)
        if done:
            return result
    return _in_memory(operator, args, kwargs)


def _without_reading(
    operator: Any, gradient: StoredGradient, args: Any, kwargs: Any
) -> tuple[bool, Any]:
    """Returns (whether the entry alone could do it, what the operator returns)."""
    kind, entry, rest = operator.overloadpacket, gradient.entry, args[1:]
    result: Any = gradient if operator._schema.returns else None
    if kind in _ZEROING:
        entry.zero()
    elif kind in _ELEMENTWISE and not kwargs and all(map(_is_number, rest)):
        entry.change(operator, rest)
    elif kind is _UNSCALING:
        if not entry.is_known_finite():
            operator([entry.load()], *rest)
        entry.change(operator, rest)
    elif kind is _aten.add_ and not kwargs and _is_like(rest[0], gradient):
        entry.add(rest[0])
    elif kind in _NORMS and rest in ((), (2,)) and kwargs.keys() <= {"dtype"}:
        norm = _known_norm(gradient, kwargs.get("dtype"))
        result = [norm] if kind is _aten._foreach_norm else norm
        return norm is not None, result
    else:
        return False, None
    return True, result


def _known_norm(gradient: StoredGradient, dtype: torch.dtype | None) -> Tensor | None:
    """The 2-norm as torch returns it; None if it must be computed."""
    norm = gradient.entry.known_norm()
    if norm is None or dtype not in (None, norm.dtype):
        return None
    rounded = gradient.dtype if dtype is None and gradient.dtype in _HALF else norm.dtype
    return norm.to(rounded, copy=True)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and value.dim() == 0
    if isinstance(value, (list, tuple)):
        return all(map(_is_number, value))
    return True


def _is_like(value: Any, gradient: StoredGradient) -> bool:
    return (
        type(value) is torch.Tensor
        and value.layout == torch.strided
        and value.size() == gradient.size()
        and value.dtype == gradient.dtype
    )


def _in_memory(operator: Any, args: Any, kwargs: Any) -> Any:
    """Reads the gradients, computes, and writes those that have changed."""
    if operator.namespace != "aten":  # its schema may not say that it changes them
        raise _no_memory(str(operator))
    if is_view(operator):
        return _alias(operator, *args)
    changed = written(operator, args, kwargs)
    if any(entry_of(tensor) is None for tensor in changed):
        _refuse_buckets()
    loaded: dict[Entry, tuple[StoredGradient, Tensor]] = {}

    def load(value: Any) -> Any:
        if not isinstance(value, StoredGradient):
            return value
        if value.entry not in loaded:
            loaded[value.entry] = value, value.entry.load()
        return loaded[value.entry][1]

    result = operator(*mapped(load, args), **mapped(load, kwargs))
    for entry in {entry_of(tensor): None for tensor in changed}:
        if entry is not None:
            entry.save(loaded[entry][1])
    stand_ins = {id(values): stand_in for stand_in, values in loaded.values()}
    return mapped(lambda value: stand_ins.get(id(value), value), result)


def _alias(operator: Any, gradient: StoredGradient, *rest: Any) -> StoredGradient:
    """A view of the same shape, which is the gradient itself. Other views are refused."""
    same = operator in (_aten.detach.default, _aten.alias.default)
    if operator is _aten.view.default:
        same = tuple(rest[0]) == tuple(gradient.size())
    if not same:
        raise _no_memory(str(operator))
    return StoredGradient(gradient.entry)


def _refuse_buckets() -> None:
    """Refuses DistributedDataParallel, which copies gradients to its buckets in backward."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            "DistributedDataParallel (or a hook like its own) copies a gradient in the backward "
            "pass, and offload_gradients=True has moved that gradient to the drive: leave "
            "offload_gradients out, or shard the model with FSDP2 (fully_shard)"
        )
