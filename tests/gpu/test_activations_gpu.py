"""Tensors of a GPU that autograd saves on NVMe."""

import contextlib

import pytest
import tensorferry.offload
import torch
from gpu_tensors import MiB, busy


def make_model(layers=16, width=1024):
    torch.manual_seed(0)
    linear = (torch.nn.Linear(width, width, device="cuda") for _ in range(layers))
    return torch.nn.Sequential(*(part for one in linear for part in (one, torch.nn.Tanh())))


def gradients(model, x, around, passes=2):
    for _ in range(passes):
        model.zero_grad()
        with around:
            loss = model(x).square().mean()
        busy(5)  # buffers are used again before the GPU has come this far
        loss.backward()
    return [param.grad.clone() for param in model.parameters()]


@pytest.mark.parametrize("max_cpu_bytes", [MiB, 12 * MiB, 256 * MiB])
@pytest.mark.parametrize("side_stream", [False, True])
def test_gradients_are_those_of_memory(tmp_path, max_cpu_bytes, side_stream):
    model = make_model()
    x = torch.randn(1024, 1024, device="cuda")
    expected = gradients(model, x, contextlib.nullcontext())
    torch.cuda.synchronize()
    stream = torch.cuda.Stream() if side_stream else torch.cuda.current_stream()
    saved = tensorferry.offload.activations(tmp_path, max_cpu_bytes)
    with torch.cuda.stream(stream):
        actual = gradients(model, x, saved)
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(actual, expected))
    assert saved.stats()["saved_bytes"] > 2 * 16 * 4 * MiB
    assert (saved.stats()["read_bytes"] > 0) == (max_cpu_bytes < 256 * MiB)
    saved.close()


def test_the_gpu_has_few_of_them_at_a_time(tmp_path):
    """64 MiB of activations, in tensors of 4 MiB."""
    model = make_model()
    x = torch.randn(1024, 1024, device="cuda")
    saved = tensorferry.offload.activations(tmp_path, 32 * MiB)
    peaks = []
    for around in (contextlib.nullcontext(), saved):
        gradients(model, x, around)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with around:
            for part in model:
                x = part(x)
                torch.cuda.synchronize()
            loss = x.square().mean()
        loss.backward()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        x = x.detach().clone()
        del loss
    assert peaks[1] < peaks[0] - 32 * MiB
    saved.close()


def test_a_tensor_that_is_changed_in_place_raises_as_torch_does(tmp_path):
    saved = tensorferry.offload.activations(tmp_path, 4 * MiB)
    x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    with saved:
        y = x * 2
        loss = y.square().sum()
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    saved.close()
