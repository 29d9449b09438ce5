"""Python imports this module at its start if TENSORFERRY_DEEPSPEED or TENSORFERRY_SAFETENSORS is
set: see tensorferry.deepspeed and tensorferry.safetensors.

It waits until the program imports DeepSpeed or safetensors, and enables tensorferry in it then.
"""

from __future__ import annotations

import functools
import importlib
import os

from ._core import privileged
from ._import_watch import ImportWatch


def _enable(package: str) -> None:
    importlib.import_module(f"tensorferry.{package}").enable()


for _package in ("deepspeed", "safetensors"):
    _value = "" if privileged() else os.environ.get(f"TENSORFERRY_{_package.upper()}", "")
    if _value not in ("", "0"):
        ImportWatch(_package, functools.partial(_enable, _package))
