"""The tensor that stands in p.grad for a gradient on the drive."""

import torch

from .._memory.operators import is_view, mapped, written

_aten = torch.ops.aten

# Done to each element by itself: noted, and done when somebody reads the gradient.
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

    torch computes with it as with any other: it is read where it is needed, one at a time, and
    written where it is changed. Only what wants its memory, as views do, is refused."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, entry):
        return torch.Tensor._make_wrapper_subclass(
            cls, entry.size, strides=entry.stride, dtype=entry.dtype, device=entry.device
        )

    def __init__(self, entry):
        self._entry = entry

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        if not operator._schema.name.startswith(("aten::_foreach_", "aten::_amp_foreach_")):
            return _call(operator, args, kwargs or {})
        # One after the other: all at once may not fit into memory.
        count = len(args[0])
        results = []
        for at in range(count):
            own = (
                [value[at]] if isinstance(value, (list, tuple)) and len(value) == count else value
                for value in args
            )
            results += _call(operator, tuple(own), kwargs or {}) or []
        return results if operator._schema.returns else None

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, values):
        if entry_of(values) is self._entry:  # as when a model is moved to where it is
            return
        if values.size() != self.size() or values.dtype != self.dtype:
            raise RuntimeError(
                f"a gradient on the drive, {self.dtype} of {tuple(self.size())}, was given values "
                f"of {values.dtype} and {tuple(values.size())}: those of its own kind are wanted"
            )
        self.detach().copy_(values)

    def _refuse(self, *_, **__):
        raise _no_memory("this call")

    data_ptr = numpy = tolist = share_memory_ = __dlpack__ = _refuse

    def __deepcopy__(self, memo):
        return memo.setdefault(id(self), self.clone())

    def __reduce_ex__(self, protocol):
        return self.clone().__reduce_ex__(protocol)

    def __repr__(self):
        return f"<gradient on the drive: {self.dtype} of {tuple(self.size())}, {self.device}>"


def entry_of(gradient):
    """What knows where a gradient is on the drive; None for one in memory and for None."""
    if hasattr(gradient, "to_local"):
        gradient = gradient.detach().to_local()
    return gradient._entry if isinstance(gradient, StoredGradient) else None


def _no_memory(what):
    return RuntimeError(
        f"{what} wants the memory of a gradient that is on the drive (offload_gradients=True): "
        "read it with p.grad.clone(), and assign p.grad to change it"
    )


def _call(operator, args, kwargs):
    """One operator on one gradient, or on lists with one."""
    first = args[0][0] if isinstance(args[0], (list, tuple)) and args[0] else args[0]
    if isinstance(first, StoredGradient):
        done, result = _without_reading(operator, first, args, kwargs)
        if done:
            return result
    return _in_memory(operator, args, kwargs)


def _without_reading(operator, gradient, args, kwargs):
    """(whether that has sufficed, what the operator returns)."""
    kind, entry, rest = operator.overloadpacket, gradient._entry, args[1:]
    result = gradient if operator._schema.returns else None
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


def _known_norm(gradient, dtype):
    """The 2-norm as torch gives it; None where it has to be computed."""
    norm = gradient._entry.known_norm()
    if norm is None or dtype not in (None, norm.dtype):
        return None
    rounded = gradient.dtype if dtype is None and gradient.dtype in _HALF else norm.dtype
    return norm.to(rounded, copy=True)


def _is_number(value):
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and value.dim() == 0
    if isinstance(value, (list, tuple)):
        return all(map(_is_number, value))
    return True


def _is_like(value, gradient):
    return (
        type(value) is torch.Tensor
        and value.layout == torch.strided
        and value.size() == gradient.size()
        and value.dtype == gradient.dtype
    )


def _in_memory(operator, args, kwargs):
    """Reads the gradients, computes, and writes those that have changed."""
    if operator.namespace != "aten":  # whether such an operator changes them is not known
        raise _no_memory(str(operator))
    if is_view(operator):
        return _alias(operator, *args)
    changed = written(operator, args, kwargs)
    if any(entry_of(tensor) is None for tensor in changed):
        _refuse_buckets()
    loaded = {}  # entry -> (stand-in, values)

    def load(value):
        if not isinstance(value, StoredGradient):
            return value
        if value._entry not in loaded:
            loaded[value._entry] = value, value._entry.load()
        return loaded[value._entry][1]

    result = operator(*mapped(load, args), **mapped(load, kwargs))
    for entry in {entry_of(tensor): None for tensor in changed}:
        if entry is not None:
            entry.save(loaded[entry][1])
    stand_ins = {id(values): stand_in for stand_in, values in loaded.values()}
    return mapped(lambda value: stand_ins.get(id(value), value), result)


def _alias(operator, gradient, *rest):
    """A view, if it has the same shape: nothing in it but the gradient itself."""
    same = operator in (_aten.detach.default, _aten.alias.default)
    if operator is _aten.view.default:
        same = tuple(rest[0]) == tuple(gradient.size())
    if not same:
        raise _no_memory(str(operator))
    return StoredGradient(gradient._entry)


def _refuse_buckets():
    """DistributedDataParallel copies gradients to its buckets while backward computes them."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            "DistributedDataParallel, or a hook as it has them, copies a gradient to memory in the "
            "backward pass, and offload_gradients=True has moved that to the drive: leave "
            "offload_gradients out, or shard the model with FSDP2 (fully_shard) instead"
        )
