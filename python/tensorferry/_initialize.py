"""tensorferry.initialize(): a model and its optimizer as a DeepSpeed configuration wants them."""

import inspect
import logging
import math

import torch

from . import offload, optim
from ._config import Config, ConfigError, read
from ._gradients import clip_scale, norm_of
from ._kinds import ELEMENTWISE
from ._masters import HALF, MasterWeights
from ._schedules import Schedule
from ._subgroups import PAGE, open_space

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


class LossScale:
    """By how much a loss in fp16 is multiplied, as DeepSpeed chooses it."""

    def __init__(self, static, power, window, hysteresis, consecutive, least):
        self._dynamic = static == 0
        self.value = float(2**power) if self._dynamic else float(static)
        self._window = window
        self._patience = self._hysteresis = hysteresis
        self._consecutive = consecutive
        self._least = least
        self._count = 0
        self._overflow_at = -1

    def update(self, overflow):
        if not self._dynamic:
            return
        if overflow:
            if self._patience == 1 or self._hysteresis == 1:
                self.value = max(self.value / 2, self._least)
            else:
                self._patience -= 1
            self._overflow_at = self._count
        else:
            if self._consecutive:
                self._patience = self._hysteresis
            stable = self._count - self._overflow_at - 1
            if stable > 0 and stable % self._window == 0:
                if not self._consecutive:
                    self._patience = self._hysteresis
                self.value *= 2
        self._count += 1

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state_dict):
        vars(self).update(state_dict)


class ConfiguredOptimizer(torch.optim.Optimizer):
    """An optimizer that does what the configuration says around a step.

    Call backward(loss) or, without fp16, loss.backward(); then step() and zero_grad() after every
    micro-batch: they act when gradient_accumulation_steps of them have come. A step scales and
    clips the gradients, is left out when they are not finite, and moves the scheduler on.
    `weights` is what offload.parameters() has made of the model, or None."""

    def __init__(self, optimizer, config, weights):
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.optimizer = optimizer
        self.weights = weights
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state
        self.skipped_steps = 0
        self._steps = config.gradient_accumulation_steps
        self._clipping = config.gradient_clipping
        self._check_overflow = config.check_overflow
        self._loss_scale = LossScale(**config.loss_scale) if config.loss_scale else None
        self._micro = 0
        self._backwards = 0
        self.scheduler = None
        if config.scheduler is not None:
            self.scheduler = Schedule(*config.scheduler, self.param_groups)

    def add_param_group(self, param_group):
        if not hasattr(self, "optimizer"):  # torch makes the first groups
            super().add_param_group(param_group)
            return
        if self.scheduler is not None:
            raise ValueError(
                "the scheduler of the configuration has the groups that were there at the start: "
                "use one of torch.optim.lr_scheduler to add groups"
            )
        self.optimizer.add_param_group(param_group)

    @property
    def loss_scale(self):
        return 1.0 if self._loss_scale is None else self._loss_scale.value

    def backward(self, loss, **options):
        """loss.backward(), scaled as fp16 needs it."""
        self._backwards += 1
        if self._loss_scale is not None:
            loss = loss.float() * self._loss_scale.value
        loss.backward(**options)

    @torch.no_grad()
    def step(self, closure=None):
        """Counts a micro-batch; with the last one of a batch it steps."""
        if closure is not None:
            raise ValueError("step(closure) does not go with accumulated gradients")
        self._micro += 1
        if self._micro < self._steps:
            return None
        if self._loss_scale is not None and self._backwards < self._steps:
            raise RuntimeError("with fp16 call optimizer.backward(loss), not loss.backward()")
        self._micro = self._backwards = 0
        scale = 1.0 / (self._steps * self.loss_scale)
        overflow = False
        if self._clipping > 0 or self._check_overflow:
            norm = self._norm() * scale
            overflow = self._check_overflow and not math.isfinite(norm)
            if self._clipping > 0:
                scale = clip_scale(norm, self._clipping) * scale
        if overflow:
            self.skipped_steps += 1
            _log.warning("gradients are not finite: the step is left out")
        else:
            self._step_scaled(scale)
            if self.scheduler is not None:
                self.scheduler.step()
        if self._loss_scale is not None:
            self._loss_scale.update(overflow)
        return None

    def _in_groups(self):
        params = [param for group in self.param_groups for param in group["params"]]
        return [param.grad for param in params if param.grad is not None]

    def _norm(self):
        """Of all gradients as they are."""
        norms = [norm_of(gradient) for gradient in self._in_groups()]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.tensor(0.0)

    def _step_scaled(self, scale):
        if isinstance(scale, float) and scale == 1.0:
            self.optimizer.step()
        elif isinstance(self.optimizer, (optim.Offloaded, MasterWeights)):
            self.optimizer.step(gradient_scale=scale)
        else:
            torch._foreach_mul_(self._in_groups(), scale)
            self.optimizer.step()

    def zero_grad(self, set_to_none=True):
        if self._micro == 0:
            self.optimizer.zero_grad(set_to_none)

    def state_dict(self):
        own = {"skipped_steps": self.skipped_steps}
        if self.scheduler is not None:
            own["scheduler"] = self.scheduler.state_dict()
        if self._loss_scale is not None:
            own["loss_scale"] = self._loss_scale.state_dict()
        return self.optimizer.state_dict() | {"tensorferry": own}

    def load_state_dict(self, state_dict):
        state_dict = dict(state_dict)
        own = state_dict.pop("tensorferry", {})
        self.optimizer.load_state_dict(state_dict)
        self.param_groups = self.optimizer.param_groups
        self.state = self.optimizer.state
        if self._micro > 0:  # gradients are not in a checkpoint: the batch begins anew
            self.optimizer.zero_grad()
        self._micro = self._backwards = 0
        self.skipped_steps = own.get("skipped_steps", 0)
        if self.scheduler is not None:
            self.scheduler._groups = self.param_groups
            if "scheduler" in own:
                self.scheduler.load_state_dict(own["scheduler"])
        if self._loss_scale is not None and "loss_scale" in own:
            self._loss_scale.load_state_dict(own["loss_scale"])

    def __getstate__(self):
        raise TypeError("what initialize() returns cannot be pickled: save its state_dict()")

    def stats(self):
        """What went to and from the drive; empty where nothing does."""
        return self.optimizer.stats() if hasattr(self.optimizer, "stats") else {}

    def close(self):
        """Removes the files of states on NVMe."""
        if hasattr(self.optimizer, "close"):
            self.optimizer.close()
