"""What initialize() returns for an optimizer."""

import logging
import math

import torch

from ..optim.gradients import clip_scale, norm_of
from ..optim.masters import MasterWeights
from ..optim.optimizer import Offloaded
from .loss_scale import LossScale
from .schedules import Schedule

_log = logging.getLogger("tensorferry")


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
            return
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
        return

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
        elif isinstance(self.optimizer, (Offloaded, MasterWeights)):
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
