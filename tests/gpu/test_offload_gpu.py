"""Optimizers with states on NVMe, and weights on NVMe, for models on a GPU."""

import copy
import gc

import pytest
import tensorferry
import torch
from gpu_tensors import MiB

OPTIONS = {"buffer_count": 3, "buffer_bytes": MiB}


def make_model(dtype=torch.float32, device="cuda"):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.LayerNorm(1024),
        torch.nn.Linear(1024, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 16),
    ).to(device=device, dtype=dtype)  # fmt: skip


def train(model, optimizer, steps=20, clip=None, micro_batches=1):
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        for _ in range(micro_batches):
            batch = torch.randn(32, 256, generator=generator).to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=False):
                loss = model(batch.to(next(model.parameters()).dtype)).float().pow(2).mean()
            loss.backward()
        if clip is not None:
            clip(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


def assert_same(model, other):
    for (name, one), two in zip(model.named_parameters(), other.parameters()):
        assert torch.equal(one, two), name


@pytest.mark.parametrize("settings", [
    {}, {"weight_decay": 0.3}, {"amsgrad": True}, {"maximize": True}, {"betas": (0.5, 0.9)},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("buffers", [OPTIONS, {"buffer_count": 1, "buffer_bytes": 1}], ids=str)
def test_adamw_on_a_gpu_is_torchs_to_the_bit(tmp_path, settings, buffers):
    model = make_model()
    other = copy.deepcopy(model)
    with_torch = train(other, torch.optim.AdamW(other.parameters(), 1e-3, fused=True, **settings))
    optimizer = tensorferry.optim.AdamW(
        model.parameters(), 1e-3, nvme_path=tmp_path, **buffers, **settings
    )
    assert torch.equal(train(model, optimizer), with_torch)
    assert_same(model, other)
    assert optimizer.stats()["written_bytes"] > 0
    optimizer.close()


def test_the_gpu_steps_as_the_cpu_does_within_rounding(tmp_path):
    gpu, cpu = make_model(), make_model(device="cpu")
    cpu.load_state_dict(gpu.state_dict())
    for model, folder in ((gpu, "gpu"), (cpu, "cpu")):
        (tmp_path / folder).mkdir()
        optimizer = tensorferry.optim.AdamW(
            model.parameters(), 1e-3, nvme_path=tmp_path / folder, **OPTIONS
        )
        for step in range(5):
            for number, param in enumerate(model.parameters()):
                generator = torch.Generator().manual_seed(100 * step + number)
                param.grad = torch.randn(param.shape, generator=generator).to(param.device)
            optimizer.step()
        optimizer.close()
    for one, two in zip(gpu.parameters(), cpu.parameters()):
        torch.testing.assert_close(one.cpu(), two, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_of_halves_are_stepped_on_the_gpu(tmp_path, dtype):
    model = make_model(dtype)
    masters = [p.detach().float() for p in model.parameters()]
    plain = torch.optim.AdamW(masters, 1e-3, fused=True)
    optimizer = tensorferry.optim.AdamW(
        model.parameters(), 1e-3, nvme_path=tmp_path, master_weights=True, **OPTIONS
    )
    for _ in range(5):
        for param, master in zip(model.parameters(), masters):
            param.grad = torch.randn_like(param)
            master.grad = param.grad.float()
        optimizer.step()
        plain.step()
    for param, master in zip(model.parameters(), masters):
        assert torch.equal(param, master.to(dtype))
    optimizer.close()


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9),
    lambda p: torch.optim.RMSprop(p, 1e-3),
    lambda p: torch.optim.Adagrad(p, 1e-2),
    lambda p: torch.optim.Adafactor(p, 1e-3),
    lambda p: torch.optim.Adam(p, 1e-3),
], ids=["SGD", "RMSprop", "Adagrad", "Adafactor", "Adam"])  # fmt: skip
def test_other_optimizers_on_a_gpu_are_torchs(tmp_path, make):
    model = make_model()
    other = copy.deepcopy(model)
    with_torch = train(other, make(other.parameters()))
    optimizer = tensorferry.optim.offload(make(model.parameters()), nvme_path=tmp_path, **OPTIONS)
    assert torch.equal(train(model, optimizer), with_torch)
    assert_same(model, other)
    optimizer.close()


def test_gradients_of_a_gpu_go_to_the_drive(tmp_path):
    model = make_model()
    other = copy.deepcopy(model)

    def clip_torch(optimizer):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(params, 0.1)

    plain = torch.optim.AdamW(other.parameters(), 1e-3, fused=True)
    with_torch = train(other, plain, clip=clip_torch, micro_batches=2)
    optimizer = tensorferry.optim.AdamW(
        model.parameters(), 1e-3, nvme_path=tmp_path, offload_gradients=True, **OPTIONS
    )
    ours = train(model, optimizer, clip=lambda o: o.clip_grad_norm_(0.1), micro_batches=2)
    torch.testing.assert_close(ours, with_torch, rtol=1e-5, atol=1e-6)
    model(torch.randn(8, 256, device="cuda")).sum().backward()
    optimizer.clip_grad_norm_(0.1)
    optimizer.clip_grad_norm_(0.01)
    model(torch.randn(8, 256, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.close()


def test_torch_unscales_and_clips_gradients_of_a_gpu_on_the_drive(tmp_path):
    model = make_model()
    other = copy.deepcopy(model)
    optimizer = tensorferry.optim.AdamW(
        model.parameters(), 1e-3, nvme_path=tmp_path, offload_gradients=True, **OPTIONS
    )
    plain = torch.optim.AdamW(other.parameters(), 1e-3, fused=True)
    norms = []
    for side, own in ((model, optimizer), (other, plain)):
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
        torch.manual_seed(5)
        for step in range(6):
            loss = side(torch.randn(8, 256, device="cuda")).square().mean()
            scaler.scale(loss * float("inf") if step == 3 else loss).backward()
            scaler.unscale_(own)
            norms.append(torch.nn.utils.clip_grad_norm_(side.parameters(), 0.1))
            scaler.step(own)
            scaler.update()
            side.zero_grad()
        assert scaler.get_scale() == 512.0
    torch.testing.assert_close(norms[:6], norms[6:], rtol=1e-5, atol=1e-6, equal_nan=True)
    for mine, wanted in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)
    optimizer.close()


def test_a_checkpoint_goes_on_to_the_same_bits(tmp_path):
    model = make_model()
    optimizer = tensorferry.optim.AdamW(model.parameters(), 1e-3, nvme_path=tmp_path, **OPTIONS)
    train(model, optimizer, 5)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()},
               tmp_path / "checkpoint.pt")  # fmt: skip
    expected = train(model, optimizer, 5)
    optimizer.close()
    saved = torch.load(tmp_path / "checkpoint.pt", mmap=True)
    for kind in ("ours", "torch's"):
        again = make_model()
        again.load_state_dict(saved["model"])
        if kind == "ours":
            other = tensorferry.optim.AdamW(again.parameters(), 1e-3, nvme_path=tmp_path, **OPTIONS)
        else:
            other = torch.optim.AdamW(again.parameters(), 1e-3, fused=True)
        other.load_state_dict(saved["optimizer"])
        assert torch.equal(train(again, other, 5), expected)


