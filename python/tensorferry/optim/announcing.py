"""Who knows which backward pass is the last before a step: accelerate."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Protocol


class Accelerator(Protocol):
    """What we need of accelerate.Accelerator."""

    backward: Callable[..., Any]
    scaler: Any

    @property
    def sync_gradients(self) -> bool: ...


class Announced(Protocol):
    """An optimizer that steps while the last backward pass runs."""

    overlap: str | None

    def last_backward(self, *, clips: bool) -> contextlib.AbstractContextManager[None]: ...


def announce(accelerator: Accelerator, optimizer: Announced, clips: bool) -> None:
    """Makes the last backward() of each step one inside last_backward(). The last call counts."""
    if optimizer.overlap is None:
        raise RuntimeError('follow() needs overlap="backward" or "iteration": give it')
    if accelerator.scaler is not None and not clips:
        raise ValueError(
            "this accelerator scales the loss (mixed_precision is fp16), and its GradScaler needs "
            "all gradients before the step: use follow(accelerator, clips=True), or bf16"
        )
    backward = accelerator.backward
    if not isinstance(backward, AnnouncedBackward):
        backward = AnnouncedBackward(accelerator, backward)
        accelerator.backward = backward
    backward.clips[optimizer] = clips


class AnnouncedBackward:
    """backward() of an accelerator. The last one of each step is one inside last_backward() of
    these optimizers."""

    def __init__(self, accelerator: Accelerator, backward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, backward)
        self._accelerator = accelerator
        self._backward = backward
        self.clips: dict[Announced, bool] = {}

    def __call__(self, loss: Any, **options: Any) -> Any:
        with contextlib.ExitStack() as stack:
            if self._accelerator.sync_gradients:
                for optimizer, clips in self.clips.items():
                    stack.enter_context(optimizer.last_backward(clips=clips))
            return self._backward(loss, **options)
