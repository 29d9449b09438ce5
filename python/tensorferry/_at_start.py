"""Python imports this module at its start if TENSORFERRY_DEEPSPEED is set: see
tensorferry.deepspeed.

It waits until the program imports DeepSpeed, and enables tensorferry in it then.
"""

from __future__ import annotations

import importlib.util
import sys

from ._core import privileged

TYPE_CHECKING = False  # as in typing, which takes long to import
if TYPE_CHECKING:
    import types
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec


class _Watch:
    """A finder that lets the others find `deepspeed` and enables tensorferry after its import."""

    looking = False

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> ModuleSpec | None:
        if name != "deepspeed" or self.looking:
            return None
        self.looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.looking = False
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            run(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            from . import deepspeed

            deepspeed.enable()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if not privileged():
    sys.meta_path.insert(0, _Watch())
