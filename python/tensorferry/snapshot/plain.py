"""What can be loaded again without running code: the only things that a snapshot takes."""

from __future__ import annotations

import collections

import torch

_SINGLE = (type(None), bool, int, float, complex, str, torch.Tensor, torch.Size, torch.dtype)
_MANY = (list, tuple, set)
_NAMED = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)


def check_plain(what: str, value: object) -> None:
    """Raises TypeError, with the place of the first thing that a snapshot cannot take."""
    if isinstance(value, torch.Tensor) or type(value) in _SINGLE:
        return
    if isinstance(value, _MANY) and type(value) in _MANY:
        for number, each in enumerate(value):
            check_plain(f"{what}[{number}]", each)
    elif isinstance(value, dict) and type(value) in _NAMED:
        for key, each in value.items():
            check_plain(f"a key of {what}", key)
            check_plain(f"{what}[{key!r}]", each)
    else:
        raise TypeError(
            f"{what} is a {type(value).__name__}, which cannot be loaded without running code: "
            "give numbers, text, tensors, lists and dictionaries of them"
        )
