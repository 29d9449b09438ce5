"""The package safetensors itself, for what tensorferry leaves to it."""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # as in typing, which takes long to import
if TYPE_CHECKING:
    from typing import Any


def original_safe_open() -> Any:
    """Returns safetensors' own safe_open, also while enable() has put ours in its place."""
    try:
        return importlib.import_module("safetensors._safetensors_rust").safe_open
    except ModuleNotFoundError as missing:
        if missing.name != "safetensors":
            raise
        raise ModuleNotFoundError(
            "this needs the package safetensors: pip install safetensors", name="safetensors"
        ) from None
