"""Adam and AdamW with states on NVMe."""

from __future__ import annotations

from typing import Any

import torch

from .._memory.buffers import NvmePath
from .optimizer import Offloaded


class Adam(Offloaded):
    """torch.optim.Adam(fused=True) with masters and moments on NVMe; see AdamW."""

    __module__ = "tensorferry.optim"  # where users find it
    _kind: type[torch.optim.Adam] = torch.optim.Adam

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        nvme_path: NvmePath,
        master_weights: bool = True,
        **options: Any,
    ) -> None:
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

    __module__ = "tensorferry.optim"
    _kind = torch.optim.AdamW

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)
