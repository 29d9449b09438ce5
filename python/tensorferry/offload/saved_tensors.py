"""What autograd keeps of tensors for the backward pass: hooks before ours, and in-place changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

# (pack, unpack), as torch.autograd.graph.saved_tensors_hooks() takes them.
Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


def current_hooks() -> Hooks | None:
    """Returns the hooks that autograd calls now: of those that were set, the last ones."""
    hooks: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


class ChainedHooks:
    """Hooks that pass what is not theirs to those that were set before. autograd itself calls only
    the last ones."""

    def __init__(self, others: Hooks | None) -> None:
        self.others = others

    def pack_other(self, tensor: torch.Tensor) -> Any:
        return KeptTensor(tensor) if self.others is None else self.others[0](tensor)

    def unpack_other(self, packed: Any) -> torch.Tensor:
        if self.others is None:
            assert isinstance(packed, KeptTensor)
            return packed.restored()
        return self.others[1](packed)


def chain(hooks: Hooks | None) -> Iterator[Hooks]:
    """Goes through hooks and those that they pass tensors to."""
    while hooks is not None:
        yield hooks
        owner = getattr(hooks[0], "__self__", None)
        hooks = owner.others if isinstance(owner, ChainedHooks) else None


class Version:
    """Follows the in-place changes of a tensor without holding its memory."""

    __slots__ = ("_alias", "_expected")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._alias = tensor.detach()  # which shares the count of changes
        self._alias.data = tensor.new_empty(0)
        self._expected = self._alias._version

    def is_current(self) -> bool:
        return self._alias._version == self._expected

    def check(self, size: torch.Size) -> None:
        """Raises if the tensor, of this size, has changed. torch does not check what hooks save."""
        if not self.is_current():
            raise changed_error(self._alias, size, self._expected)


class KeptTensor:
    """A tensor that stays in memory for the backward pass, which raises if it has changed."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()  # else an output would hold the node that holds it
        self._version = None if tensor.is_inference() else self._tensor._version

    def restored(self) -> torch.Tensor:
        if self._version is not None and self._tensor._version != self._version:
            raise changed_error(self._tensor, self._tensor.size(), self._version)
        return self._tensor


def changed_error(tensor: torch.Tensor, size: torch.Size, expected: int) -> RuntimeError:
    """Returns the error that torch raises, in its words: programs look for them."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{tensor.type()} {list(size)}] is at version {tensor._version}; expected "
        f"version {expected} instead. Hint: enable anomaly detection to find the operation that "
        "failed to compute its gradient, with torch.autograd.set_detect_anomaly(True)."
    )
