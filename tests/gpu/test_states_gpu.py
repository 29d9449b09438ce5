"""States of a model on a GPU that stay in memory, masters of which the drive has half, and moments
in 8 bits."""

import logging

import pytest
import tensorferry
import torch
from gpu_tensors import MiB
from master_adamw import MasterAdamW
from quantized_adamw import QuantizedAdamW, quantized
from tensorferry.optim.cut_masters import begin_cut, cut, join
from tensorferry.optim.quantized_moments import NAMES, PACKED, pack_moments, unpack_moments
from tensorferry.optim.snapshots import cut_in, cut_out

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
    if options.get("moments") == "int8":
        reference = QuantizedAdamW(theirs)
    elif dtype == torch.float32:
        reference = torch.optim.AdamW(theirs, fused=True)
    else:
        reference = MasterAdamW(theirs)
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
    assert (stats["kept_cpu_bytes"] > 0) == ("max_cpu_bytes" in limits)
    assert (stats["kept_gpu_bytes"] > 0) == ("max_gpu_bytes" in limits)
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


def test_cutting_and_joining_masters_does_not_wait_for_the_gpu():
    master = torch.randn(3 * BLOCK + 5, device="cuda")
    weights = master.to(torch.bfloat16)
    low = torch.empty(master.shape, dtype=torch.int16, device="cuda")
    known = cut(master, weights, low)
    torch.cuda.set_sync_debug_mode("error")
    try:
        cutting = begin_cut(master, weights, low)
        changed = join(torch.empty_like(master), weights, low, known)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert int(changed) == 0
    assert cutting.end(int(cutting.excess)) is not None


@pytest.mark.parametrize("share", [0.5, 1.0, 2.0])
def test_one_number_for_weights_and_states_counts_the_memory_of_the_gpu(tmp_path, share):
    def made():
        torch.manual_seed(3)
        return torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8))).cuda()

    model, other = made(), made()
    total = sum(param.nbytes for param in model.parameters())
    budget = tensorferry.MemoryBudget(int(share * total))
    with pytest.raises(ValueError, match="max_gpu_bytes"):
        tensorferry.offload.parameters(model, tmp_path, max_cpu_bytes=budget)
    weights = tensorferry.offload.parameters(model, tmp_path, max_gpu_bytes=budget)
    ours = tensorferry.optim.AdamW(
        model.parameters(), nvme_path=tmp_path, max_gpu_bytes=budget, buffer_bytes=MiB
    )
    reference = torch.optim.AdamW(other.parameters(), fused=True)
    for _ in range(6):
        for net, optimizer in ((model, ours), (other, reference)):
            net(torch.ones(4, 256, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        held = weights.stats()["kept_bytes"] + ours.stats()["kept_bytes"]
        assert 0 < held <= budget.held_bytes <= budget.max_bytes
    with weights.gather():
        for mine, theirs in zip(model.parameters(), other.parameters()):
            assert torch.equal(mine, theirs)
    ours.close()
    weights.close()


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


@pytest.mark.parametrize("before, after", [("cpu", "cuda"), ("cuda", "cpu")])
def test_masters_that_were_cut_elsewhere_are_joined(before, after):
    """As when a snapshot is resumed where the model is on another device."""
    master = torch.randn(3 * BLOCK + 5, device=before)
    master[7] = float("nan")
    weights = master.to(torch.bfloat16)
    low = torch.empty(len(master), dtype=torch.int16, device=before)
    known = cut_in(cut_out(cut(master, weights, low)), torch.device(after))
    back = torch.empty_like(master, device=after)
    assert join(back, weights.to(after), low.to(after), known) == 0
    assert torch.equal(back.cpu().view(torch.int32), master.cpu().view(torch.int32))


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


def hostile(name, count):
    """Elements of all magnitudes; in some blocks NaN, infinity, only zeros, only tiny ones."""
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(count, generator=generator)
    values *= 10.0 ** torch.randint(-9, 3, (count,), generator=generator)
    values = values.abs() if name == "exp_avg_sq" else values
    values[300], values[600], values[900] = float("nan"), float("inf"), -float("inf")
    values[1024:1280], values[1280:1536] = 0, values[1280:1536] * 1e-40
    values[1536:1792], values[1792:2048] = -0.0, values[1792:2048].clamp(-1, 1) * 3e38
    any_bits = torch.randint(-(1 << 31), 1 << 31, (count // 3,), generator=generator)
    values[-len(any_bits) :] = any_bits.to(torch.int32).view(torch.float32)
    return values


@pytest.mark.parametrize("count", [4099, 3 * MiB + 77, 17 * MiB + 5])
def test_moments_in_8_bits_have_the_same_bits_on_gpu_and_cpu(count):
    """The last count takes two pieces on the GPU."""
    here = {name: hostile(name, count) for name in NAMES}
    there = {name: values.cuda() for name, values in here.items()}
    expected = {name: quantized(name, values.cuda()) for name, values in here.items()}
    pack_moments(here)
    pack_moments(there)
    assert torch.equal(there[PACKED].cpu(), here[PACKED])
    begin = 8 * -(-count // 256)
    for codes, _ in expected.values():
        assert torch.equal(there[PACKED][begin : begin + count], codes)
        begin += count
    whole_here = {name: torch.empty(count) for name in NAMES}
    whole_there = {name: torch.empty(count, device="cuda") for name in NAMES}
    unpack_moments(here[PACKED], whole_here)
    unpack_moments(there[PACKED], whole_there)
    for name in NAMES:
        one, other = whole_here[name], whole_there[name].cpu()
        assert torch.equal(one.isnan(), other.isnan())
        same = one.nan_to_num().view(torch.int32) == other.nan_to_num().view(torch.int32)
        assert same.all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("limits", [dict(), *LIMITS[:5]], ids=str)
def test_steps_with_moments_in_8_bits_are_those_in_memory(tmp_path, dtype, limits):
    mine, ours, theirs, reference = pair(tmp_path, dtype, moments="int8", **limits)
    train(mine, ours, theirs, reference, 0, 20)
    saved = ours.state_dict()
    for number, own in reference.inner.state_dict()["state"].items():
        for name in NAMES:
            assert torch.equal(saved["state"][number][name], own[name].cpu()), (number, name)
    again = tensorferry.optim.AdamW(mine, nvme_path=tmp_path, moments="int8", **limits)
    again.load_state_dict(saved)
    ours.close()
    train(mine, again, theirs, reference, 20, 24)
    again.close()


def test_a_step_with_moments_in_8_bits_moves_four_bytes(tmp_path):
    mine, ours, theirs, reference = pair(tmp_path, torch.bfloat16, moments="int8")
    train(mine, ours, theirs, reference, 0, 4)
    stats = ours.stats()
    assert 4 <= stats["read_bytes_per_parameter"] <= 4.1
    assert 4 <= stats["written_bytes_per_parameter"] <= 4.1
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
