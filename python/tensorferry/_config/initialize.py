"""tensorferry.initialize(): sets up a model and its optimizer by a DeepSpeed configuration."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .. import offload, optim
from .._memory.budget import MemoryBudget
from .._memory.buffers import open_space
from .._memory.layout import PAGE
from ..optim.masters import HALF, MasterWeights
from ..optim.supported import ELEMENTWISE, check_moments
from .config import Config
from .distributed import check_same, distribute, is_ddp, is_distributed, join_ranks, renamed
from .optimizer import ConfiguredOptimizer
from .schedules import Schedule
from .sections import ConfigError, Section, read

_log = logging.getLogger("tensorferry")

_KINDS = {kind.__name__.lower(): kind for kind in (*ELEMENTWISE, torch.optim.Adafactor)}


def initialize(
    model: torch.nn.Module,
    config: Any,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    model_parameters: Iterable[Any] | None = None,
    max_cpu_bytes: int | str | MemoryBudget | None = None,
    overlap: str | None = None,
    moments: str = "fp32",
) -> tuple[torch.nn.Module, ConfiguredOptimizer | None]:
    """See tensorferry.initialize()."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    values = read(config)
    settings = Config(values, join_ranks())
    if settings.ignored:
        _log.warning(
            "these keys of the configuration concern DeepSpeed's own machinery and have no effect "
            "here: %s",
            ", ".join(sorted(settings.ignored)),
        )
    # Faults of the configuration, and of its directories, are found before anything changes.
    kind, options = _chosen(settings.optimizer) if settings.optimizer is not None else (None, {})
    params = None if model_parameters is None else list(model_parameters)
    shards = _shards(settings, model, optimizer)
    _check(settings, optimizer, options, params or (), shards == 0 or is_ddp(model))
    budget = _budget(settings, max_cpu_bytes)
    _check_overlap(settings, overlap)
    if moments != "fp32" and settings.offload_optimizer["device"] != "nvme":
        raise ConfigError(
            "moments says how the drive stores them, and the configuration keeps the states in "
            "memory: name offload_optimizer in zero_optimization, or leave it out"
        )
    if kind is not None:
        check_moments(moments, kind, [options], masters=True)
    if shards is not None:
        check_same(_numbers(settings, values))
    for section in (settings.offload_param, settings.offload_optimizer):
        if section["device"] == "nvme":
            open_space(section["nvme_path"], PAGE, **settings.handle_options).close()
    if settings.dtype is not None:
        model.to(getattr(torch, settings.dtype))
    if shards is not None:
        before = {param: name for name, param in model.named_parameters()}
        model = distribute(model, shards)
        params = None if params is None else renamed(params, before, model)
    weights, streams = _offload_weights(model, settings, budget)
    try:
        # If the weights do not fit into memory, neither do their gradients.
        offload_gradients = streams and overlap is None
        offloading = _offload_options(settings, budget, overlap, moments, offload_gradients)
        if kind is not None:
            given = list(model.parameters()) if params is None else params
            optimizer = _make(kind, options, given, offloading)
        elif optimizer is not None and offloading is not None:
            optimizer = optim.offload(optimizer, **offloading)
        if optimizer is None:
            return model, None
        return model, ConfiguredOptimizer(optimizer, settings, weights)
    except BaseException:
        if weights is not None:
            weights.close(restore=True)
        raise


