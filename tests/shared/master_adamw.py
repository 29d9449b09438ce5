"""The optimizer that ours with masters must equal."""

import torch


class MasterAdamW:
    """AdamW in fp32 for parameters in bf16 and fp16, all in memory."""

    def __init__(self, params, kind=torch.optim.AdamW, **options):
        self.params = params
        self.masters = [torch.nn.Parameter(param.detach().float()) for param in params]
        self.inner = kind(self.masters, **(dict(fused=True) | options))

    @torch.no_grad()
    def step(self):
        for param, master in zip(self.params, self.masters):
            master.grad = None if param.grad is None else param.grad.float()
        self.inner.step()
        for param, master in zip(self.params, self.masters):
            param.copy_(master)
