"""Imported at the start of Python when TENSORFERRY_DEEPSPEED is set: see tensorferry.deepspeed.

Waits for somebody to import DeepSpeed and enables tensorferry in it then.
"""

import importlib.util
import sys


class _Watch:
    """Finds `deepspeed` as everybody else does, and enables tensorferry once it is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "deepspeed":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            from . import deepspeed

            deepspeed.enable()

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Watch())
