"""Optimizers whose states live on NVMe.

>>> import tensorferry.optim, torch
>>> model = torch.nn.Linear(64, 64)
>>> optimizer = tensorferry.optim.AdamW(model.parameters(), lr=1e-3, nvme_path=".")
>>> model(torch.ones(8, 64)).sum().backward()
>>> optimizer.step()
>>> optimizer.close()

The numbers are those of torch.optim. A step goes through the parameters in sub-groups: while it
computes one, the drive reads the states of the next and writes those of the last. All of that
happens in `buffer_count` page-locked buffers of `buffer_bytes`; too few of them make a step wait.
"""

from __future__ import annotations

from typing import Any

import torch

from .._memory.buffers import NvmePath
from .adam import Adam, AdamW
from .optimizer import Offloaded

__all__ = ["Adam", "AdamW", "Offloaded", "offload"]


def offload(
    optimizer: torch.optim.Optimizer,
    nvme_path: NvmePath,
    **options: Any,
) -> Offloaded:
    """Moves the states of a torch optimizer to NVMe and returns an optimizer to use instead of it.

    Takes optimizers that step each parameter by itself: all of torch's but LBFGS and SparseAdam.
    States that exist already move along. Options as in Offloaded.

    >>> import tensorferry.optim, torch
    >>> model = torch.nn.Linear(64, 64)
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> optimizer = tensorferry.optim.offload(sgd, nvme_path=".")
    >>> optimizer.close()
    """
    return Offloaded(optimizer, nvme_path, **options)
