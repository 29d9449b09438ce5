"""Models whose weights are in files of a checkpoint, for the tests of offload.checkpoint."""

import safetensors.torch
import tensorferry.offload
import torch
from offload_models import MODELS, WIDTH, Holder, same
from torch import nn


def plain_state(model):
    """The state with memory of its own for each name, as safetensors wants it."""
    return {name: value.clone().contiguous() for name, value in model.state_dict().items()}


def save(model, path):
    safetensors.torch.save_file(plain_state(model), path)
    return path


def other(name):
    """The same model with other values."""
    torch.manual_seed(99)
    return MODELS[name][0]()


def run(model, path, share=3, **options):
    options.setdefault("units", (Holder,))
    options.setdefault("keep_bytes", 1024)
    limit = sum(param.numel() for param in model.parameters()) * 4 // share
    return tensorferry.offload.checkpoint(model, path, limit, **options)


def passes(model, name, count=3):
    torch.manual_seed(5)
    results = []
    with torch.no_grad():
        for _ in range(count):
            results.append(model(MODELS[name][1]()))
    return torch.stack([result.float() for result in results])


def linears(count=6):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


def on_meta(build):
    with torch.device("meta"):
        return build()


def check(model, expected, x=None):
    x = torch.ones(3, WIDTH) if x is None else x
    with torch.no_grad():
        same(model(x), expected(x))


class WithBuffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.full((WIDTH,), 0.25))
        self.register_buffer("angles", torch.arange(WIDTH) / 10, persistent=False)

    def forward(self, x):
        return self.inner(x) * self.angles.cos() + self.mean


class WithReset(WithBuffers):
    def reset_parameters(self):
        self.angles.copy_(torch.arange(WIDTH) / 10)
