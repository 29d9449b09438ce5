"""tensorferry.checkpoint with tensors of a GPU."""

import errno

import pytest
import torch
from gpu_tensors import MiB, random_bytes
from tensorferry import checkpoint
from torch.utils.serialization import config


def tensors(device="cuda"):
    sizes = [1, 70, 5 * MiB + 3, 200 * MiB + 1, 9]
    made = {str(i): random_bytes(size, i, device) for i, size in enumerate(sizes)}
    return made | {"view": made["2"][100:200], "cpu": torch.arange(100_000)}


def assert_same(mine, theirs):
    assert mine.keys() == theirs.keys()
    for key in mine:
        assert mine[key].device == theirs[key].device
        assert torch.equal(mine[key], theirs[key])


@pytest.mark.parametrize("crc", [True, False])
def test_a_file_has_the_bytes_of_torch_save(tmp_path, crc):
    (tmp_path / "mine").mkdir()
    (tmp_path / "theirs").mkdir()
    obj = tensors()
    with config.patch("save.compute_crc32", crc):
        checkpoint.save(obj, tmp_path / "mine/model.pt")
        torch.save(obj, tmp_path / "theirs/model.pt")
    assert (tmp_path / "mine/model.pt").read_bytes() == (tmp_path / "theirs/model.pt").read_bytes()


@pytest.mark.parametrize(
    "place",
    [
        None,
        "cuda",
        "cuda:0",
        "cpu",
        torch.device("cuda"),
        {"cuda:0": "cpu"},
        {"cpu": "cuda:0"},
        lambda storage, location: storage.cuda() if location == "cpu" else None,
    ],
)
@pytest.mark.parametrize("verify", [True, False])
def test_tensors_come_to_where_torch_puts_them(tmp_path, place, verify):
    obj = tensors()
    torch.save(obj, tmp_path / "model.pt")
    loaded = checkpoint.load(tmp_path / "model.pt", map_location=place, verify=verify)
    assert_same(loaded, torch.load(tmp_path / "model.pt", map_location=place))
    assert loaded["view"].untyped_storage().data_ptr() == loaded["2"].untyped_storage().data_ptr()


def test_no_memory_of_the_gpu_beyond_the_tensors(tmp_path):
    torch.save(tensors("cpu"), tmp_path / "model.pt")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loaded = checkpoint.load(tmp_path / "model.pt", map_location="cuda")
    used = torch.cuda.memory_allocated() - before
    assert torch.cuda.max_memory_allocated() - before <= used + MiB
    assert loaded["3"].is_cuda


def test_a_flipped_bit_is_reported_for_a_gpu_too(tmp_path):
    file = tmp_path / "model.pt"
    checkpoint.save(tensors(), file)
    data = bytearray(file.read_bytes())
    data[100 * MiB] ^= 1
    file.write_bytes(data)
    with pytest.raises(OSError, match="model/data/3") as caught:
        checkpoint.load(file, map_location="cuda")
    assert caught.value.errno == errno.EBADMSG


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
@pytest.mark.parametrize("stage_bytes", [None, 32 * MiB])
def test_a_save_in_the_background_has_the_values_of_the_call(tmp_path, name, stage_bytes):
    state = {key: tensor for key, tensor in tensors().items() if key != "view"}
    checkpoint.save(state, tmp_path / name)
    expected = (tmp_path / name).read_bytes()
    copies = {key: tensor.clone() for key, tensor in state.items()}
    for tensor in state.values():
        tensor.zero_()
    square = torch.randn(8192, 8192, device="cuda")
    for _ in range(20):
        square = torch.mm(square, square)  # what follows in the stream comes late
    for key, tensor in state.items():
        tensor.copy_(copies[key])
    saving = checkpoint.save(state, tmp_path / name, wait=False, stage_bytes=stage_bytes)
    for tensor in state.values():
        tensor.zero_()
    saving.wait()
    assert (tmp_path / name).read_bytes() == expected


def test_a_stager_copies_a_state_of_the_gpu(tmp_path):
    import tensorferry.dcp
    import torch.distributed.checkpoint as dcp

    stager = tensorferry.dcp.Stager()
    writer = tensorferry.dcp.Writer(tmp_path / "checkpoint")
    for round_number in range(2):
        state = tensors() | {"turned": torch.randn(300, 500, device="cuda").t()}
        copies = {key: tensor.clone() for key, tensor in state.items()}
        saving = dcp.async_save(state, storage_writer=writer, async_stager=stager)
        for tensor in state.values():
            tensor.zero_()
        saving.result()
        dcp.load(state, storage_reader=tensorferry.dcp.Reader(tmp_path / "checkpoint"))
        assert_same(state, copies)
        assert stager.stats()["buffer_bytes_used"] == 0, round_number
    stager.close()
