"""Safetensors files of torch tensors: the functions of safetensors.torch, at the drive's speed.

>>> import torch
>>> from tensorferry.safetensors.torch import load_file, save_file
>>> save_file({"weight": torch.arange(4.0)}, "model.safetensors")
>>> load_file("model.safetensors")["weight"]
tensor([0., 1., 2., 3.])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import torch

from .._saving.line import begin_save, save_in_background
from .contents import SafetensorsContents, bytes_of_contiguous
from .errors import check_path, check_type, saving_error
from .frameworks import TorchTensors
from .opened import safe_open
from .serialization import (
    TensorSpec,
    check_metadata,
    deserialize,
    serialize,
    write_file,
)
from .shared_tensors import duplicate_names, find_shared_tensors, storage_ptr, storage_size

if TYPE_CHECKING:
    import os
    from typing import Any

    from .._progress import Progress
    from .._saving.line import WhenBusy
    from .._saving.saving import Saving
    from .opened import Verify

__all__ = [
    "load",
    "load_file",
    "load_model",
    "save",
    "save_file",
    "save_model",
    "storage_ptr",
    "storage_size",
]


@overload
def save_file(
    tensors: dict[str, torch.Tensor],
    filename: str | os.PathLike[str],
    metadata: dict[str, str] | None = None,
    *,
    checksums: bool = False,
    progress: Progress = None,
    wait: Literal[True] = True,
    stage_bytes: int | None = None,
    when_busy: WhenBusy = "queue",
) -> None: ...
@overload
def save_file(
    tensors: dict[str, torch.Tensor],
    filename: str | os.PathLike[str],
    metadata: dict[str, str] | None = None,
    *,
    checksums: bool = False,
    progress: Progress = None,
    wait: Literal[False],
    stage_bytes: int | None = None,
    when_busy: WhenBusy = "queue",
) -> Saving: ...
def save_file(
    tensors: dict[str, torch.Tensor],
    filename: str | os.PathLike[str],
    metadata: dict[str, str] | None = None,
    *,
    checksums: bool = False,
    progress: Progress = None,
    wait: bool = True,
    stage_bytes: int | None = None,
    when_busy: WhenBusy = "queue",
) -> Saving | None:
    """Saves tensors, which may be on GPUs, to a file that replaces `filename`.

    The file is what safetensors writes, byte for byte. When this returns, the file is on the drive.
    When it raises, also at Ctrl-C, the old file is as it was and nothing else is left.
    `checksums=True` adds XXH3 checksums, in an entry of the metadata; `progress` is True for a bar,
    or a function of (done bytes, total bytes).

    `wait=False` returns a Saving, with the same file, as soon as the tensors may be changed:
    `stage_bytes` and `when_busy` are those of tensorferry.checkpoint.save().
    """
    if not wait:
        begin_save(stage_bytes, when_busy)
    _check(tensors)
    path = check_path(filename)
    check_metadata(metadata)
    rows: list[tuple[str, str, list[int], object]] = []
    for name, tensor in tensors.items():
        spec, memory = _described(name, tensor)
        rows.append((name, spec.dtype, spec.shape, memory))
    if wait:
        write_file(rows, path, metadata, checksums=checksums, progress=progress)
        return None
    try:
        contents = SafetensorsContents(path, rows, metadata, checksums=checksums, alignment=8)
        return save_in_background(contents, progress, stage_bytes, when_busy)
    except OSError as error:
        raise saving_error(error) from error


def save(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """Returns the bytes of a file with these tensors."""
    _check(tensors)
    # The copies that are made here live until serialize() has returned.
    on_cpu = {name: _plain(name, tensor).cpu() for name, tensor in tensors.items()}
    specs = {name: _spec(name, tensor) for name, tensor in on_cpu.items()}
    return serialize(specs, metadata)


def load_file(
    filename: str | os.PathLike[str],
    device: str | int | torch.device = "cpu",
    *,
    backend: str = "mmap",
    verify: Verify = False,
    progress: Progress = None,
    mapping: bool = False,
) -> dict[str, torch.Tensor]:
    """Loads all tensors of a file, in one read. They are in memory of their own.

    `verify=True` checks the checksums of a file that was saved with them, and raises
    SafetensorError if a tensor has none; `verify="if_present"` checks those that are there.
    `progress` is True for a bar, or a function of (done bytes, total bytes). `mapping=True` maps
    the file instead, as the package safetensors does: processes of one machine then share its
    pages.
    """
    with safe_open(
        filename,
        framework="pt",
        device=device,
        backend=backend,
        verify=verify,
        progress=progress,
        mapping=mapping,
    ) as file:
        found: dict[str, torch.Tensor] = file.get_tensors()
        return found


def load(data: bytes) -> dict[str, torch.Tensor]:
    """Returns the tensors of a file that is in memory. They have copies of its bytes."""
    make = TorchTensors("cpu")
    found = {}
    for name, tensor in deserialize(data):
        dtype = make.dtype(tensor["dtype"])
        shape = tensor["shape"]
        if tensor["dtype"] == "F4":
            shape = [*shape[:-1], shape[-1] // 2]
        if tensor["data"]:
            memory = torch.frombuffer(tensor["data"], dtype=torch.uint8)
            found[name] = make.tensor(memory, dtype, shape)
        else:
            found[name] = torch.empty(shape, dtype=dtype, device="cpu")
    return found


def save_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    metadata: dict[str, str] | None = None,
    force_contiguous: bool = True,
    *,
    checksums: bool = False,
    progress: Progress = None,
) -> None:
    """Saves the state_dict of a model. Tensors that share memory are saved once.

    The metadata then names, for each name that is left out, the one that has its memory.
    """
    tensors = model.state_dict()
    for kept, others in duplicate_names(tensors).items():
        metadata = {} if metadata is None else metadata
        for name in others:
            metadata.setdefault(name, kept)
            del tensors[name]
    if force_contiguous:
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        save_file(tensors, filename, metadata, checksums=checksums, progress=progress)
    except ValueError as error:
        raise ValueError(
            f"{error} Or use save_model(..., force_contiguous=True), read the docs for potential "
            "caveats."
        ) from error


def load_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    strict: bool = True,
    device: str | int | torch.device = "cpu",
    *,
    backend: str = "mmap",
    verify: Verify = False,
    progress: Progress = None,
    mapping: bool = False,
) -> tuple[set[str], list[str]]:
    """Loads a file into a model: (missing names, unexpected names). `strict` refuses either."""
    tensors = load_file(
        filename,
        device=device,
        backend=backend,
        verify=verify,
        progress=progress,
        mapping=mapping,
    )
    duplicates = duplicate_names(model.state_dict(), tensors)
    missing_names, unexpected = model.load_state_dict(tensors, strict=False)
    missing = set(missing_names)
    for name in (name for others in duplicates.values() for name in others):
        if name in missing:
            missing.remove(name)
        else:
            unexpected.append(name)
    if strict and (missing or unexpected):
        text = f"Error(s) in loading state_dict for {type(model).__name__}:"
        for what, names in (("Missing", missing), ("Unexpected", unexpected)):
            if names:
                shown = ", ".join(f'"{name}"' for name in sorted(names))
                text += f"\n    {what} key(s) in state_dict: {shown}"
        raise RuntimeError(text)
    return missing, unexpected


def _check(tensors: Any) -> None:
    if not isinstance(tensors, dict):
        raise ValueError(f"Expected a dict of [str, torch.Tensor] but received {type(tensors)}")
    sparse = []
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"Key `{name}` is invalid, expected torch.Tensor but received {type(tensor)}"
            )
        if tensor.layout != torch.strided:
            sparse.append(name)
    if sparse:
        raise ValueError(
            f"You are trying to save a sparse tensors: `{sparse}` which this library does not "
            "support. You can make it a dense tensor before saving with `.to_dense()` but be aware "
            "this might make a much larger file than needed."
        )
    failing = [names for names in find_shared_tensors(tensors) if len(names) > 1]
    if failing:
        raise RuntimeError(
            "Some tensors share memory, this will lead to duplicate memory on disk and potential "
            f"differences when loading them again: {failing}. A potential way to correctly save "
            "your model is to use `save_model`. More information at "
            "https://huggingface.co/docs/safetensors/torch_shared_tensors"
        )


def _plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor as it can be saved: its bytes are its values."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"You are trying to save a non contiguous tensor: `{name}` which is not allowed. It "
            "either means you are trying to save tensors which are reference of each other in "
            "which case it's recommended to save only the full tensors, and reslice at load time, "
            "or simply call `.contiguous()` on your tensor to pack it before saving."
        )
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    check_type("tensor_dict", name, str)
    return TensorSpec(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        data_ptr=tensor.data_ptr(),
        data_len=tensor.nelement() * tensor.element_size(),
    )


def _described(name: str, tensor: torch.Tensor) -> tuple[TensorSpec, object]:
    """Returns what a tensor is, and memory that the extension can read."""
    plain = _plain(name, tensor)
    if plain.device.type != "cuda" or torch.version.cuda is None:
        plain = plain.cpu()
    return _spec(name, plain), bytes_of_contiguous(plain) if plain.nelement() else b""
