"""Keeps work out of the graphs of torch.compile, without loading the compiler (two seconds) for
programs that do not use it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def not_compiled_alone(function: Function) -> Function:
    """Makes torch.compile not compile this function by itself. It may still become a part of the
    graph of its caller."""
    skip_code = getattr(torch._C._dynamo.eval_frame, "skip_code", None)
    if skip_code is not None:
        skip_code(function.__code__)
    return function


def outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function as one at which graphs of torch.compile end: it runs between two of
    them, with all that it calls, as Python runs it."""
    disabled: list[Callable[..., Any]] = []

    @not_compiled_alone
    @functools.wraps(function)
    def outside(*args: Any) -> Any:
        if not disabled:
            if "torch._dynamo" not in sys.modules:
                return function(*args)
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args)

    marks = {"_torchdynamo_disable": True, "_torchdynamo_disable_msg": "it brings in weights"}
    vars(outside).update(marks)
    return outside
