"""Steps on a GPU that go on in the backward pass and behind the next forward pass."""

import contextlib

import pytest
import tensorferry
import torch
from gpu_tensors import MiB
from tensorferry._memory.pending import PendingParameter
from tensorferry.optim.step import Step
from torch import nn


def deep(dtype):
    torch.manual_seed(5)
    linear = (nn.Linear(512, 512, dtype=dtype, device="cuda") for _ in range(8))
    return nn.Sequential(*(part for one in linear for part in (one, nn.Tanh())))


def train(model, optimizer, clip=None, between=None):
    generator = torch.Generator("cuda").manual_seed(1)
    dtype = model[0].weight.dtype
    losses = []
    for _ in range(5):
        x = torch.randn(64, 512, generator=generator, device="cuda", dtype=dtype)
        loss = model(x).float().square().mean()
        announced = optimizer.overlap is not None
        with (
            optimizer.last_backward(clips=clip is not None)
            if announced
            else contextlib.nullcontext()
        ):
            loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if between is not None:
            between(model)
    optimizer.settle()
    return torch.stack(losses), [param.detach().clone() for param in model.parameters()]


def run(path, overlap, dtype, clip=None, between=None, **options):
    model = deep(dtype)
    options = dict(buffer_count=3, buffer_bytes=3 * MiB) | options
    optimizer = tensorferry.optim.AdamW(
        model.parameters(), 1e-2, nvme_path=path, overlap=overlap, **options
    )
    result = train(model, optimizer, clip, between)
    optimizer.close()
    return result


def check_same(one, other):
    assert torch.equal(one[0], other[0])
    for number, (mine, theirs) in enumerate(zip(one[1], other[1])):
        assert torch.equal(mine, theirs), number


@pytest.fixture(params=["all late", "as it comes"])
def lateness(request, monkeypatch):
    """With "all late" no state arrives before somebody waits for it."""
    if request.param == "all late":
        monkeypatch.setattr(Step, "is_next_loaded", lambda step: False)
    return request.param


@pytest.mark.parametrize("overlap", ["backward", "iteration"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip", [None, 1e-3])
@pytest.mark.parametrize("options", [{}, dict(moments="int8"), dict(max_cpu_bytes="50%")], ids=str)
def test_overlap_gives_the_same_bits(tmp_path, overlap, dtype, clip, options, lateness):
    expected = run(tmp_path, None, dtype, clip, **options)
    check_same(run(tmp_path, overlap, dtype, clip, **options), expected)


def test_another_stream_that_reads_a_weight_gets_the_new_one(tmp_path, monkeypatch):
    """The late step computes on the stream of step(); the reader's own one waits for it."""
    monkeypatch.setattr(Step, "is_next_loaded", lambda step: False)
    seen = []

    def between(model):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            was = type(model[0].weight) is PendingParameter
            seen.append((was, model[0].weight.clone()))
        torch.cuda.current_stream().wait_stream(stream)

    expected = run(tmp_path, None, torch.float32, between=between)
    before, seen = seen, []
    check_same(run(tmp_path, "iteration", torch.float32, between=between), expected)
    assert [was for was, _ in before] == [False] * 5
    assert [was for was, _ in seen] == [True] * 5
    for (_, mine), (_, theirs) in zip(seen, before):
        assert torch.equal(mine, theirs)


def test_weights_on_the_drive_are_stepped_late_too(tmp_path, lateness):
    expected = run(tmp_path, None, torch.bfloat16)
    model = deep(torch.bfloat16)
    weights = tensorferry.offload.parameters(model, tmp_path, 2 * MiB, keep_bytes=1024)
    optimizer = tensorferry.optim.AdamW(
        model.parameters(), 1e-2, nvme_path=tmp_path, overlap="iteration"
    )
    losses, _ = train(model, optimizer)
    optimizer.close()
    weights.close(restore=True)
    check_same((losses, [param.detach() for param in model.parameters()]), expected)
