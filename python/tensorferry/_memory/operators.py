"""What the schema of a torch operator says about its arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class UnseenChanges(TorchFunctionMode):
    """Calls note(tensor) for each tensor that this thread changes in inference mode, where autograd
    counts no changes."""

    def __init__(self, note: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._writes = _Writes(note)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        unseen = torch.is_inference_mode_enabled()
        with self._writes if unseen else contextlib.nullcontext():
            return function(*args, **(kwargs or {}))


class _Writes(TorchDispatchMode):
    def __init__(self, note: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        for tensor in written(operator, args, kwargs or {}):
            self._note(tensor)
        return result


def written(
    operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """Returns the tensors that a call of an operator changes."""
    found: list[Any] = []
    for number, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        found += value if isinstance(value, (list, tuple)) else [value]
    return [value for value in found if isinstance(value, torch.Tensor)]


def is_view(operator: OpOverload) -> bool:
    """Returns whether the result shares memory with an argument that the operator only reads."""
    aliases = (argument.alias_info for argument in operator._schema.arguments)
    return any(alias is not None and not alias.is_write for alias in aliases)


def mapped(function: Callable[[Any], Any], values: Any) -> Any:
    """Returns arguments or results with function(value) for each value, also inside lists."""
    if isinstance(values, (list, tuple)):
        return type(values)(mapped(function, value) for value in values)
    if isinstance(values, dict):
        return {name: mapped(function, value) for name, value in values.items()}
    return function(values)
