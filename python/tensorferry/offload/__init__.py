"""Keeps weights on NVMe: reads them before a module needs them and releases them after.

>>> import tensorferry.offload, torch
>>> model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Linear(512, 64))
>>> expected = model(torch.ones(1, 64))
>>> weights = tensorferry.offload.parameters(model, nvme_path=".", max_cpu_bytes=256 << 10)
>>> torch.equal(model(torch.ones(1, 64)), expected)
True
>>> weights.close()

Training needs an optimizer of tensorferry.optim, which steps weights on the drive.

Import this module before you make the first tensor: then torch uses huge pages for large ones, and
training is faster (THP_MEM_ALLOC_ENABLE=0 in the environment: never).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._memory.budget import MemoryBudget
from .._memory.buffers import NvmePath, open_space
from .._memory.heap import ask_for_huge_pages, map_large_blocks
from .._memory.layout import page_up
from .activation_hooks import OffloadedActivations
from .activation_store import ActivationStore
from .offloaded import OffloadedParameters, offload_model
from .places import budgeted_place_of, place_of
from .sharded import groups_in, offload_shards

if TYPE_CHECKING:
    from .in_place import Rename
    from .stored_files import CheckpointPath

__all__ = [
    "OffloadedActivations",
    "OffloadedParameters",
    "activations",
    "checkpoint",
    "parameters",
]

ask_for_huge_pages()


def parameters(
    model: torch.nn.Module,
    nvme_path: NvmePath,
    max_cpu_bytes: int | MemoryBudget = 1 << 30,
    *,
    max_gpu_bytes: int | MemoryBudget | None = None,
    device: torch.device | str | int | None = None,
    keep_bytes: int = 64 << 10,
    units: Sequence[type[torch.nn.Module]] = (),
    initialize: Callable[[torch.nn.Module], object] | None = None,
    **handle_options: Any,
) -> OffloadedParameters:
    """Moves the parameters of a model to NVMe and returns an OffloadedParameters.

    At most `max_cpu_bytes` of them are in memory at a time, page-locked (or one layer, if that is
    larger): those in use, those that the order of the last pass says are next, and as many others
    as fit. Parameters of up to `keep_bytes` stay in memory, as long as they are few. The results
    are the same to the last bit.

    When a module is called, its own weights are read into memory. At other times they read as NaN,
    unless gather() holds them. `units` are classes of modules whose forward uses the weights of
    their children without calling them: the weights of such a module come together.

    Make a model larger than memory with torch.device("meta"): this function then makes its weights,
    one module at a time, with `initialize(module)` or the module's reset_parameters().

    Weights on a GPU are read straight into its memory, at most `max_gpu_bytes` at a time (default:
    `max_cpu_bytes`). `device` is where the weights are used; default: where they are now.

    If FSDP2 has sharded the model (fully_shard), each rank has its shards on its drive and at most
    `max_cpu_bytes` of them in memory; what FSDP2 gathers of all ranks comes on top. `units` does
    not matter then: what it gathers together comes together.

    With a MemoryBudget as limit, which weights and states share, as many weights as fit stay in
    memory for good and never go to the drive; the others pass through what is left.
    """
    used_on, max_bytes = budgeted_place_of(model, device, max_cpu_bytes, max_gpu_bytes)
    if groups := groups_in(model):
        return offload_shards(
            model, groups, nvme_path, used_on, max_bytes, keep_bytes, initialize, handle_options
        )
    return offload_model(
        model, nvme_path, used_on, max_bytes, keep_bytes, tuple(units), initialize, handle_options
    )


def checkpoint(
    model: torch.nn.Module,
    path: CheckpointPath,
    max_cpu_bytes: int = 1 << 30,
    *,
    max_gpu_bytes: int | None = None,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
    rename: Rename | None = None,
    strict: bool = True,
    keep_bytes: int = 64 << 10,
    units: Sequence[type[torch.nn.Module]] = (),
    initialize: Callable[[torch.nn.Module], object] | None = None,
    **handle_options: Any,
) -> OffloadedParameters:
    """Runs a model from a checkpoint as it lies: its weights are read from the files when modules
    are called, and nothing is written. Returns what parameters() returns.

    `path` is a folder, an index, one or several safetensors files, a file of torch.save, or a
    folder of torch.distributed.checkpoint. The model may be on the meta device, so that a model
    larger than memory never is in memory. `max_cpu_bytes`, `max_gpu_bytes`, `device`, `keep_bytes`
    and `units` are those of parameters().

    Weights have the dtype of the file, as with load_state_dict(assign=True), or `dtype`, if they
    are floating-point of more than 8 bits: then each read converts them, and they take the memory
    of the wider of both.
    `rename` maps names of the checkpoint to names of the model: a dict, or a function, which
    returns None to leave a tensor out. What is missing or too much is an error that names it;
    strict=False leaves it out.

    Buffers come into memory. Those that no file has (persistent=False) must be computed: on the
    meta device by `initialize(module)`, or by the module's own functions where it has some.

    The weights cannot be trained: a backward pass that has a gradient for one raises, with its
    name. Freeze them (requires_grad_(False)) to train adapters beside them. A file that changes
    while it is in use raises OSError at the next read of it; one that is replaced by rename does
    not matter.
    """
    from .in_place import run_in_place

    used_on, max_bytes = place_of(model, device, max_cpu_bytes, max_gpu_bytes)
    return run_in_place(
        model,
        path,
        used_on,
        max_bytes,
        keep_bytes,
        tuple(units),
        initialize,
        dtype,
        rename,
        strict,
        handle_options,
    )


def activations(
    nvme_path: NvmePath,
    max_cpu_bytes: int = 1 << 30,
    *,
    keep_bytes: int = 64 << 10,
    **handle_options: Any,
) -> OffloadedActivations:
    """Returns what moves the tensors to NVMe that autograd saves for the backward pass, in a
    `with` block around the forward pass.

    They pass through `max_cpu_bytes` of page-locked memory. The oldest go to the drive behind the
    forward pass, and come back in reverse order ahead of the backward pass; what is still in that
    memory then is not read. Parameters, other leaves and tensors of less than `keep_bytes` bytes
    stay where they are. Tensors of a GPU leave its memory. The results are the same to the last
    bit, and a tensor that is changed in place after autograd has saved it raises, as without.

    Make it once and use it for every pass: it takes its memory at once and keeps it.
    """
    for name, value in (("max_cpu_bytes", max_cpu_bytes), ("keep_bytes", keep_bytes)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a number of bytes of at least 1, got {value!r}")
    max_bytes = page_up(max_cpu_bytes)
    map_large_blocks()
    space = open_space(nvme_path, max_bytes, **handle_options)
    return OffloadedActivations(ActivationStore(space, max_bytes), keep_bytes)
