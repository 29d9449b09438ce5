"""Says which tensors of safetensors files have no checksum, when they are loaded all the same."""

from __future__ import annotations

import logging

from .._core import SafetensorsFile

_log = logging.getLogger("tensorferry")
_SHOWN = 3


def log_unchecked(path: str, opened: SafetensorsFile) -> None:
    """Writes to the log what cannot be compared. A file of another program has no checksums at all;
    that some are missing, or do not fit, is worth a warning."""
    unchecked, tensors = opened.unchecked, opened.tensors
    if opened.checksums_problem:
        _log.warning("%s: not all tensors are checked: %s", path, opened.checksums_problem)
    elif len(unchecked) == sum(row[5] > 0 for row in tensors):
        _log.info("%s has no checksums: its tensors are not checked", path)
    elif unchecked:
        more = " and others" if len(unchecked) > _SHOWN else ""
        _log.warning(
            "%s: %d of %d tensors have no checksum and are not checked: %s%s",
            path,
            len(unchecked),
            len(tensors),
            ", ".join(unchecked[:_SHOWN]),
            more,
        )
