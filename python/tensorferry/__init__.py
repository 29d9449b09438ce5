"""Moves tensors between memory and NVMe files, asynchronously, at the speed of the drive.

>>> import tensorferry
>>> with tensorferry.Handle() as handle:
...     handle.write(b"hello", "greeting.bin").wait()
5

The native interface is Handle, File, PinnedBuffer and Operation. tensorferry.aio has the names of
DeepSpeed's async_io, and this module has them too: aio_handle, aio_read, aio_write, pin_handle. To
run DeepSpeed itself on tensorferry, see tensorferry.deepspeed.
"""

from __future__ import annotations

import atexit
import logging
import sysconfig

if sysconfig.get_config_var("Py_GIL_DISABLED"):
    raise ImportError(
        "tensorferry does not support free-threaded Python yet: "
        "use the ordinary build of the interpreter (python3.13, not python3.13t)"
    )


def _in_subinterpreter() -> bool:
    try:
        import _interpreters as interpreters
    except ImportError:
        try:
            import _xxsubinterpreters as interpreters  # its name before Python 3.13
        except ImportError:
            return False
    return bool(interpreters.get_current() != interpreters.get_main())


if _in_subinterpreter():
    raise ImportError("tensorferry works in the main interpreter only, not in a subinterpreter")

from ._core import (
    File,
    Handle,
    InvalidArgument,
    NewFile,
    Operation,
    PinnedBuffer,
    PriorityScope,
    SwapBuffer,
    SwapSpace,
    SwapView,
    __version__,
    copy,
    is_pinned,
    rate,
    set_rate,
    validate,
)
from ._core import (
    close_all as _close_all,
)
from .aio import aio_handle, aio_read, aio_write, deepspeed_memcpy, gds_handle, pin_handle

TYPE_CHECKING = False  # as in typing, which takes long to import
if TYPE_CHECKING:
    import os
    from collections.abc import Iterable
    from typing import IO, Any, TypeVar

    import torch

    from . import checkpoint as checkpoint
    from . import dcp as dcp
    from . import offload as offload
    from . import optim as optim
    from . import safetensors as safetensors
    from . import snapshot as snapshot
    from . import transformers as transformers
    from ._config.optimizer import ConfiguredOptimizer
    from ._config.sections import ConfigError as ConfigError
    from ._memory.budget import MemoryBudget as MemoryBudget

    Model = TypeVar("Model", bound=torch.nn.Module)

__all__ = [
    "File",
    "Handle",
    "InvalidArgument",
    "NewFile",
    "Operation",
    "PinnedBuffer",
    "PriorityScope",
    "SwapBuffer",
    "SwapSpace",
    "SwapView",
    "__version__",
    "aio_handle",
    "aio_read",
    "aio_write",
    "copy",
    "deepspeed_memcpy",
    "gds_handle",
    "initialize",
    "is_pinned",
    "pin_handle",
    "rate",
    "set_rate",
    "validate",
]


def initialize(
    model: Model,
    config: str | os.PathLike[str] | IO[str] | dict[str, Any],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    model_parameters: Iterable[torch.Tensor] | Iterable[dict[str, Any]] | None = None,
    max_cpu_bytes: int | str | MemoryBudget | None = None,
    overlap: str | None = None,
    moments: str = "fp32",
) -> tuple[Model, ConfiguredOptimizer | Any]:
    """Sets up a model and its optimizer from a DeepSpeed configuration: (model, optimizer).

    `config` is the path of the JSON, an open file, or a dict. zero_optimization.offload_param puts
    weights on NVMe, offload_optimizer puts states there; docs/offload.md lists the keys. An unknown
    key raises ConfigError, and so does a key that changes numbers and that tensorferry cannot
    honour.

    The optimizer is the one of the configuration, over `model_parameters` (default: all), or the
    given one. Call its backward(loss), step() and zero_grad() for every micro-batch. If neither
    names an optimizer, it is None, and the weights stay on NVMe as long as the model lives.

    With several ranks, as torchrun starts them, the stage says what becomes of the model: 0 wraps
    it in DistributedDataParallel, 1 and 2 shard it with FSDP2, 3 lets go of gathered weights too.

    `max_cpu_bytes` is one number for weights and states together, or "auto": see MemoryBudget. It
    takes the place of what max_in_cpu, buffer_size and ratio say. overlap="backward" steps during
    the last backward(loss) of a batch, overlap="iteration" behind the next forward pass too.
    moments="int8" stores the moments of Adam and AdamW in 8 bits.
    """
    from ._config.initialize import initialize as with_torch

    # Any stands for None: a program that names an optimizer need not check for it.
    made: tuple[Model, ConfiguredOptimizer | Any] = with_torch(
        model,
        config,
        optimizer=optimizer,
        model_parameters=model_parameters,
        max_cpu_bytes=max_cpu_bytes,
        overlap=overlap,
        moments=moments,
    )
    return made


# Most import torch.
_ROOMS = ("checkpoint", "dcp", "offload", "optim", "safetensors", "snapshot", "transformers")

if not TYPE_CHECKING:  # it would give every name to type checkers

    def __getattr__(name):
        if name in _ROOMS:
            import importlib

            return importlib.import_module("." + name, __name__)
        if name == "ConfigError":
            from ._config.sections import ConfigError

            return ConfigError
        if name == "MemoryBudget":
            from ._memory.budget import MemoryBudget

            return MemoryBudget
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


logging.getLogger("tensorferry").addHandler(logging.NullHandler())
atexit.register(_close_all)
