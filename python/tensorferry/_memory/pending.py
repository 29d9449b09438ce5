"""Parameters whose new values are not computed yet: reading one computes them first."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .graphs import outside_graphs


class PendingStep(Protocol):
    """What is left of a step."""

    def settle(self, params: Iterable[Tensor]) -> None:
        """Computes the new values of these parameters."""


class PendingParameter(torch.nn.Parameter):
    """What a parameter is while its new values are not computed yet.

    torch asks __torch_function__ before it computes with such a parameter, shows its memory or
    copies it. Code in C++ that does not ask finds NaN: a parameter in memory has its old values
    elsewhere meanwhile."""

    pending_step: PendingStep
    old_values: Tensor | None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _HARMLESS:
            params = [one for one in tree_leaves((args, kwargs)) if type(one) is PendingParameter]
            settle_pending(params)
            if params:
                return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    # These name the class before torch gets to ask.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        settle_pending([self])
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        settle_pending([self])
        return self.__reduce_ex__(protocol)


def can_be_pending(param: Tensor) -> bool:
    """Returns whether a parameter can get its values later: one of a class of its own cannot."""
    return type(param) is torch.nn.Parameter


def make_pending(param: Tensor, step: PendingStep, *, hides_values: bool) -> None:
    """Says that `step` has the new values of a parameter. `hides_values`: it has old ones in
    memory, which nobody may see."""
    old_values = param.data if hides_values else None
    if hides_values:
        param.data = _nothing(param.dtype, param.device).expand(param.size())
    param.__class__ = PendingParameter
    assert isinstance(param, PendingParameter)
    param.pending_step = step
    param.old_values = old_values


def show_old_values(param: Tensor) -> None:
    """Gives a parameter its values back, to compute the new ones from them."""
    if type(param) is PendingParameter and param.old_values is not None:
        with torch._C.DisableTorchFunctionSubclass():
            param.data = param.old_values
        param.old_values = None


def end_pending(param: Tensor) -> None:
    """Says that a parameter has its new values, or never gets them."""
    if type(param) is not PendingParameter:
        return
    show_old_values(param)
    del param.pending_step, param.old_values
    param.__class__ = torch.nn.Parameter


@outside_graphs
def settle_pending(params: Iterable[Tensor | None]) -> None:
    """Computes the new values of those of these parameters that wait for them."""
    pending = [param for param in params if type(param) is PendingParameter]
    for param in pending:
        if type(param) is PendingParameter:  # the one before may have settled this one too
            param.pending_step.settle(pending)


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((), float("nan"), dtype=dtype, device=device)


def _find_harmless() -> frozenset[Any]:
    tensor = torch.Tensor
    readable = [
        *("grad", "requires_grad", "shape", "dtype", "device", "layout", "ndim", "is_leaf"),
        *("is_cuda", "is_cpu", "is_meta", "is_sparse", "grad_fn", "_version", "_grad"),
        *("itemsize", "nbytes", "name", "_backward_hooks", "output_nr"),
    ]
    return frozenset(
        {
            *(getattr(tensor, name).__get__ for name in readable),
            *(getattr(tensor, name).__set__ for name in ("grad", "requires_grad")),
            *(tensor.size, tensor.dim, tensor.ndimension, tensor.numel, tensor.nelement),
            *(tensor.element_size, tensor.is_floating_point, tensor.is_complex),
            *(torch.is_floating_point, torch.is_complex, torch.numel, tensor.is_inference),
            *(tensor.get_device, tensor.__len__, tensor.requires_grad_, tensor.register_hook),
            tensor.register_post_accumulate_grad_hook,
        }
    )


# What tells nothing of the values, or of where they are.
_HARMLESS = _find_harmless()
