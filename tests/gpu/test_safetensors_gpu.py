"""Safetensors files to a GPU and from it."""

import pytest
import torch
from gpu_tensors import MiB
from tensorferry._shared_handle import shared_handle
from tensorferry.safetensors import SafetensorError, safe_open
from tensorferry.safetensors.torch import load_file, load_model, save, save_file, save_model

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64]


def made(device="cpu"):
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for dtype in DTYPES:
        for shape in [(), (0,), (7,), (300, 1000), (1024, 1024)]:
            data = torch.randint(0, 2, shape, generator=generator).to(dtype)
            tensors[f"{str(dtype)[6:]}{list(shape)}"] = data.to(device)
    return tensors


def same(one, other):
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    raw = [x.contiguous().view(-1).view(torch.uint8).cpu() for x in (one, other)]
    return torch.equal(*raw)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, torch.device("cuda")])
def test_tensors_are_loaded_to_the_gpu(tmp_path, device):
    tensors = made()
    save_file(tensors, tmp_path / "x")
    loaded = load_file(tmp_path / "x", device=device)
    assert loaded.keys() == tensors.keys()
    with safe_open(tmp_path / "x", "pt", device) as file:
        for name, tensor in tensors.items():
            assert loaded[name].is_cuda and same(loaded[name], tensor), name
            alone = file.get_tensor(name)
            assert alone.is_cuda and same(alone, tensor), name


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_default_device_of_torch_does_not_matter(tmp_path, device):
    tensors = made()
    save_file(tensors, tmp_path / "x")
    with torch.device("cuda"):
        loaded = load_file(tmp_path / "x", device=device)
    for name, tensor in tensors.items():
        assert loaded[name].device.type == device and same(loaded[name], tensor), name


def test_tensors_of_the_gpu_are_saved_as_those_of_the_cpu_are(tmp_path):
    save_file(made(), tmp_path / "cpu", {"a": "b"})
    save_file(made("cuda"), tmp_path / "gpu", {"a": "b"})
    assert (tmp_path / "gpu").read_bytes() == (tmp_path / "cpu").read_bytes()
    assert save(made("cuda"), {"a": "b"}) == (tmp_path / "cpu").read_bytes()


def test_work_on_the_stream_is_done_before_a_save(tmp_path):
    tensor = torch.zeros(64 * MiB // 4, device="cuda")
    for _ in range(50):
        tensor += 1
    save_file({"a": tensor}, tmp_path / "x")
    assert torch.equal(load_file(tmp_path / "x")["a"], torch.full((64 * MiB // 4,), 50.0))


@pytest.mark.parametrize(
    "index", [slice(10, 20), 3, (slice(None), slice(100, 400)), slice(0, 99, 7), [5, 1], ...]
)
def test_slices(tmp_path, index):
    tensor = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024)
    save_file({"a": tensor}, tmp_path / "x")
    with safe_open(tmp_path / "x", "pt", "cuda") as file:
        part = file.get_slice("a")[index]
    assert part.is_cuda and torch.equal(part.cpu(), tensor[index])


def test_no_memory_of_the_gpu_is_used_beyond_the_tensors(tmp_path):
    save_file({f"t{i}": torch.ones(16 * MiB // 4) for i in range(8)}, tmp_path / "x")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loaded = load_file(tmp_path / "x", device="cuda")
    assert torch.cuda.memory_allocated() - before == 128 * MiB
    assert torch.cuda.max_memory_allocated() - before == 128 * MiB
    assert all(torch.equal(t, torch.ones_like(t)) for t in loaded.values())


def test_bytes_are_read_once(tmp_path):
    save_file({f"t{i}": torch.ones(16 * MiB // 4) for i in range(8)}, tmp_path / "x")
    before = shared_handle().stats()["read_bytes"]
    load_file(tmp_path / "x", device="cuda")
    assert shared_handle().stats()["read_bytes"] - before == 128 * MiB


def test_damage_is_found_on_the_way_to_the_gpu(tmp_path):
    tensors = {"a": torch.ones(MiB), "b": torch.ones(MiB)}
    on_gpu = {name: tensor.cuda() for name, tensor in tensors.items()}
    save_file(on_gpu, tmp_path / "x", checksums=True)
    loaded = load_file(tmp_path / "x", device="cuda", verify=True)
    assert all(same(loaded[name], tensor) for name, tensor in tensors.items())
    with open(tmp_path / "x", "r+b") as file:
        file.seek(-5, 2)
        file.write(b"\x55")
    with pytest.raises(SafetensorError, match="'b'"):
        load_file(tmp_path / "x", device="cuda", verify=True)


def test_models(tmp_path):
    model, copy = torch.nn.Linear(300, 200).cuda(), torch.nn.Linear(300, 200).cuda()
    save_model(model, tmp_path / "x")
    assert load_model(copy, tmp_path / "x", device="cuda") == (set(), [])
    assert torch.equal(model.weight, copy.weight)
