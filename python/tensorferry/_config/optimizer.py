"""The optimizer that initialize() returns."""

from __future__ import annotations

import contextlib
import logging
import math
from typing import Any, NoReturn

import torch

from .._memory.snapshot_part import SavedPart, SnapshotPart
from ..offload import OffloadedParameters
from ..optim.gradients import clip_scale, norm_of
from ..optim.masters import MasterWeights
from ..optim.optimizer import Offloaded
from .config import Config
from .loss_scale import LossScale
from .schedules import Schedule

_log = logging.getLogger("tensorferry")


class ConfiguredOptimizer(torch.optim.Optimizer):
    """An optimizer with the settings of a configuration.

    For every micro-batch call backward(loss) or, without fp16, loss.backward(), and then step() and
    zero_grad(). After gradient_accumulation_steps of them step() scales and clips the gradients,
    steps, and moves the scheduler on. It skips the step if the gradients are not finite. `weights`
    is the OffloadedParameters of the model, or None if its weights stay in memory."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: Config,
        weights: OffloadedParameters | None,
    ) -> None:
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
        self.scheduler: Schedule | None = None
        if config.scheduler is not None:
            self.scheduler = Schedule(*config.scheduler, self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if not hasattr(self, "optimizer"):  # torch adds the first groups
            super().add_param_group(param_group)
            return
        if self.scheduler is not None:
            raise ValueError(
                "cannot add a parameter group: the scheduler of the configuration keeps the groups "
                "it started with; to add groups, use one of torch.optim.lr_scheduler"
            )
        self.optimizer.add_param_group(param_group)

    @property
    def loss_scale(self) -> float:
        """The factor of the loss; 1.0 without fp16."""
        return 1.0 if self._loss_scale is None else self._loss_scale.value

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Calls loss.backward(), scaled as fp16 needs it."""
        self._backwards += 1
        if self._loss_scale is not None:
            loss = loss.float() * self._loss_scale.value
        with self._announced():
            loss.backward(**options)

    def _announced(self) -> contextlib.AbstractContextManager[None]:
        """Tells an optimizer that steps in the backward pass which one is the last of a batch."""
        overlaps = isinstance(self.optimizer, Offloaded) and self.optimizer.overlap is not None
        if not overlaps or self._micro < self._steps - 1:
            return contextlib.nullcontext()
        if self._needs_norm:
            return self.optimizer.last_backward(clips=True)
        scale = 1.0 / self._steps
        return self.optimizer.last_backward(gradient_scale=None if scale == 1.0 else scale)

    @property
    def _needs_norm(self) -> bool:
        """Whether the step depends on all gradients: on their norm, or on whether they are
        finite."""
        return self._clipping > 0 or self._check_overflow or self._loss_scale is not None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Counts a micro-batch, and steps after the last one of a batch."""
        if closure is not None:
            raise ValueError(
                "step(closure) is not supported with accumulated gradients: call step() without "
                "a closure"
            )
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
            _log.warning("gradients are not finite: skipped the step")
        else:
            self._step_scaled(scale)
            if self.scheduler is not None:
                self.scheduler.step()
        if self._loss_scale is not None:
            self._loss_scale.update(overflow)

    def _gradients(self) -> list[torch.Tensor]:
        params = [param for group in self.param_groups for param in group["params"]]
        return [param.grad for param in params if param.grad is not None]

    def _norm(self) -> torch.Tensor:
        """Returns the norm of all gradients on all ranks, before they are scaled."""
        kinds: dict[Any, list[torch.Tensor]] = {}  # how they are spread over ranks -> their norms
        for gradient in self._gradients():
            spread = (getattr(gradient, name, None) for name in ("device_mesh", "placements"))
            kinds.setdefault(tuple(spread), []).append(norm_of(gradient))
        norms = [torch.linalg.vector_norm(torch.stack(norms)) for norms in kinds.values()]
        whole = [n.full_tensor() if hasattr(n, "full_tensor") else n for n in norms]
        if len(whole) == 1:
            return whole[0]
        return torch.linalg.vector_norm(torch.stack(whole)) if whole else torch.tensor(0.0)

    def _step_scaled(self, scale: float | torch.Tensor) -> None:
        if isinstance(self.optimizer, Offloaded) and self.optimizer.is_stepping:
            self.optimizer.step()  # with the same scale since last_backward()
        elif isinstance(scale, float) and scale == 1.0:
            self.optimizer.step()
        elif isinstance(self.optimizer, (Offloaded, MasterWeights)):
            self.optimizer.step(gradient_scale=scale)
        else:
            torch._foreach_mul_(self._gradients(), scale)
            self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, if a batch has ended."""
        if self._micro == 0:
            self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict() | {"tensorferry": self._own_state()}

    def _own_state(self) -> dict[str, Any]:
        own: dict[str, Any] = {"skipped_steps": self.skipped_steps}
        if self.scheduler is not None:
            own["scheduler"] = self.scheduler.state_dict()
        if self._loss_scale is not None:
            own["loss_scale"] = self._loss_scale.state_dict()
        return own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = dict(state_dict)
        own = state_dict.pop("tensorferry", {})
        self.optimizer.load_state_dict(state_dict)
        self._load_own_state(own)

    def snapshot_part(self) -> SnapshotPart:
        """What tensorferry.snapshot keeps of this optimizer."""
        if isinstance(self.optimizer, Offloaded):
            part = self.optimizer.snapshot_part()
            part.memory["tensorferry"] = self._own_state()
            return part
        return SnapshotPart({}, self.state_dict())

    def resume_part(self, saved: SavedPart) -> None:
        """Takes over what tensorferry.snapshot has kept, in the place of all states."""
        if isinstance(self.optimizer, Offloaded):
            self.optimizer.resume_part(saved)
            self._load_own_state(saved.memory["tensorferry"])
        else:
            self.load_state_dict(saved.memory)

    def _load_own_state(self, own: dict[str, Any]) -> None:
        self.param_groups = self.optimizer.param_groups
        self.state = self.optimizer.state
        if self._micro > 0:  # a checkpoint has no gradients: the batch starts again
            self.optimizer.zero_grad()
        self._micro = self._backwards = 0
        self.skipped_steps = own.get("skipped_steps", 0)
        if self.scheduler is not None:
            self.scheduler.follow(self.param_groups)
            if "scheduler" in own:
                self.scheduler.load_state_dict(own["scheduler"])
        if self._loss_scale is not None and "loss_scale" in own:
            self._loss_scale.load_state_dict(own["loss_scale"])

    def __getstate__(self) -> NoReturn:
        raise TypeError("an optimizer of initialize() cannot be pickled: save its state_dict()")

    def stats(self) -> dict[str, Any]:
        """Returns the statistics of states on NVMe; an empty dict if there are none."""
        return self.optimizer.stats() if hasattr(self.optimizer, "stats") else {}

    def settle(self) -> None:
        """Steps what overlap="iteration" has left of the last step."""
        if isinstance(self.optimizer, Offloaded):
            self.optimizer.settle()

    def close(self) -> None:
        """Removes the files of states on NVMe."""
        if hasattr(self.optimizer, "close"):
            self.optimizer.close()
