"""AdamW with moments in 8 bits, all of it in memory: what ours on the drive must equal. Written
from the definition, by other means than the package."""

import torch
from master_adamw import MasterAdamW

BLOCK = 256
LEAST_NORMAL = torch.finfo(torch.float32).tiny
SIGNED = {"exp_avg": True, "exp_avg_sq": False}


def dynamic_map(name):
    """The numbers of bitsandbytes' create_dynamic_map: seven decades, each with twice as many."""
    numbers = [0.0, 1.0]
    for decade in range(7):
        count = 2**decade if SIGNED[name] else 2 ** (decade + 1)
        means = [(0.1 + 0.9 * (i + 0.5) / count) / 10.0 ** (6 - decade) for i in range(count)]
        numbers += means + ([-mean for mean in means] if SIGNED[name] else [])
    return torch.tensor(sorted(numbers), dtype=torch.float64)


def quantized(name, values):
    """(codes, scales) of elements in fp32."""
    numbers = dynamic_map(name)
    bounds = ((numbers[:-1] + numbers[1:]) / 2).float().to(values.device)
    if name == "exp_avg_sq":
        bounds[0] = 0  # only zero becomes zero
    blocks = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    high, low = blocks.max(1).values, blocks.min(1).values  # NaN if there is one
    scales = torch.where(high >= -low, high, low)
    if name == "exp_avg_sq":
        scales = torch.where(low.isinf() | low.isnan(), scales, high.clamp(min=0))
    scales[scales.abs() < LEAST_NORMAL] = 0
    scales[high.isnan()] = float("nan")
    codes = torch.searchsorted(bounds, (blocks / scales[:, None]).contiguous())
    codes[scales == 0] = 127 if SIGNED[name] else 0
    codes[~scales.isfinite()] = 255
    return codes.to(torch.uint8).view(-1)[: values.numel()], scales


def dequantized(name, codes, scales):
    numbers = dynamic_map(name).float().to(codes.device)
    return numbers[codes.long()] * scales.repeat_interleave(BLOCK)[: codes.numel()]


class QuantizedAdamW(MasterAdamW):
    """torch's AdamW whose moments are in 8 bits between the steps; masters in fp32 for parameters
    in bf16 and fp16."""

    @torch.no_grad()
    def step(self):
        super().step()
        for master in self.masters:
            if master.grad is not None:
                for name in SIGNED:
                    moment = self.inner.state[master][name]
                    flat = moment.as_strided((moment.numel(),), (1,))  # as it lies in memory
                    flat.copy_(dequantized(name, *quantized(name, flat)))
