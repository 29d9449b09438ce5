"""Kinds of numbers that safetensors 0.8 has and older programs do not: F8_E8M0, and F4 in pairs."""

import pytest

torch = pytest.importorskip("torch")
theirs = pytest.importorskip("safetensors.torch")

import torch.distributed.checkpoint as dcp
from tensorferry.dcp import Reader, Writer, verify
from tensorferry.inspection.dcp_folder import open_dcp_folder, open_safetensors_folder

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

KINDS = {"F8_E8M0": torch.float8_e8m0fnu, "F4": torch.float4_e2m1fn_x2}


def state():
    make = torch.Generator().manual_seed(4)
    raw = torch.randint(0, 256, (96, 50), dtype=torch.uint8, generator=make)
    return {kind: raw.clone().view(dtype) for kind, dtype in KINDS.items()} | {"plain": raw}


def blank():
    return {
        name: torch.zeros_like(t.view(torch.uint8)).view(t.dtype) for name, t in state().items()
    }


def assert_same(found):
    for name, tensor in state().items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("layout", ["torch", "huggingface"])
def test_what_is_saved_is_loaded(tmp_path, layout):
    dcp.save(state(), storage_writer=Writer(tmp_path, layout=layout))
    found = blank()
    dcp.load(found, storage_reader=Reader(tmp_path))
    assert_same(found)
    verify(tmp_path)


def test_safetensors_reads_what_is_saved_for_hugging_face(tmp_path):
    dcp.save(state(), storage_writer=Writer(tmp_path, layout="huggingface"))
    [path] = tmp_path.glob("*.safetensors")
    assert_same(theirs.load_file(path))
    with theirs.safe_open(path, "pt") as file:
        assert {name: file.get_slice(name).get_dtype() for name in KINDS} == {k: k for k in KINDS}
        assert file.get_slice("F4").get_shape() == [96, 100]


def test_what_safetensors_has_saved_is_loaded(tmp_path):
    theirs.save_file(state(), tmp_path / "model.safetensors")
    found = blank()
    dcp.load(found, storage_reader=Reader(tmp_path))
    assert_same(found)


def test_a_pair_without_a_size_is_refused(tmp_path):
    pair = torch.zeros((), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    with pytest.raises(dcp.api.CheckpointException, match="float4.*safetensors files do not have"):
        dcp.save({"pair": pair}, storage_writer=Writer(tmp_path, layout="huggingface"))


@pytest.mark.parametrize("layout", ["torch", "huggingface"])
def test_inspecting_counts_the_elements_of_pairs(tmp_path, layout):
    dcp.save(state(), storage_writer=Writer(tmp_path, layout=layout))
    opened = (open_dcp_folder if layout == "torch" else open_safetensors_folder)(str(tmp_path))
    found = {tensor.name: tensor for tensor in opened.tensors}
    for name, tensor in state().items():
        assert found[name].bytes == tensor.nbytes
        (stretch,) = found[name].stretches()
        with open(stretch.path, "rb") as file:
            file.seek(stretch.offset)
            assert file.read(stretch.bytes) == tensor.view(torch.uint8).numpy().tobytes()
    assert found["F4"].shape == (96, 100)
