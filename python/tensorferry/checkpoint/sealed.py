"""What a pickle may call, but not change.

An unpickler sets attributes of whatever a pickle tells it to: also those of a class or a function
that the pickle only names. So a hostile file could change them for the whole process. Unpicklers of
ours hand out these doubles instead. They know nothing of torch.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, NoReturn


def _refuse(state: object) -> NoReturn:
    raise pickle.UnpicklingError("it would change what it only may name")


class Sealed:
    """A function, or an object that is equal to it alone."""

    __slots__ = ("_held",)

    def __init__(self, held: object) -> None:
        self._held = held

    def __call__(self, *args: Any) -> Any:
        assert callable(self._held)
        return self._held(*args)

    def __eq__(self, other: object) -> bool:
        return self._held == other

    def __hash__(self) -> int:
        return hash(self._held)

    # An unpickler asks for it before it sets anything.
    def __setstate__(self, state: object) -> NoReturn:
        _refuse(state)


class _SealedClass(type):
    made: Callable[..., Any]

    def __call__(cls, *args: Any) -> Any:
        return cls.made(*args)

    def __setstate__(cls, state: object) -> NoReturn:
        _refuse(state)


def sealed_class(original: type) -> type:
    """Returns a class whose objects are those of the original one."""

    def make_empty(cls: type, *args: Any) -> Any:  # for the opcode NEWOBJ, which wants a class
        return original.__new__(original, *args)

    members = {"__slots__": (), "__new__": make_empty, "made": staticmethod(original)}
    return _SealedClass(original.__name__, (), members)
