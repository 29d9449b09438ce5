"""The states of the random number generators of a process."""

from __future__ import annotations

import random
import sys
import warnings
from typing import Any

import torch


def random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = (kind, torch.from_numpy(keys.astype("int64")), *rest)
    return states


def set_random_states(states: dict[str, Any]) -> None:
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(states["torch"])
    _set_gpu_states(states.get("cuda", []))
    if "numpy" in states:
        import numpy

        kind, keys, *rest = states["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), *rest))


def _set_gpu_states(saved: list[torch.Tensor]) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if saved and len(saved) != count:
        warnings.warn(
            f"the snapshot has the random states of {len(saved)} GPUs, and this process has "
            f"{count}: those that both have go on, random numbers of the others will differ",
            stacklevel=2,
        )
    for number, state in enumerate(saved[:count]):
        torch.cuda.set_rng_state(state, number)
