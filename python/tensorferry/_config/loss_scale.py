"""The loss scale of fp16."""


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
