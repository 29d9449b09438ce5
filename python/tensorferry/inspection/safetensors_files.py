"""Opens safetensors files, and sets of them."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator

from .._core import File, SafetensorsFile
from ..checkpoint.torch_layout import damaged
from .tensors import Check, Checkpoint, StoredBox, Stretch, Tensor, row_major

# The entry of a file's metadata that has the checksums of its tensors: 16 hex digits for each
# CHUNK_BYTES.
CHECKSUMS = "tensorferry.xxh3"
CHUNK_BYTES = 16 << 20
_DIGITS = 16


def open_safetensors(path: str, shown: str) -> Checkpoint:
    """Opens a file, or the set that an index names."""
    try:
        opened = SafetensorsFile(path)
    except OSError as error:
        if error.filename not in (None, path):
            hint = getattr(error, "hint", "") or error.strerror
            error.hint = f"{hint}; the index {path} names it"  # type: ignore[attr-defined]
        raise
    paths = [file.path for file in opened.files]
    digests = [_digests(file) for file in opened.files]
    misfits = [path for path, found in zip(paths, digests) if found is None]
    tensors, checks = [], []
    for name, dtype, shape, number, offset, count in opened.tensors:
        size = tuple(shape)
        digits = (digests[number] or {}).get(name, "")
        if digits and len(digits) != _DIGITS * -(-count // CHUNK_BYTES):
            misfits.append(paths[number])
            digits = ""
        boxes = (StoredBox(paths[number], offset, (0,) * len(size), size, row_major(size)),)
        tensors.append(Tensor(name, dtype, size, boxes, f"xxh3:{digits}" if digits else None))
        if count:
            expected = [int(digits[at : at + _DIGITS], 16) for at in range(0, len(digits), _DIGITS)]
            place = Stretch(paths[number], offset, count)
            checks.append(Check(name, place, xxh3=tuple(expected)))

    def all_checks() -> Iterator[Check]:
        for misfit in misfits:
            raise damaged(misfit, f"its checksums ({CHECKSUMS}) are not those of its tensors", 8)
        return iter(checks)

    return Checkpoint(shown, "safetensors", tensors, all_checks, metadata=opened.metadata or {})


def _digests(file: File) -> dict[str, str] | None:
    """The checksums in the header of a file, which has been read before; None if they are not."""
    with open(file.path, "rb") as header:
        (length,) = struct.unpack("<Q", header.read(8))
        metadata = json.loads(header.read(length)).get("__metadata__") or {}
    try:
        found = json.loads(metadata.get(CHECKSUMS, "{}"))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and all(map(_is_hex, found.values())) else None


def _is_hex(digits: object) -> bool:
    return isinstance(digits, str) and all(digit in "0123456789abcdef" for digit in digits)
