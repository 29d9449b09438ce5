"""Calls a function as soon as the program has imported a module."""

from __future__ import annotations

import importlib.util
import sys

TYPE_CHECKING = False  # as in typing, which takes long to import
if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec


class ImportWatch:
    """A finder that lets the others find a module and calls `then` after its import, once."""

    def __init__(self, module: str, then: Callable[[], object]) -> None:
        self._module = module
        self._then = then
        self._looking = False
        sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Leaves the program alone from now on."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> ModuleSpec | None:
        if name != self._module or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking = False
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            run(module)
            if self in sys.meta_path:
                self.stop()
                self._then()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
