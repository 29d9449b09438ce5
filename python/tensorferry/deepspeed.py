"""DeepSpeed on tensorferry: after enable(), its op builders return our classes, with no JIT build.

>>> import tensorferry.deepspeed
>>> tensorferry.deepspeed.enable()                    # before or after `import deepspeed`
>>> from deepspeed.ops.op_builder import AsyncIOBuilder
>>> AsyncIOBuilder().load().aio_handle
<class 'tensorferry.aio.aio_handle'>
>>> tensorferry.deepspeed.disable()

enable() replaces async_io, gds and pin_memory and leaves other ops alone. To enable it without a
change to a program, set TENSORFERRY_DEEPSPEED=1 in its environment; `ds_report` then shows the ops
as compatible.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types

from . import _core, aio

TYPE_CHECKING = False  # as in typing, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["disable", "enable"]

_undo: list[Callable[[], object]] = []  # disable() calls these, the newest first


def enable() -> None:
    """Makes DeepSpeed use tensorferry for NVMe and page-locked memory in this process."""
    if _undo:
        return
    try:
        builders = importlib.import_module("deepspeed.ops.op_builder")
    except ModuleNotFoundError as missing:
        if missing.name != "deepspeed":
            raise
        raise ModuleNotFoundError(
            "deepspeed is not installed: pip install deepspeed", name="deepspeed"
        ) from None
    try:
        _replace_builders(builders)
        _add_functions()
        _mark_compatible(builders)
    except BaseException:
        disable()
        raise


def disable() -> None:
    """Gives DeepSpeed its own ops back. Existing handles go on working."""
    while _undo:
        _undo.pop()()


def _set(owner: object, name: str, value: object) -> None:
    """Like setattr(), but disable() undoes it."""
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    if before is missing:
        _undo.append(lambda: delattr(owner, name))
    else:
        _undo.append(lambda: setattr(owner, name, before))


@functools.cache
def _op(name: str) -> types.ModuleType:
    """Makes the module that a builder's load() returns in place of DeepSpeed's extension."""
    op: Any = types.ModuleType(f"tensorferry.deepspeed.{name}")
    op.__file__ = _core.__file__  # DeepSpeed opens it with ctypes
    if name == "pin_memory":
        op.pin_handle = aio.pin_handle
    else:
        # Under DeepSpeed's own names these print the timing line, as DeepSpeed's functions do.
        op.aio_read = functools.partial(aio.aio_read, verbose=True)
        op.aio_write = functools.partial(aio.aio_write, verbose=True)
        op.deepspeed_memcpy = aio.deepspeed_memcpy
        op.aio_handle = aio.aio_handle
    if name == "gds":
        op.gds_handle = aio.gds_handle
    module: types.ModuleType = op
    return module


def _compatible(name: str) -> bool:
    return name != "gds" or aio.gds_handle.available()


_BUILDERS = {
    "async_io": "AsyncIOBuilder",
    "gds": "GDSBuilder",
    "pin_memory": "PinMemoryBuilder",
}


def _replace_builders(builders: types.ModuleType) -> None:
    for name, builder_name in _BUILDERS.items():
        builder = getattr(builders, builder_name, None)
        if builder is None:  # an older DeepSpeed, which does not use it
            continue
        if getattr(builder, "NAME", None) != name:
            # The accelerator lacks this op, and one class stands for all the ops that it lacks.
            # Modules have bound that class under this name already.
            ours = type(builder_name, (builder,), {"NAME": name})
            for module in [m for key, m in sys.modules.items() if key.startswith("deepspeed.")]:
                if vars(module).get(builder_name) is builder:
                    _set(module, builder_name, ours)
            builder = ours
        _set(builder, "load", lambda self, verbose=True, name=name: _op(name))
        _set(builder, "is_compatible", lambda self, verbose=False, name=name: _compatible(name))


def _add_functions() -> None:
    # DeepSpeed documents aio_read and aio_write in this module but does not define them.
    module = importlib.import_module("deepspeed.ops.aio")
    for name in ("aio_read", "aio_write", "aio_handle"):
        _set(module, name, getattr(_op("async_io"), name))


def _mark_compatible(builders: types.ModuleType) -> None:
    # DeepSpeed makes the table at first use, by probing compilers: change it whether it exists
    # already or not, and do not force the probing.
    ops = importlib.import_module("deepspeed.ops")
    ours = {name: _compatible(name) for name, has in _BUILDERS.items() if hasattr(builders, has)}
    made = vars(ops).get("__compatible_ops__")
    if made is not None:
        _set(ops, "__compatible_ops__", made | ours)
        return
    make = vars(ops).get("__getattr__")
    if make is None:
        return

    def lookup(name: str) -> Any:
        value = make(name)
        if name == "__compatible_ops__":
            value.update(ours)
        return value

    def forget() -> None:
        vars(ops).pop("__compatible_ops__", None)

    _set(ops, "__getattr__", lookup)
    _undo.append(forget)
