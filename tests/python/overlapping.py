"""Training with and without overlap: what the tests of overlap share."""

import contextlib

import tensorferry.optim
import torch
from offload_models import same
from tensorferry._memory.pending import PendingParameter
from tensorferry.optim.step import Step
from torch import nn

WIDTH = 96
SMALL = dict(buffer_count=3, buffer_bytes=256 << 10)


def adamw(model, path, overlap="backward", **options):
    options = SMALL | dict(lr=1e-2, nvme_path=path) | options
    return tensorferry.optim.AdamW(model.parameters(), overlap=overlap, **options)


def train(model, optimizer, data, steps=3, micro_batches=1, clip=None, loss_of=None):
    """Trains, and returns the losses and what the parameters are then."""
    torch.manual_seed(11)
    overlaps = getattr(optimizer, "overlap", None) is not None
    losses = []
    for _ in range(steps):
        for micro in range(micro_batches):
            x = data()
            loss = model(x).float().square().mean() if loss_of is None else loss_of(model, x)
            last = overlaps and micro == micro_batches - 1
            with (
                optimizer.last_backward(clips=clip is not None)
                if last
                else contextlib.nullcontext()
            ):
                loss.backward()
            losses.append(loss.detach())
        if clip is not None:
            losses.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses), [param.detach().clone() for param in model.parameters()]


def check_same(actual, expected):
    same(actual[0], expected[0])
    for one, other in zip(actual[1], expected[1]):
        same(one, other)


def deep(layers=8, width=96, dtype=None):
    torch.manual_seed(5)
    linear = (nn.Linear(width, width, dtype=dtype) for _ in range(layers))
    return nn.Sequential(*(part for one in linear for part in (one, nn.Tanh())))


class Watched:
    """Which sub-groups were stepped in the backward pass, and which after it."""

    def __init__(self, monkeypatch):
        self.inside, self.after = [], []
        compute = Step.compute_next

        def watched(step):
            inside = torch._C._current_graph_task_id() != -1
            (self.inside if inside else self.after).append(step.next_group)
            compute(step)

        monkeypatch.setattr(Step, "compute_next", watched)


def iteration(model, path, **options):
    return adamw(model, path, "iteration", **options)


def inputs():
    return torch.randn(8, WIDTH)


def is_pending(param):
    return type(param) is PendingParameter


def begin(model, optimizer, x=None):
    """One iteration, of which the step is left."""
    torch.manual_seed(3)
    with optimizer.last_backward():
        model(inputs() if x is None else x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def stepped(path, dtype=None):
    """The parameters that begin() leaves, without overlap."""
    model = deep(dtype=dtype)
    optimizer = adamw(model, path, None)
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(3)).to(dtype)
    model(x).float().square().mean().backward()
    optimizer.step()
    optimizer.close()
    return [param.detach() for param in model.parameters()]
