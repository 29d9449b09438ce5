"""Moves tensors between memory and NVMe files, asynchronously, at the speed of the drive.

>>> import tensorferry
>>> with tensorferry.Handle() as handle:
...     handle.write(b"hello", "greeting.bin").wait()
5

The native interface is Handle, File, PinnedBuffer and Operation. The names of DeepSpeed's async_io
are in tensorferry.aio and here: aio_handle, aio_read, aio_write, pin_handle. For DeepSpeed itself
see tensorferry.deepspeed.
"""

import atexit
import logging
import sysconfig

if sysconfig.get_config_var("Py_GIL_DISABLED"):
    raise ImportError(
        "tensorferry does not support free-threaded Python yet: "
        "use the ordinary build of the interpreter (python3.13, not python3.13t)"
    )


def _in_subinterpreter():
    try:
        import _interpreters as interpreters
    except ImportError:
        try:
            import _xxsubinterpreters as interpreters  # its name before Python 3.13
        except ImportError:
            return False
    return interpreters.get_current() != interpreters.get_main()


if _in_subinterpreter():
    raise ImportError("tensorferry works in the main interpreter only, not in a subinterpreter")

from ._core import (
    File,
    Handle,
    InvalidArgument,
    Operation,
    PinnedBuffer,
    SwapBuffer,
    SwapSpace,
    SwapView,
    __version__,
    copy,
    is_pinned,
    validate,
)
from ._core import (
    close_all as _close_all,
)
from .aio import aio_handle, aio_read, aio_write, deepspeed_memcpy, gds_handle, pin_handle

__all__ = [
    "File",
    "Handle",
    "InvalidArgument",
    "Operation",
    "PinnedBuffer",
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
    "validate",
]


def initialize(model, config, *, optimizer=None, model_parameters=None):
    """A model and its optimizer as a DeepSpeed configuration wants them: (model, optimizer).

    `config` is the path of the JSON, or a dict. Weights go to NVMe with
    zero_optimization.offload_param, states with offload_optimizer; docs/offload.md lists the keys.
    An unknown key is an error (ConfigError), and so is one that would change numbers and cannot be
    honoured. The optimizer is the one of the configuration, over `model_parameters` (default: all),
    or the given one; call backward(loss), step() and zero_grad() of what is returned for every
    micro-batch. Without either it is None, and the weights stay on NVMe as long as the model lives.
    """
    from ._config.initialize import initialize as with_torch

    return with_torch(model, config, optimizer=optimizer, model_parameters=model_parameters)


def __getattr__(name):
    if name in ("offload", "optim"):  # they import torch
        import importlib

        return importlib.import_module("." + name, __name__)
    if name == "ConfigError":
        from ._config.sections import ConfigError

        return ConfigError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


logging.getLogger("tensorferry").addHandler(logging.NullHandler())
atexit.register(_close_all)
