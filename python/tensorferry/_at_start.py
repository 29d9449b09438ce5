"""Imported at the start of Python when TENSORFERRY_DEEPSPEED is set: see tensorferry.deepspeed.

Waits for somebody to import DeepSpeed and enables tensorferry in it then.
"""

import importlib.util
import sys

from ._core import privileged


class _Watch:
    """Finds `deepspeed` as everybody else does, and enables tensorferry once it is imported."""

    looking = False

    def find_spec(self, name, path=None, target=None):
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

        def exec_module(module):
            run(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            from . import deepspeed

            deepspeed.enable()

        spec.loader.exec_module = exec_module
        return spec


if not privileged():
    sys.meta_path.insert(0, _Watch())
