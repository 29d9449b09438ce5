"""What the schema of a torch operator says of its arguments."""

import torch


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