def test_states_take_no_more_of_the_gpu_than_the_buffers(tmp_path):
    torch.cuda.empty_cache()
    params = [torch.nn.Parameter(torch.zeros(16 * MiB, device="cuda")) for _ in range(4)]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = tensorferry.optim.AdamW(
        params, 1e-3, nvme_path=tmp_path, buffer_count=3, buffer_bytes=32 * MiB
    )
    optimizer.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        optimizer.step()
    assert torch.cuda.max_memory_allocated() - before <= 3 * 32 * MiB + MiB
    optimizer.close()


# --- weights ---


@pytest.mark.parametrize("most", [3 * MiB, 5 * MiB, 64 * MiB])
def test_inference_gives_the_same_bits(tmp_path, most):
    model = make_model()
    batch = torch.randn(64, 256, device="cuda")
    with torch.no_grad():
        expected = model(batch)
    weights = tensorferry.offload.parameters(model, tmp_path, max_gpu_bytes=most, keep_bytes=0)
    for _ in range(5):
        with torch.no_grad():
            assert torch.equal(model(batch), expected)
    assert weights.stats()["overflows"] == 0
    with torch.inference_mode():
        assert torch.equal(model(batch), expected)
    weights.close()


def test_training_with_all_on_the_drive_gives_the_same_bits(tmp_path):
    model = make_model()
    other = copy.deepcopy(model)
    with_torch = train(other, torch.optim.AdamW(other.parameters(), 1e-3, fused=True))
    weights = tensorferry.offload.parameters(model, tmp_path, max_gpu_bytes=6 * MiB, keep_bytes=0)
    optimizer = tensorferry.optim.AdamW(model.parameters(), 1e-3, nvme_path=tmp_path, **OPTIONS)
    assert torch.equal(train(model, optimizer), with_torch)
    with weights.gather():
        assert_same(model, other)
    weights.close(restore=True)
    assert_same(model, other)
    assert all(p.is_cuda for p in model.parameters())
    optimizer.close()


