"""Optimizers whose states live on NVMe.

>>> import tensorferry.optim, torch
>>> model = torch.nn.Linear(64, 64)
>>> optimizer = tensorferry.optim.AdamW(model.parameters(), lr=1e-3, nvme_path=".")
>>> model(torch.ones(8, 64)).sum().backward()
>>> optimizer.step()
>>> optimizer.close()

The numbers are those of torch.optim. A step goes through the parameters in sub-groups: while one is
computed, the states of the next are read and those of the last are written. All of that happens in
`buffer_count` buffers of `buffer_bytes`, page-locked; where they are too few, a step waits.
"""

import torch

from .optimizer import Offloaded

__all__ = ["Adam", "AdamW", "Offloaded", "offload"]


def offload(optimizer, nvme_path, **options):
    """Moves the states of a torch optimizer to NVMe and returns an optimizer to use instead of it.

    For optimizers that step each parameter by itself, which is all of torch's but LBFGS
    and SparseAdam. States that are there already move along. Options as in Offloaded.

    >>> import tensorferry.optim, torch
    >>> model = torch.nn.Linear(64, 64)
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> optimizer = tensorferry.optim.offload(sgd, nvme_path=".")
    >>> optimizer.close()
    """
    return Offloaded(optimizer, nvme_path, **options)


class Adam(Offloaded):
    """torch.optim.Adam(fused=True) with masters and moments on NVMe; see AdamW."""

    _kind = torch.optim.Adam

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0,
        amsgrad=False,
        *,
        maximize=False,
        nvme_path,
        master_weights=True,
        **options,
    ):
        optimizer = self._kind(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, fused=True
        )
        super().__init__(optimizer, nvme_path, master_weights=master_weights, **options)


class AdamW(Adam):
    """torch.optim.AdamW(fused=True) with masters and moments on NVMe.

    The same numbers to the last bit for parameters in fp32; those in bf16 and fp16 get masters in
    fp32 (master_weights=False: none, as in torch). `nvme_path` and the other options as in
    Offloaded.
    """

    _kind = torch.optim.AdamW

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=1e-2,
        amsgrad=False,
        **options,
    ):
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)