def _shards(
    config: Config, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> int | None:
    """Returns the stage by which initialize() makes the model one of several ranks; None if there
    is one rank, if the program has done it, or if nobody trains all of the model on each rank."""
    if config.world_size == 1 or is_distributed(model):
        return None
    trains = optimizer is not None or config.optimizer is not None
    if config.stage == 0:
        return 0 if trains else None
    if optimizer is not None:
        raise ConfigError(
            f"zero_optimization.stage {config.stage} shards the parameters that the given "
            "optimizer holds: name the optimizer in the configuration, or call fully_shard() "
            "before you make it"
        )
    return config.stage


def _numbers(config: Config, values: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings that decide what is computed, and so what ranks wait for."""
    numbers = ("stage", "dtype", "loss_scale", "gradient_accumulation_steps", "gradient_clipping")
    return {
        **{name: getattr(config, name) for name in numbers},
        **{name: values.get(name) for name in ("optimizer", "scheduler")},
        "offload_param.device": config.offload_param["device"],
        "offload_optimizer.device": config.offload_optimizer["device"],
    }


def _budget(config: Config, max_cpu_bytes: int | str | MemoryBudget | None) -> MemoryBudget | None:
    if max_cpu_bytes is None or isinstance(max_cpu_bytes, MemoryBudget):
        return max_cpu_bytes
    if "nvme" not in (config.offload_param["device"], config.offload_optimizer["device"]):
        raise ConfigError(
            "max_cpu_bytes says how much stays in memory, and the configuration puts nothing on "
            "nvme: name offload_param or offload_optimizer in zero_optimization, or leave it out"
        )
    return MemoryBudget(max_cpu_bytes)


def _offload_weights(
    model: torch.nn.Module, config: Config, budget: MemoryBudget | None
) -> tuple[offload.OffloadedParameters | None, bool]:
    """Moves the weights to NVMe if the configuration says so. Returns them, and whether memory has
    no room for all of them."""
    section = config.offload_param
    if section["device"] != "nvme":
        return None, False
    itemsize = max((p.dtype.itemsize for p in model.parameters()), default=4)
    elements = section["max_in_cpu"] + section["buffer_count"] * section["buffer_size"]
    on_gpu = any(param.is_cuda for param in model.parameters())  # whose weights are only there
    limit = elements * itemsize if budget is None or on_gpu else budget
    weights = offload.parameters(
        model,
        section["nvme_path"],
        limit,
        pin_memory=section["pin_memory"],
        **config.handle_options,
    )
    # What a budget has room for is not on the drive.
    room = 0 if isinstance(limit, MemoryBudget) else limit
    return weights, weights.stats()["weight_bytes"] > room


def _check(
    config: Config,
    optimizer: torch.optim.Optimizer | None,
    options: dict[str, Any],
    params: Sequence[Any],
    ddp: bool = False,
) -> None:
    """Raises ConfigError for settings that exclude each other, and for faults of the schedule.
    `ddp`: whether the model is, or becomes, one of DistributedDataParallel."""
    if optimizer is not None and config.optimizer is not None:
        raise ConfigError("both the configuration and the call give an optimizer: choose one")
    if optimizer is not None and config.dtype is not None:
        raise ConfigError(
            "bf16 and fp16 convert the parameters that the given optimizer holds: name the "
            "optimizer in the configuration instead"
        )
    if optimizer is None and config.optimizer is None:
        if config.scheduler is not None:
            raise ConfigError(
                "the configuration has a scheduler but no optimizer: add the section optimizer, or "
                "pass optimizer=..."
            )
        return
    if config.offload_param["device"] == "nvme" and config.offload_optimizer["device"] != "nvme":
        raise ConfigError(
            "with zero_optimization.offload_param on nvme, offload_optimizer must be on nvme too: "
            "only an optimizer with states on NVMe can step weights on NVMe"
        )
    if config.offload_param["device"] == "nvme" and ddp:
        raise ConfigError(
            f"zero_optimization.offload_param on nvme needs stage 3 with {config.world_size} "
            "ranks, and a model that is not wrapped: DistributedDataParallel, which is stage 0, "
            "has all weights and gradients in memory; give stage 3, or leave offload_param out"
        )
    if config.scheduler is not None:
        groups = params if optimizer is None else optimizer.param_groups
        groups = [dict(group) for group in groups if isinstance(group, dict)] or [{}]
        Schedule(*config.scheduler, [{"lr": options.get("lr", 0.0), **group} for group in groups])


def _chosen(section: tuple[Any, Section]) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Returns the class that optimizer.type names, and its options."""
    name, params = section
    kind = _KINDS.get(str(name).lower())
    if kind is None:
        known = ", ".join(sorted(kind.__name__ for kind in _KINDS.values()))
        raise ConfigError(f"optimizer.type is {name!r}: it must be one of {known}")
    options: dict[str, Any] = {}
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        if not params.boolean("torch_adam", False):
            options["weight_decay"] = 0.0  # DeepSpeed's default for both
        if params.boolean("adam_w_mode", True):
            kind = torch.optim.AdamW
        params.refuse("bias_correction", True, "torch's Adam always corrects the bias")
    params.machinery("foreach", "fused")
    ours = ("self", "params", "foreach", "fused", "capturable", "differentiable")
    for name, parameter in inspect.signature(kind.__init__).parameters.items():
        if name not in ours and name != "decoupled_weight_decay":
            value = params.like(name, parameter.default)
            if value is not None:
                options[name] = tuple(value) if isinstance(value, list) else value
    params.done()
    try:
        kind([torch.nn.Parameter(torch.zeros(1))], **options)
    except (TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"{kind.__name__} refuses optimizer.params: {error}") from error
    return kind, options


def _check_overlap(config: Config, overlap: str | None) -> None:
    """Raises ConfigError where gradients would have to wait for the step in memory."""
    if overlap is None:
        return
    if config.world_size > 1:
        raise ConfigError(
            f"overlap works with one rank, and there are {config.world_size}: gradients of several "
            "ranks are averaged late in a backward pass; leave overlap out"
        )
    if config.offload_optimizer["device"] != "nvme":
        raise ConfigError(
            "overlap hides the drive behind the backward pass, and the configuration keeps the "
            "states in memory: name offload_optimizer in zero_optimization, or leave it out"
        )
    if config.handle_options.get("overlap") is False:
        raise ConfigError(
            "aio.overlap_events is false, which is for measuring, and overlap is given: choose one"
        )
    waits = config.gradient_accumulation_steps > 1 or config.gradient_clipping > 0
    if config.offload_param["device"] == "nvme" and (waits or config.check_overflow):
        raise ConfigError(
            "with zero_optimization.offload_param on nvme, overlap needs gradients that are final "
            "as soon as they are computed: leave out gradient_accumulation_steps, "
            "gradient_clipping and fp16, or overlap"
        )


def _offload_options(
    config: Config,
    budget: MemoryBudget | None,
    overlap: str | None,
    moments: str,
    offload_gradients: bool,
) -> dict[str, Any] | None:
    """Returns the arguments of optim.offload(); None if the states stay in memory."""
    section = config.offload_optimizer
    if section["device"] != "nvme":
        return None
    return {
        "nvme_path": section["nvme_path"],
        "buffer_count": section["buffer_count"],
        "pipeline_read": section["pipeline_read"],
        "pipeline_write": section["pipeline_write"],
        "fast_init": section["fast_init"],
        "pin_memory": section["pin_memory"],
        # DeepSpeed's ratio is the share that it offloads.
        "max_cpu_bytes": f"{100 * (1 - section['ratio']):.6f}%" if budget is None else budget,
        "offload_gradients": offload_gradients,
        "moments": moments,
        **config.handle_options,
        **({} if overlap is None else {"overlap": overlap}),
    }


def _make(
    kind: type[torch.optim.Optimizer],
    options: dict[str, Any],
    params: list[Any],
    offloading: dict[str, Any] | None,
) -> torch.optim.Optimizer:
    """Makes the optimizer of the configuration. `offloading` are the arguments of optim.offload(),
    or None."""
    fused: dict[str, Any] = {"fused": True} if kind in (torch.optim.Adam, torch.optim.AdamW) else {}
    if offloading is not None:
        optimizer = kind(params, **options, **fused)
        return optim.Offloaded(optimizer, master_weights=True, **offloading)
    if any(param.dtype in HALF for group in params for param in _params_of(group)):
        return MasterWeights(kind, params, **options, **fused)
    return kind(params, **options, **fused)


def _params_of(group: Any) -> Iterable[torch.Tensor]:
    if isinstance(group, dict):
        return [group["params"]] if isinstance(group["params"], torch.Tensor) else group["params"]
    return [group]
