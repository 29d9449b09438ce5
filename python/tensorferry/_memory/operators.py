"""What the schema of a torch operator says of its arguments."""

import contextlib

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class UnseenChanges(TorchFunctionMode):
    """Calls note(tensor) for what this thread changes in inference mode, which autograd does not
    see."""

    def __init__(self, note):
        super().__init__()
        self._writes = _Writes(note)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        unseen = torch.is_inference_mode_enabled()
        with self._writes if unseen else contextlib.nullcontext():
            return function(*args, **(kwargs or {}))


class _Writes(TorchDispatchMode):
    def __init__(self, note):
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        for tensor in written(operator, args, kwargs or {}):
            self._note(tensor)
        return result


def written(operator, args, kwargs):
    """The tensors that a call of an operator changes."""
    found = []
    for number, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        found += value if isinstance(value, (list, tuple)) else [value]
    return [value for value in found if isinstance(value, torch.Tensor)]


def is_view(operator):
    """Whether it returns memory of an argument that it does not change."""
    aliases = (argument.alias_info for argument in operator._schema.arguments)
    return any(alias is not None and not alias.is_write for alias in aliases)


def mapped(function, values):
    """Arguments or results with function(value) in place of each value, also in lists."""
    if isinstance(values, (list, tuple)):
        return type(values)(mapped(function, value) for value in values)
    if isinstance(values, dict):
        return {name: mapped(function, value) for name, value in values.items()}
    return function(values)
