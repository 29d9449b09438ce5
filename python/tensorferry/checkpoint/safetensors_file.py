"""Saves and loads safetensors files: with checksums, and their tensors begin on a page."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from .._core import SafetensorsFile, save_safetensors
from .._progress import Progress, report_of
from .._saving.line import begin_save, save_in_background
from .._shared_handle import shared_handle
from ..safetensors.contents import SafetensorsContents, bytes_of_contiguous
from ..safetensors.errors import SafetensorError
from ..safetensors.serialization import CODES, TensorSpec
from ..safetensors.shared_tensors import find_shared_tensors
from ..safetensors.torch import load_file
from .unchecked import log_unchecked

if TYPE_CHECKING:
    from .._saving.line import WhenBusy
    from .._saving.saving import Saving
    from ..safetensors.opened import Verify

_log = logging.getLogger("tensorferry")

# Direct I/O reads tensors in place if they begin on a page of the file.
_ALIGNMENT = 4096
_METADATA = {"format": "pt"}  # transformers asks for it


def save_safetensors_file(obj: object, path: str, progress: Progress) -> None:
    """Writes a dict of tensors to a new file that replaces `path` when it is on the drive."""
    tensors = _checked(obj)
    save_safetensors(
        shared_handle(),
        path,
        [_row(name, tensor) for name, tensor in tensors.items()],
        metadata=_METADATA,
        checksums=True,
        alignment=_ALIGNMENT,
        progress=report_of(progress, "save"),
    )


def save_safetensors_file_in_background(
    obj: object, path: str, progress: Progress, stage_bytes: int | None, when_busy: WhenBusy
) -> Saving:
    """The same, but returns when the tensors may be changed."""
    begin_save(stage_bytes, when_busy)
    rows = [_row(name, tensor) for name, tensor in _checked(obj).items()]
    contents = SafetensorsContents(path, rows, _METADATA, checksums=True, alignment=_ALIGNMENT)
    return save_in_background(contents, progress, stage_bytes, when_busy)


def load_safetensors_file(
    path: str, map_location: object, mapping: bool, verify: bool, progress: Progress
) -> dict[str, torch.Tensor]:
    """Returns all tensors of a file, and compares the checksums that it has. What is mapped is not
    compared."""
    if map_location is not None and not isinstance(map_location, (str, torch.device)):
        raise TypeError(
            f"map_location is a {type(map_location).__name__}: a safetensors file does not say "
            "where its tensors were, so give one device for all of them"
        )
    if mapping:
        _log.info("load %s with safetensors: mmap=True wants it mapped", path)
        return load_file(path, map_location or "cpu", mapping=True)
    opened = SafetensorsFile(path)  # raises what other damaged files raise
    if verify:
        log_unchecked(path, opened)
    present: Verify = "if_present" if verify else False
    try:
        return load_file(path, map_location or "cpu", verify=present, progress=progress)
    except SafetensorError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None  # as other damaged files raise it
        raise


def _checked(obj: object) -> dict[str, torch.Tensor]:
    if not isinstance(obj, dict):
        raise _refusal(f"this is a {_kind(obj)}", "give a dict of tensors")
    for name, tensor in obj.items():
        if not isinstance(name, str):
            raise _refusal(f"the key {name!r} is a {_kind(name)}", "make it a str")
        if not _is_utf8(name):
            raise _refusal(f"the key {name!r} has half of a character", "rename it")
        if not isinstance(tensor, torch.Tensor):
            raise _refusal(f"{name!r} holds a {_kind(tensor)}", "leave it out")
        if tensor.layout != torch.strided:
            raise _refusal(f"{name!r} holds a tensor of {tensor.layout}", "call to_dense() on it")
        if tensor.is_meta:
            raise _refusal(f"{name!r} holds a tensor of the meta device", "give it values")
        if _dtype(tensor) not in CODES:
            raise _refusal(f"{name!r} holds a tensor of {tensor.dtype}", "view it as another dtype")
    for names in find_shared_tensors(obj):
        if len(names) > 1:
            shown = " and ".join(repr(name) for name in sorted(names))
            raise _refusal(f"{shown} share memory", "keep one of them, or clone() them")
    return obj


def _refusal(found: str, cure: str) -> TypeError:
    return TypeError(
        f"a safetensors file holds tensors by name, each with memory of its own, but {found}: "
        f"{cure}, or save with format='torch'"
    )


def _kind(value: object) -> str:
    return type(value).__name__


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _row(name: str, tensor: torch.Tensor) -> tuple[str, str, list[int], Any]:
    """Returns what the extension takes: (name, dtype, shape, memory)."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if plain.device.type != "cuda" or torch.version.cuda is None:
        plain = plain.cpu()
    spec = TensorSpec(
        dtype=_dtype(plain),
        shape=tuple(plain.shape),
        data_ptr=plain.data_ptr(),
        data_len=plain.nelement() * plain.element_size(),
    )
    memory = bytes_of_contiguous(plain) if plain.nelement() else b""
    return name, spec.dtype, spec.shape, memory