def test_training_with_weights_that_stay_gives_the_same_bits(tmp_path):
    model = make_model()
    other = copy.deepcopy(model)
    with_torch = train(other, torch.optim.AdamW(other.parameters(), 1e-3, fused=True))
    weights = tensorferry.offload.parameters(model, tmp_path, max_gpu_bytes=64 * MiB, keep_bytes=0)
    optimizer = tensorferry.optim.AdamW(model.parameters(), 1e-3, nvme_path=tmp_path, **OPTIONS)
    assert torch.equal(train(model, optimizer), with_torch)
    optimizer.close()
    weights.close()


def test_streams_of_ones_own_use_the_weights(tmp_path):
    model = make_model()
    batch = torch.randn(64, 256, device="cuda")
    with torch.no_grad():
        expected = model(batch)
    weights = tensorferry.offload.parameters(model, tmp_path, max_gpu_bytes=5 * MiB, keep_bytes=0)
    torch.cuda.synchronize()
    for stream in [torch.cuda.Stream() for _ in range(4)] * 3:
        with torch.cuda.stream(stream), torch.no_grad():
            result = model(batch)
        stream.synchronize()
        assert torch.equal(result, expected)
    weights.close()


def test_a_model_larger_than_its_share_of_the_gpu_comes_straight_there(tmp_path):
    with torch.device("meta"):
        model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(32)])  # 512 MiB
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(3)
    weights = tensorferry.offload.parameters(
        model, tmp_path, device="cuda", max_gpu_bytes=96 * MiB, initialize=reset
    )
    batch = torch.randn(16, 2048, device="cuda")
    with torch.no_grad():
        model(batch)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        first = model(batch)
        second = model(batch)
    assert torch.equal(first, second) and bool(first.isfinite().all())
    assert torch.cuda.max_memory_allocated() - before < 128 * MiB
    assert weights.stats()["overflows"] == 0
    weights.close()


def reset(module):
    if isinstance(module, torch.nn.Linear):
        torch.nn.init.normal_(module.weight, std=0.02)
        torch.nn.init.zeros_(module.bias)


def test_a_cpu_model_is_used_on_the_gpu(tmp_path):
    model = make_model(device="cpu")
    batch = torch.randn(8, 256)
    expected = model(batch)
    weights = tensorferry.offload.parameters(model, tmp_path, device="cuda", max_gpu_bytes=6 * MiB)
    result = model(batch.cuda())
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-4, atol=1e-5)
    weights.close(restore=True)
    assert all(p.is_cuda for p in model.parameters())


def test_initialize_takes_a_model_on_a_gpu(tmp_path):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)},
            "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)},
        },
    }
    model = make_model()
    other = copy.deepcopy(model)
    with_torch = train(other, torch.optim.AdamW(other.parameters(), 1e-3, fused=True), 5)
    model, optimizer = tensorferry.initialize(model, config=config)
    assert torch.equal(train(model, optimizer, 5), with_torch)
    optimizer.close()
