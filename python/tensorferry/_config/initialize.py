"""tensorferry.initialize(): a model and its optimizer as a DeepSpeed configuration wants them."""

import inspect
import logging

import torch

from .. import offload, optim
from .._memory.buffers import open_space
from .._memory.layout import PAGE
from ..optim.masters import HALF, MasterWeights
from ..optim.supported import ELEMENTWISE
from .config import Config
from .optimizer import ConfiguredOptimizer
from .schedules import Schedule
from .sections import ConfigError, read

_log = logging.getLogger("tensorferry")

_KINDS = {kind.__name__.lower(): kind for kind in (*ELEMENTWISE, torch.optim.Adafactor)}


def initialize(model, config, *, optimizer=None, model_parameters=None):
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"a torch.nn.Module is wanted, not {type(model).__name__}")
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    config = Config(read(config), torch.distributed.get_world_size() if distributed else 1)
    if config.ignored:
        _log.warning(
            "these keys of the configuration concern DeepSpeed's own machinery and have no effect "
            "here: %s",
            ", ".join(sorted(config.ignored)),
        )
    # What can be wrong with it, and with its directories, is found before anything is changed.
    kind, settings = _chosen(config) if config.optimizer is not None else (None, {})
    if model_parameters is not None:
        model_parameters = list(model_parameters)
    _check(config, optimizer, settings, model_parameters or ())
    for place in (config.offload_param, config.offload_optimizer):
        if place["device"] == "nvme":
            open_space(place["nvme_path"], PAGE, **config.handle_options).close()
    if config.dtype is not None:
        model.to(getattr(torch, config.dtype))
    weights = None
    place = config.offload_param
    if place["device"] == "nvme":
        itemsize = max((p.dtype.itemsize for p in model.parameters()), default=4)
        elements = place["max_in_cpu"] + place["buffer_count"] * place["buffer_size"]
        weights = offload.parameters(
            model,
            place["nvme_path"],
            elements * itemsize,
            pin_memory=place["pin_memory"],
            **config.handle_options,
        )
    try:
        if kind is not None:
            params = model.parameters() if model_parameters is None else model_parameters
            optimizer = _make(kind, settings, list(params), config)
        elif optimizer is not None and config.offload_optimizer["device"] == "nvme":
            optimizer = optim.offload(optimizer, **_offload_options(config))
        if optimizer is None:
            return model, None
        return model, ConfiguredOptimizer(optimizer, config, weights)
    except BaseException:
        if weights is not None:
            weights.close(restore=True)
        raise


def _check(config, optimizer, settings, params):
    """What a configuration cannot ask for together, and of its schedule what can be known."""
    if optimizer is not None and config.optimizer is not None:
        raise ConfigError("the configuration has an optimizer and one is given too: choose one")
    if optimizer is not None and config.dtype is not None:
        raise ConfigError(
            "bf16 and fp16 change the parameters that the given optimizer has: let the "
            "configuration make the optimizer"
        )
    if optimizer is None and config.optimizer is None:
        if config.scheduler is not None:
            raise ConfigError("the configuration has a scheduler and no optimizer")
        return
    if config.offload_param["device"] == "nvme" and config.offload_optimizer["device"] != "nvme":
        raise ConfigError(
            "with zero_optimization.offload_param on nvme, offload_optimizer must be on nvme too: "
            "only such an optimizer can step weights that are on the drive"
        )
    if config.offload_param["device"] == "nvme" and config.world_size > 1:
        raise ConfigError(
            f"zero_optimization.offload_param.device is nvme with {config.world_size} ranks: to "
            "train, DistributedDataParallel and FSDP need weights and gradients in memory; keep "
            "offload_optimizer and leave offload_param out"
        )
    if config.scheduler is not None:
        groups = params if optimizer is None else optimizer.param_groups
        groups = [dict(group) for group in groups if isinstance(group, dict)] or [{}]
        Schedule(*config.scheduler, [{"lr": settings.get("lr", 0.0), **group} for group in groups])


def _chosen(config):
    """The class that optimizer.type names, and its settings."""
    name, params = config.optimizer
    kind = _KINDS.get(str(name).lower())
    if kind is None:
        known = ", ".join(sorted(kind.__name__ for kind in _KINDS.values()))
        raise ConfigError(f"optimizer.type is {name!r}: known are {known}")
    settings = {}
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        if not params.boolean("torch_adam", False):
            settings["weight_decay"] = 0.0  # the default of DeepSpeed's own, for both
        if params.boolean("adam_w_mode", True):
            kind = torch.optim.AdamW
        params.refuse("bias_correction", True, "torch's Adam always corrects the bias")
    params.machinery("foreach", "fused")
    ours = ("self", "params", "foreach", "fused", "capturable", "differentiable")
    for name, parameter in inspect.signature(kind.__init__).parameters.items():
        if name not in ours and name != "decoupled_weight_decay":
            value = params.like(name, parameter.default)
            if value is not None:
                settings[name] = tuple(value) if isinstance(value, list) else value
    params.done()
    try:
        kind([torch.nn.Parameter(torch.zeros(1))], **settings)
    except (TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"optimizer.params will not do for {kind.__name__}: {error}") from error
    return kind, settings


def _offload_options(config):
    place = config.offload_optimizer
    return {
        "nvme_path": place["nvme_path"],
        "buffer_count": place["buffer_count"],
        "pipeline_read": place["pipeline_read"],
        "pipeline_write": place["pipeline_write"],
        "fast_init": place["fast_init"],
        "pin_memory": place["pin_memory"],
        # Where not even the weights fit, neither do their gradients.
        "offload_gradients": config.offload_param["device"] == "nvme",
        **config.handle_options,
    }


def _make(kind, settings, params, config):
    fused = {"fused": True} if kind in (torch.optim.Adam, torch.optim.AdamW) else {}
    if config.offload_optimizer["device"] == "nvme":
        optimizer = kind(params, **settings, **fused)
        return optim.Offloaded(optimizer, master_weights=True, **_offload_options(config))
    if any(param.dtype in HALF for group in params for param in _params_of(group)):
        return MasterWeights(kind, params, **settings, **fused)
    return kind(params, **settings, **fused)


def _params_of(group):
    if isinstance(group, dict):
        return [group["params"]] if isinstance(group["params"], torch.Tensor) else group["params"]
    return [group]
