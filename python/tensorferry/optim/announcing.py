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
    """Makes the last backward() of each step one inside last_backward()."""
    if optimizer.overlap is None:
        raise RuntimeError('follow() needs overlap="backward" or "iteration": give it')
    if accelerator.scaler is not None and not clips:
        raise ValueError(
            "this accelerator scales the loss (mixed_precision is fp16), and its GradScaler needs "
            "all gradients before the step: use follow(accelerator, clips=True), or bf16"
        )
    backward = accelerator.backward

    @functools.wraps(backward)
    def announced(loss: Any, **options: Any) -> Any:
        if not accelerator.sync_gradients:
            return backward(loss, **options)
        with optimizer.last_backward(clips=clips):
            return backward(loss, **options)

    accelerator.backward = announced
