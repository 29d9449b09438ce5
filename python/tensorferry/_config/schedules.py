"""The learning rate schedules that DeepSpeed's configuration names, with its numbers."""

import math

from .sections import REQUIRED, ConfigError

NAMES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")


class Schedule:
    """Sets the learning rate of an optimizer's groups. The first step is made with the rate from
    before the warmup."""

    def __init__(self, name, params, groups):
        if name not in NAMES:
            raise ConfigError(
                f"scheduler.type is {name!r}: known are {', '.join(NAMES)}; for any other use "
                "torch.optim.lr_scheduler with the optimizer that is returned"
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

    def _rates(self, value):
        rates = list(value) if isinstance(value, (list, tuple)) else [value] * len(self._groups)
        if len(rates) != len(self._groups):
            raise ConfigError(
                f"the scheduler has {len(rates)} rates for {len(self._groups)} parameter groups"
            )
        return rates

    def _warmed(self):
        if self._linear:
            return self.iteration / self._warmup
        return math.log(self.iteration + 1) * (1.0 / math.log(self._warmup))

    def _rate(self, at):
        """The rate of one group in this iteration."""
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

    def _ratio(self):
        if self.iteration < 0:
            return 0.0
        if self.iteration < self._warmup:
            return self._start + self._warmed() * (1.0 - self._start)
        steps = max(1, self._total - self._warmup)
        progress = min(1.0, (self.iteration - self._warmup + 1) / steps)
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self._floor + (1.0 - self._floor) * cosine)

    def _apply(self):
        for at, group in enumerate(self._groups):
            group["lr"] = self._rate(at)

    def step(self):
        self.iteration += 1
        self._apply()

    def get_last_lr(self):
        return [group["lr"] for group in self._groups]

    def state_dict(self):
        return {"last_batch_iteration": self.iteration}

    def load_state_dict(self, state_dict):
        self.iteration = state_dict["last_batch_iteration"]
        self._apply()
