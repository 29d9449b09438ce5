"""Puts tensorferry in the place of safetensors in a running program, and takes it out again."""

from __future__ import annotations

import functools
import importlib
import sys
import types

from .._import_watch import ImportWatch

TYPE_CHECKING = False  # as in typing, which takes long to import
if TYPE_CHECKING:
    from typing import Any

# What is replaced, by module of safetensors. With mapping, what reads files stays as it is.
_SAVERS = {
    "": ["serialize", "serialize_file", "deserialize", "TensorSpec"],
    ".torch": ["save", "save_file", "save_model", "load"],
    ".numpy": ["save", "save_file", "load"],
}
_READERS = {
    "": ["safe_open", "_safe_open_handle"],
    ".torch": ["load_file", "load_model"],
    ".numpy": ["load_file"],
}

_replaced: dict[int, tuple[Any, Any]] = {}  # (theirs, ours) by the id of ours
_watches: list[ImportWatch] = []


def enable(*, mapping: bool = False) -> None:
    """Makes programs that use safetensors use tensorferry, in this process.

    Call it before or after they import safetensors, transformers or accelerate. Each process then
    has its own copy of what it loads. With `mapping=True` files are mapped as before, so that
    processes share the page cache, and only saving is ours.
    """
    disable()
    try:
        importlib.import_module("safetensors")
    except ModuleNotFoundError as missing:
        if missing.name != "safetensors":
            raise
        raise ModuleNotFoundError(
            "safetensors is not installed: pip install safetensors", name="safetensors"
        ) from None
    for module, savers in _SAVERS.items():
        names = savers if mapping else savers + _READERS[module]
        if "safetensors" + module in sys.modules:
            _replace(module, names)
        else:  # it would import torch or NumPy, which the program may not need
            then = functools.partial(_replace, module, names)
            _watches.append(ImportWatch("safetensors" + module, then))


def disable() -> None:
    """Gives programs the functions of safetensors back. Tensors that were loaded stay."""
    while _watches:
        _watches.pop().stop()
    _exchange({ours: theirs for ours, (theirs, _) in _replaced.items()})
    _replaced.clear()


def _replace(module: str, names: list[str]) -> None:
    theirs = importlib.import_module("safetensors" + module)
    ours = importlib.import_module("tensorferry.safetensors" + module)
    exchanged = {}
    for name in names:
        original = getattr(theirs, name, None)  # an older version does not have all
        if original is not None:
            double = _double(getattr(ours, name.removeprefix("_")), theirs.__name__, name)
            _replaced[id(double)] = (original, double)
            exchanged[id(original)] = double
    _exchange(exchanged)


def _double(thing: Any, module: str, name: str) -> Any:
    """Returns a copy of a function or class that only programs of safetensors will have.

    So disable() knows whom to take it from: who imported it from tensorferry keeps it.
    """
    double: Any
    if isinstance(thing, type):
        double = type(name, (thing,), {"__doc__": thing.__doc__, "__slots__": ()})
    else:
        double = functools.update_wrapper(
            types.FunctionType(
                thing.__code__,
                thing.__globals__,
                name,
                thing.__defaults__,
                thing.__closure__,
            ),
            thing,
        )
        del double.__wrapped__
        double.__kwdefaults__ = thing.__kwdefaults__
    double.__module__ = module
    return double


def _exchange(replacements: dict[int, Any]) -> None:
    """Puts, in all modules, each object in the place of the one that has this id."""
    for module in list(sys.modules.values()):
        if not isinstance(module, types.ModuleType) or module.__name__ in _SOURCES:
            continue
        names = vars(module)
        for name in [name for name, value in list(names.items()) if id(value) in replacements]:
            names[name] = replacements[id(names[name])]


# Where the originals are; they stay there.
_SOURCES = {"safetensors._safetensors_rust", __name__}
