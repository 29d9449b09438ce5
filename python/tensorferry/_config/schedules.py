"""The learning rate schedules of DeepSpeed's configuration, with its numbers."""

from __future__ import annotations

import math
from typing import Any

from .sections import REQUIRED, ConfigError, Section

NAMES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")


class Schedule:
    """Sets the learning rates of an optimizer's groups. The first step uses the rate from before
    the warmup."""

    def __init__(self, name: str, params: Section, groups: list[dict[str, Any]]) -> None:
        if name not in NAMES:
            raise ConfigError(
                f"scheduler.type is {name!r}: it must be one of {', '.join(NAMES)}; for any other "
                "schedule use torch.optim.lr_scheduler with the returned optimizer"
            )
        self._name = name
        self._groups = groups
        self._warmup = max(2, params.whole("warmup_num_steps", 1000, least=1))
        self._linear = params.choice("warmup_type", "log", ("log", "linear")) == "linear"
        self.iteration = params.whole("last_batch_iteration", -1, least=-1)
        self._base = [group["lr"] for group in groups]
        if name != "WarmupLR":
            self._total = params.whole("total_num_steps", REQUIRED, least=1)
        if name == "WarmupCosineLR":
            self._start = params.number("warmup_min_ratio", 0.0, least=0)
            self._floor = params.number("cos_min_ratio", 0.0001, least=0)
        else:
            self._low = self._rates(params.numbers("warmup_min_lr", 0.0))
            highest = None if name == "WarmupLR" else 0.001
            high = params.numbers("warmup_max_lr", highest)
            self._high = self._base if high is None else self._rates(high)
        params.done()
        self._apply()

    def _rates(self, value: Any) -> list[float]:
        """Returns a rate for each group."""
        rates = list(value) if isinstance(value, (list, tuple)) else [value] * len(self._groups)
        if len(rates) != len(self._groups):
            raise ConfigError(
                f"the scheduler has {len(rates)} rates for {len(self._groups)} parameter groups: "
                "give one rate, or one for each group"
            )
        return rates

    def _warmed(self) -> float:
        """Returns how much of the warmup is over, from 0 to 1."""
        if self._linear:
            return self.iteration / self._warmup
        return math.log(self.iteration + 1) * (1.0 / math.log(self._warmup))

    def _rate(self, at: int) -> float:
        """Returns the rate of one group in this iteration."""
        if self._name == "WarmupCosineLR":
            return self._base[at] * self._ratio()
        if self.iteration < 0:
            return self._low[at]
        if self.iteration < self._warmup:
            share = self._warmed()
        elif self._name == "WarmupLR":
            share = 1.0
        else:
            left = float(self._total - self.iteration)
            share = max(0.0, left / float(max(1.0, self._total - self._warmup)))
        return self._low[at] + (self._high[at] - self._low[at]) * share

    def _ratio(self) -> float:
        """Returns the factor of all rates in this iteration (WarmupCosineLR)."""
        if self.iteration < 0:
            return 0.0
        if self.iteration < self._warmup:
            return self._start + self._warmed() * (1.0 - self._start)
        steps = max(1, self._total - self._warmup)
        progress = min(1.0, (self.iteration - self._warmup + 1) / steps)
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self._floor + (1.0 - self._floor) * cosine)

    def _apply(self) -> None:
        for at, group in enumerate(self._groups):
            group["lr"] = self._rate(at)

    def follow(self, groups: list[dict[str, Any]]) -> None:
        """Sets the rates of these groups from now on, instead of those it had."""
        self._groups = groups

    def step(self) -> None:
        self.iteration += 1
        self._apply()

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self._groups]

    def state_dict(self) -> dict[str, int]:
        return {"last_batch_iteration": self.iteration}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.iteration = state_dict["last_batch_iteration"]
        self._apply()
