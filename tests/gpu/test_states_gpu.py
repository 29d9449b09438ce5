"""States of a model on a GPU that stay in memory, and masters of which the drive has half."""

import logging

import pytest
import tensorferry
import torch
from gpu_tensors import MiB
from master_adamw import MasterAdamW
from tensorferry.optim.cut_masters import cut, join

BLOCK = 16384


def parameters(dtype=torch.float32, count=6, size=MiB // 4 + 3):
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(size, generator=generator) for _ in range(count)]
    return [torch.nn.Parameter(values.to("cuda", dtype)) for values in made]


def give_gradients(step, *sides):
    for params in sides:
        generator = torch.Generator().manual_seed(100 + step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to("cuda", param.dtype)


def pair(path, dtype, **options):
    mine, theirs = parameters(dtype), parameters(dtype)
    options = dict(buffer_count=3, buffer_bytes=3 * MiB) | options
    ours = tensorferry.optim.AdamW(mine, nvme_path=path, **options)
    reference = (
        torch.optim.AdamW(theirs, fused=True) if dtype == torch.float32 else MasterAdamW(theirs)
    )
    return mine, ours, theirs, reference


def train(mine, ours, theirs, reference, first, last):
    for step in range(first, last):
        give_gradients(step, mine, theirs)
        ours.step()
        reference.step()
        for number, (one, other) in enumerate(zip(mine, theirs)):
            assert torch.equal(one, other), (step, number)


LIMITS = [
    dict(max_cpu_bytes="50%"),
    dict(max_cpu_bytes="100%"),
    dict(max_gpu_bytes="50%"),
    dict(max_gpu_bytes="100%"),
    dict(max_cpu_bytes="30%", max_gpu_bytes="30%"),
    dict(max_cpu_bytes="auto"),
    dict(max_gpu_bytes="auto"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_states_that_stay_give_the_same_bits(tmp_path, dtype, limits):
    mine, ours, theirs, reference = pair(tmp_path, dtype, **limits)
    train(mine, ours, theirs, reference, 0, 12)
    stats = ours.stats()
    assert stats["kept_bytes"] > 0
    saved = ours.state_dict()
    inner = reference if dtype == torch.float32 else reference.inner
    for number, own in inner.state_dict()["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(saved["state"][number][name], own[name].cpu()), (number, name)
    again = tensorferry.optim.AdamW(mine, nvme_path=tmp_path, **limits)
    again.load_state_dict(saved)
    ours.close()
    train(mine, again, theirs, reference, 12, 16)
    again.close()


def test_nothing_moves_if_all_states_stay(tmp_path):
    for limits in (dict(max_cpu_bytes="100%"), dict(max_gpu_bytes="100%")):
        mine, ours, theirs, reference = pair(tmp_path, torch.float32, **limits)
        train(mine, ours, theirs, reference, 0, 4)
        stats = ours.stats()
        assert stats["read_bytes"] == stats["written_bytes"] == stats["tensor_bytes"] == 0
        ours.close()


def test_masters_are_cut_and_joined_on_the_gpu():
    count = 3 * BLOCK + 5
    master = torch.randn(count, device="cuda")
    low_halves = torch.arange(1 << 15, 1 << 16, device="cuda", dtype=torch.int32)
    bits = master.view(torch.int32)
    bits[: len(low_halves)] = (bits[: len(low_halves)] & ~0xFFFF) | low_halves
    master[7], master[9], master[11] = float("nan"), float("inf"), -0.0
    weights = master.to(torch.bfloat16)
    low = torch.empty(count, dtype=torch.int16, device="cuda")
    known = cut(master, weights, low)
    back = torch.empty_like(master)
    assert join(back, weights, low, known) == 0
    assert torch.equal(back.view(torch.int32), master.view(torch.int32))
    weights[[5, 4000]] = weights[[4000, 5]]  # only their places differ
    assert join(back, weights, low, known) == 1
    assert torch.equal(back[:BLOCK], weights[:BLOCK].float()) or master[:BLOCK].isnan().any()
    assert torch.equal(back[BLOCK:], master[BLOCK:])


def test_two_hundred_steps_are_those_of_whole_masters(tmp_path):
    mine, ours, theirs, reference = pair(tmp_path, torch.bfloat16)
    train(mine, ours, theirs, reference, 0, 200)
    saved = ours.state_dict()["state"]
    for number, master in enumerate(reference.masters):
        assert torch.equal(saved[number]["master"], master.cpu())
    count = sum(param.numel() for param in mine)
    assert 10 * count <= ours.stats()["tensor_bytes"] < 10.1 * count
    ours.close()


def test_a_changed_weight_never_meets_old_lower_bits(tmp_path, caplog):
    mine, ours, theirs, reference = pair(tmp_path, torch.bfloat16)
    train(mine, ours, theirs, reference, 0, 3)
    new = (mine[1].detach().float() * 1.5 + 3).to(torch.bfloat16)
    mine[1].data.copy_(new)
    with torch.no_grad():
        theirs[1].copy_(new)
        reference.masters[1].copy_(new)
    with caplog.at_level(logging.WARNING, "tensorferry"):
        train(mine, ours, theirs, reference, 3, 6)
    assert "was changed since the last step" in caplog.records[0].getMessage()
    ours.close()


def test_distributed_checkpoints_of_a_gpu(tmp_path):
    """Also in the layout of Hugging Face."""
    from torch.distributed import checkpoint as dcp

    state = {f"{i}": torch.randn(1000 * i + 1, 33, device="cuda") for i in range(8)}
    for layout in ("torch", "huggingface"):
        path = tmp_path / layout
        writer = tensorferry.dcp.Writer(path, layout=layout)
        dcp.save(dict(state), storage_writer=writer, no_dist=True)
        loaded = {name: torch.zeros_like(value) for name, value in state.items()}
        dcp.load(loaded, storage_reader=tensorferry.dcp.Reader(path), no_dist=True)
        for name, value in state.items():
            assert loaded[name].is_cuda and torch.equal(loaded[name], value), (layout, name)
