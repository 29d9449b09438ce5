"""Saves and loads torch's own files and safetensors: crash-safe, checked, by direct I/O.

>>> import tensorferry.checkpoint, torch
>>> model = torch.nn.Linear(64, 64)
>>> tensorferry.checkpoint.save(model.state_dict(), "model.pt")
>>> loaded = tensorferry.checkpoint.load("model.pt")
>>> torch.equal(loaded["weight"], model.weight)
True
"""

from __future__ import annotations

import logging
import os
import pickle
from typing import TYPE_CHECKING, Literal, overload

# Not torch: who only looks where the bytes of a file are does not need it.
from .torch_layout import NotOurs

if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from .._progress import Progress
    from .._saving.line import WhenBusy
    from .._saving.saving import Saving as Saving
    from .torch_reader import MapLocation

__all__ = ["Saving", "free_stage", "load", "save"]

_log = logging.getLogger("tensorferry")

Format = Literal["torch", "safetensors"]


@overload
def save(
    obj: object,
    path: str | os.PathLike[str],
    *,
    format: Format | None = None,
    progress: Progress = None,
    pickle_module: ModuleType = pickle,
    pickle_protocol: int = 2,
    wait: Literal[True] = True,
    stage_bytes: int | None = None,
    when_busy: WhenBusy = "queue",
) -> None: ...
@overload
def save(
    obj: object,
    path: str | os.PathLike[str],
    *,
    format: Format | None = None,
    progress: Progress = None,
    pickle_module: ModuleType = pickle,
    pickle_protocol: int = 2,
    wait: Literal[False],
    stage_bytes: int | None = None,
    when_busy: WhenBusy = "queue",
) -> Saving: ...
def save(
    obj: object,
    path: str | os.PathLike[str],
    *,
    format: Format | None = None,
    progress: Progress = None,
    pickle_module: ModuleType = pickle,
    pickle_protocol: int = 2,  # torch.serialization.DEFAULT_PROTOCOL
    wait: bool = True,
    stage_bytes: int | None = None,
    when_busy: WhenBusy = "queue",
) -> Saving | None:
    """Writes what torch.save(obj, path) writes, byte for byte, and replaces the file as a whole.

    A path that ends in ".safetensors", or format="safetensors", writes that format instead, with
    checksums: `obj` is then a dict of names and tensors.

    The bytes go to a hidden file in the same folder, which takes the name `path` when all of them
    are on the drive. Until then the old file stays as it is. If the save fails, is interrupted or
    killed, the old file is still there; the next save removes what a killed one has left.

    Storages are written from where they are, on any device, with the settings of
    torch.utils.serialization.config. Do not change tensors meanwhile. `progress=True` prints a bar;
    a function gets (bytes done, bytes in all), and ends the save if it raises.

    A file-like object goes to torch.save; it cannot be format="safetensors".

    `wait=False` returns a Saving, and writes the same file in the background, behind all other work
    of the drive. You may change tensors as soon as the call returns: it has copied them to at most
    `stage_bytes` of page-locked memory (1 GiB, unless you say otherwise). If they need more, it
    waits until the drive has written the rest, and the log says so. Weights on NVMe are not copied.
    A save that comes while another one runs waits for its turn; with when_busy="refuse" it raises
    an OSError (EBUSY). What a save fails with is raised by its wait(), else by the next save with
    wait=False, else at the end of Python, which waits for saves as long as they move.
    """
    import torch

    from .safetensors_file import save_safetensors_file, save_safetensors_file_in_background
    from .torch_writer import save_torch_file, save_torch_file_in_background

    safetensors = _is_safetensors(path, format)
    if not isinstance(path, (str, os.PathLike)):
        if not wait:
            raise TypeError(f"wait=False needs a path, not a {type(path).__name__}")
        _log.info("torch.save saves to a %s: tensorferry saves to paths", type(path).__name__)
        torch.save(obj, path, pickle_module, pickle_protocol)
        return None
    name = os.fspath(path)
    background = progress, stage_bytes, when_busy
    if safetensors:
        if not wait:
            return save_safetensors_file_in_background(obj, name, *background)
        save_safetensors_file(obj, name, progress)
        return None
    if not wait:
        return save_torch_file_in_background(obj, name, pickle_module, pickle_protocol, *background)
    save_torch_file(obj, name, pickle_module, pickle_protocol, progress)
    return None


def free_stage() -> None:
    """Frees the memory that saves with wait=False keep for the next one."""
    from .._saving.line import free_stage as free

    free()


def load(
    path: str | os.PathLike[str],
    map_location: MapLocation = None,
    weights_only: bool | None = True,
    mmap: bool | None = None,
    *,
    format: Format | None = None,
    verify: bool = True,
    progress: Progress = None,
    pickle_module: ModuleType | None = None,
    **pickle_load_args: Any,
) -> Any:
    """Returns what torch.load returns, and compares the checksums in the file.

    torch unpickles; every argument that torch.load has means the same here. Storages are read
    straight to where `map_location` puts them: memory of the CPU that belongs to the tensors, or a
    GPU of CUDA. With `verify` the checksums in the file are compared: bytes that differ raise an
    OSError (EBADMSG) with the path, the record and the offset. `progress` is that of save().

    torch.load itself loads what is not a file of torch.save's zip format (file-like objects, older
    formats, TorchScript) and, with mmap=True, maps the file. The log says so. A path that ends in
    ".safetensors", or format="safetensors", is read as that: `map_location` is then one device, and
    with mmap=True the package safetensors maps the file, without checksums.
    """
    import torch
    from torch.utils.serialization import config

    from .safetensors_file import load_safetensors_file
    from .torch_reader import load_torch_file

    options: dict[str, Any] = dict(weights_only=weights_only, **pickle_load_args)
    if pickle_module is not None:
        options["pickle_module"] = pickle_module
    if mmap is None:
        mmap = config.load.mmap
    if _is_safetensors(path, format):
        return load_safetensors_file(os.fspath(path), map_location, mmap, verify, progress)
    try:
        if not isinstance(path, (str, os.PathLike)):
            raise NotOurs("it is not a path")
        if mmap:
            raise NotOurs("mmap=True wants it mapped")
        return load_torch_file(os.fspath(path), map_location, verify, progress, **options)
    except NotOurs as reason:
        _log.info("torch.load loads %s: %s", path, reason)
    return torch.load(path, map_location=map_location, mmap=mmap, **options)


if not TYPE_CHECKING:

    def __getattr__(name):  # it imports torch
        if name == "Saving":
            from .._saving.saving import Saving

            return Saving
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _is_safetensors(path: object, wanted: Format | None) -> bool:
    """Whether it is that format. Raises if there is no such format, or if it needs a path."""
    if wanted not in ("torch", "safetensors", None):
        raise ValueError(f"format is {wanted!r}; it must be 'torch', 'safetensors' or None")
    if isinstance(path, (str, os.PathLike)):
        named = os.fspath(path).endswith(".safetensors")
        return named if wanted is None else wanted == "safetensors"
    if wanted == "safetensors":
        raise TypeError(
            f"format='safetensors' needs a path, not a {type(path).__name__}; for bytes there are "
            "save() and load() of tensorferry.safetensors.torch"
        )
    return False
