"""SafetensorError, and our errors in the words of safetensors."""

from __future__ import annotations

import contextlib
import errno
import os
import re

TYPE_CHECKING = False  # as in typing, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

if TYPE_CHECKING:

    class SafetensorError(Exception):
        """What safetensors raises for files, tensors and slices that it refuses."""

else:
    try:  # the same class, so that `except safetensors.SafetensorError` works for both
        from safetensors import SafetensorError
    except ImportError:

        class SafetensorError(Exception):
            """What safetensors raises for files, tensors and slices that it refuses."""


PACKED_MISFIT = (
    "The slice is slicing for subbytes dtypes, and the slice does not end up at a byte boundary, "
    "this is invalid."
)
SIZE_OVERFLOW = "overflow computing buffer size from shape and/or element type"
WRONG_SIZE = "invalid shape, data type, or offset for tensor"

# What our messages about a header say, and how safetensors says it.
_HEADER_WORDS = [
    (r"shorter than the 8 bytes", "header too small"),
    (r"its header claims .* are not allowed", "header too large"),
    (r"its header claims .* after the first 8", "invalid header length"),
    (r"a byte that is not UTF-8", "invalid UTF-8 in header"),
    (r"its tensors have .* follow the header", "incomplete metadata, file not fully covered"),
    (
        r'tensor "(?P<name>.*)": data_offsets \S+ (end before|overlap|leave a hole)',
        "invalid offset for tensor `{name}`",
    ),
    (r"data_offsets \S+ have \d+ bytes where", WRONG_SIZE),
    (r"does not end on a byte", PACKED_MISFIT),
    (r"more \w+ than 64 bits can count", SIZE_OVERFLOW),
]


def header_error(error: OSError, what: str) -> SafetensorError:
    """Returns the exception for a file whose header breaks a rule: its words, then ours."""
    ours = error.strerror or str(error)
    ours = ours.removeprefix("open: ")
    ours = ours.replace("this is not a safetensors file, or it is damaged: ", "")
    for pattern, theirs in _HEADER_WORDS:
        found = re.search(pattern, ours, re.DOTALL)
        if found:
            theirs = theirs.format(**found.groupdict())
            break
    else:
        theirs = "invalid JSON in header"
    return SafetensorError(f"{what}: {theirs} ({ours})")


@contextlib.contextmanager
def damage_is_a_safetensor_error() -> Iterator[None]:
    """Within it, a file that is cut or whose checksum is wrong raises SafetensorError."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EBADMSG, errno.ENODATA):
            raise
        raise SafetensorError(f"Error while reading: {error}") from error


def saving_error(error: OSError) -> SafetensorError:
    """Returns the exception for a file that cannot be written."""
    text = os.strerror(error.errno) if error.errno else str(error)
    return SafetensorError(
        f"Error while serializing: I/O error: {text} (os error {error.errno}): {error}"
    )


def check_type(argument: str, value: Any, wanted: type) -> None:
    """Raises the TypeError of safetensors for an argument of another type."""
    if not isinstance(value, wanted):
        raise TypeError(
            f"argument '{argument}': '{type(value).__name__}' object is not an instance of "
            f"'{wanted.__name__}'"
        )


def check_path(value: Any) -> str:
    """Returns the path as text. Raises the TypeError of safetensors if it is none."""
    try:
        return os.fsdecode(value)
    except TypeError as error:
        raise TypeError(f"argument 'filename': {error}") from None
