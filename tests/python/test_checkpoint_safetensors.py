"""tensorferry.checkpoint writes and reads safetensors files, with checksums."""

import errno
import io
import json
import logging
import os
import random

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp
from checkpoint_objects import PLAIN_DTYPES, of_dtype
from tensorferry import checkpoint
from tensorferry.dcp import Reader
from tensorferry.safetensors import SafetensorError
from tensorferry.safetensors.serialization import CODES
from tensorferry.safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils.serialization import config


def state():
    torch.manual_seed(1)
    return {
        "weight": torch.randn(300, 700),
        "bias": torch.randn(7, dtype=torch.bfloat16),
        "turned": torch.randn(30, 40).t(),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 3),
        "conjugate": torch.randn(5, dtype=torch.complex64).conj(),
        "parameter": torch.nn.Parameter(torch.randn(5)),
    }


def header_of(file):
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return length, json.loads(data[8 : 8 + length])


def assert_same(found, saved):
    assert found.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(found[name], tensor.detach()) and found[name].dtype == tensor.dtype


def test_what_is_saved_comes_back(tmp_path):
    file = tmp_path / "model.safetensors"
    checkpoint.save(state(), file)
    assert_same(checkpoint.load(file), state())
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_safetensors_itself_reads_the_file(tmp_path):
    theirs = pytest.importorskip("safetensors.torch")
    checkpoint.save(state(), tmp_path / "model.safetensors")
    assert_same(theirs.load_file(tmp_path / "model.safetensors"), state())


def test_a_file_of_safetensors_itself_is_read_though_it_has_no_checksums(tmp_path):
    theirs = pytest.importorskip("safetensors.torch")
    saved = {"weight": torch.randn(1000)}
    theirs.save_file(saved, tmp_path / "model.safetensors")
    assert_same(checkpoint.load(tmp_path / "model.safetensors"), saved)


def test_tensors_begin_on_a_page_and_have_checksums(tmp_path):
    file = tmp_path / "model.safetensors"
    checkpoint.save(state(), file)
    length, header = header_of(file)
    assert (8 + length) % 4096 == 0
    assert header["__metadata__"]["format"] == "pt"
    assert len(header["__metadata__"]) == 2  # the other one has the checksums


@pytest.mark.parametrize("dtype", PLAIN_DTYPES, ids=str)
def test_every_dtype_that_safetensors_has(tmp_path, dtype):
    file = tmp_path / "model.safetensors"
    saved = {"t": of_dtype(dtype)}
    if str(dtype).removeprefix("torch.") not in CODES:
        with pytest.raises(TypeError, match=f"'t' holds a tensor of {dtype}"):
            checkpoint.save(saved, file)
        return
    checkpoint.save(saved, file)
    loaded = checkpoint.load(file)["t"]
    assert loaded.dtype == dtype
    assert torch.equal(loaded.view(torch.uint8), saved["t"].view(torch.uint8))


def test_format_goes_before_the_name(tmp_path):
    saved = {"weight": torch.ones(3)}
    checkpoint.save(saved, tmp_path / "model.bin", format="safetensors")
    assert (tmp_path / "model.bin").read_bytes()[8:9] == b"{"
    assert_same(checkpoint.load(tmp_path / "model.bin", format="safetensors"), saved)
    checkpoint.save(saved, tmp_path / "odd.safetensors", format="torch")
    assert_same(checkpoint.load(tmp_path / "odd.safetensors", format="torch"), saved)
    for use in (lambda **o: checkpoint.save(saved, tmp_path / "x", **o), checkpoint.load):
        with pytest.raises((ValueError, TypeError)):
            use(format="zip")


def test_a_format_that_is_not_there_is_refused_first(tmp_path):
    for call in (
        lambda: checkpoint.save([1], io.BytesIO(), format="pickle"),
        lambda: checkpoint.load(io.BytesIO(), format="pickle"),
        lambda: checkpoint.load(tmp_path / "model.pt", mmap=True, format="pickle"),
    ):
        with pytest.raises(ValueError, match="format is 'pickle'"):
            call()


def test_a_file_like_object_is_no_safetensors_file():
    file = io.BytesIO()
    with pytest.raises(TypeError, match="needs a path, not a BytesIO"):
        checkpoint.save({"weight": torch.ones(3)}, file, format="safetensors")
    assert not file.getvalue()
    with pytest.raises(TypeError, match="needs a path, not a BytesIO"):
        checkpoint.load(file, format="safetensors")


@pytest.mark.parametrize("by_setting", [True, False])
def test_mapping_goes_to_safetensors(tmp_path, caplog, by_setting):
    pytest.importorskip("safetensors.torch")
    file = tmp_path / "model.safetensors"
    checkpoint.save(state(), file)
    with caplog.at_level(logging.INFO, "tensorferry"), config.patch("load.mmap", by_setting):
        loaded = checkpoint.load(file, mmap=None if by_setting else True)
        assert_same(loaded, state())
    assert "with safetensors: mmap=True wants it mapped" in caplog.text
    with open("/proc/self/maps") as maps:
        assert str(file) in maps.read()


SHARED = torch.ones(10)
IMAGINARY = torch.tensor([1 + 2j]).conj().imag
REFUSED = {
    "this is a list": [torch.ones(3)],
    "this is a Tensor": torch.ones(3),
    "the key 3 is a int": {"a": torch.ones(1), 3: torch.ones(1)},
    "has half of a character": {"a\udcff": torch.ones(1)},
    "'optimizer' holds a dict": {"model": torch.ones(1), "optimizer": {"step": 3}},
    "'step' holds a int": {"step": 5},
    "'s' holds a tensor of torch.sparse_coo": {"s": torch.eye(3).to_sparse()},
    "'m' holds a tensor of the meta device": {"m": torch.empty(3, device="meta")},
    "'a' and 'b' share memory": {"a": SHARED, "b": SHARED[2:]},
}


@pytest.mark.parametrize("found", REFUSED)
def test_what_is_not_a_dict_of_tensors_is_refused_by_name(tmp_path, found):
    file = tmp_path / "model.safetensors"
    checkpoint.save({"old": torch.ones(3)}, file)
    with pytest.raises(TypeError, match=found) as caught:
        checkpoint.save(REFUSED[found], file)
    assert "format='torch'" in str(caught.value)
    assert_same(checkpoint.load(file), {"old": torch.ones(3)})
    assert os.listdir(tmp_path) == [file.name]


@pytest.mark.parametrize("stride", [2, 5])
def test_the_stride_of_a_single_element_does_not_matter(tmp_path, stride):
    file = tmp_path / "model.safetensors"
    saved = {"one": torch.arange(10.0).as_strided((1,), (stride,), 3), "imag": IMAGINARY}
    checkpoint.save(saved, file)
    assert_same(checkpoint.load(file), saved)
    checkpoint.save(saved, file, wait=False).wait()
    assert_same(checkpoint.load(file), saved)
    del saved["imag"]
    save_file(saved, file)
    assert_same(load_file(file), saved)


def test_a_map_location_that_is_no_device_is_refused(tmp_path):
    file = tmp_path / "model.safetensors"
    checkpoint.save({"t": torch.ones(3)}, file)
    assert checkpoint.load(file, map_location="meta")["t"].is_meta
    assert checkpoint.load(file, map_location=torch.device("cpu"))["t"].is_cpu
    with pytest.raises(TypeError, match="map_location is a dict"):
        checkpoint.load(file, map_location={"cuda:0": "cpu"})


def test_every_flipped_bit_in_a_tensor_is_reported_with_its_name(tmp_path):
    file = tmp_path / "model.safetensors"
    saved = {"first": torch.randn(5), "large": torch.randn(5 << 20), "odd": torch.ones(1)}
    checkpoint.save(saved, file)
    length, header = header_of(file)
    rng = random.Random(1)
    with open(file, "r+b") as out:
        for name in saved:
            begin, end = (8 + length + offset for offset in header[name]["data_offsets"])
            for at in [begin, end - 1, *(rng.randrange(begin, end) for _ in range(5))]:
                out.seek(at)
                byte = out.read(1)
                out.seek(at)
                out.write(bytes([byte[0] ^ 1 << rng.randrange(8)]))
                out.flush()
                with pytest.raises(OSError, match=f"'{name}'") as caught:
                    checkpoint.load(file)
                assert caught.value.errno == errno.EBADMSG
                assert caught.value.filename == str(file)
                assert begin <= caught.value.offset <= at
                checkpoint.load(file, verify=False)
                out.seek(at)
                out.write(byte)
                out.flush()
    assert_same(checkpoint.load(file), saved)


def drop_checksum(file, name):
    """Takes the checksum of a tensor out of a file."""
    length, header = header_of(file)
    metadata = header["__metadata__"]
    sums = json.loads(metadata["tensorferry.xxh3"])
    del sums[name]
    metadata["tensorferry.xxh3"] = json.dumps(sums)
    with open(file, "r+b") as changed:
        changed.seek(8)
        changed.write(json.dumps(header).encode().ljust(length)[:length])


def test_what_has_a_checksum_is_checked_though_other_tensors_have_none(tmp_path, caplog):
    file = tmp_path / "model.safetensors"
    saved = {name: torch.full((1000,), float(at)) for at, name in enumerate("abcd")}
    checkpoint.save(saved, file)
    with caplog.at_level(logging.INFO, "tensorferry"):
        assert_same(checkpoint.load(file), saved)
    assert caplog.text == ""
    drop_checksum(file, "b")
    assert_same(checkpoint.load(file), saved)
    assert "WARNING" in caplog.text
    assert "1 of 4 tensors have no checksum and are not checked: b" in caplog.text
    length, header = header_of(file)
    whole = file.read_bytes()
    for name in saved:
        at = 8 + length + header[name]["data_offsets"][0] + 7
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        if name == "b":
            assert not torch.equal(checkpoint.load(file)["b"], saved["b"])
            continue
        with pytest.raises(OSError, match=f"tensor '{name}'") as caught:
            checkpoint.load(file)
        assert caught.value.errno == errno.EBADMSG
    file.write_bytes(whole)
    with pytest.raises(SafetensorError, match="no checksum of tensor b: .*if_present"):
        load_file(file, verify=True)
    assert_same(load_file(file, verify="if_present"), saved)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_reader_of_dcp_checks_them_too(tmp_path, caplog):
    file = tmp_path / "model.safetensors"
    saved = {name: torch.full((1000,), float(at)) for at, name in enumerate("abc")}
    checkpoint.save(saved, file)
    drop_checksum(file, "a")
    data = bytearray(file.read_bytes())
    data[8 + header_of(file)[0] + 4000 + 7] ^= 1
    file.write_bytes(data)
    for name in "abc":
        state = {name: torch.zeros(1000)}
        if name == "b":
            with pytest.raises(CheckpointException, match="tensor 'b'.*checksum"):
                dcp.load(state, storage_reader=Reader(tmp_path))
        else:
            dcp.load(state, storage_reader=Reader(tmp_path))
            assert torch.equal(state[name], saved[name])
    assert "1 of 3 tensors have no checksum and are not checked: a" in caplog.text


def test_checksums_that_are_of_no_use_are_worth_a_warning(tmp_path, caplog):
    file = tmp_path / "model.safetensors"
    checkpoint.save({"weight": torch.ones(1000)}, file)
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b'{\\"weight\\":', b'{\\"wrongs\\":'))
    assert checkpoint.load(file)["weight"].sum() == 1000
    assert "not all tensors are checked: " in caplog.text and '"wrongs"' in caplog.text


def test_mapping_cannot_verify(tmp_path):
    pytest.importorskip("safetensors.torch")
    checkpoint.save(state(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="mapping=False"):
        load_file(tmp_path / "model.safetensors", mapping=True, verify=True)


def test_a_header_that_is_damaged_is_an_error_with_its_file(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\xff" * 100)
    with pytest.raises(OSError) as caught:
        checkpoint.load(file)
    assert caught.value.errno == errno.EBADMSG and caught.value.filename == str(file)


def test_progress_that_raises_leaves_the_old_file(tmp_path):
    file = tmp_path / "model.safetensors"
    checkpoint.save({"old": torch.ones(3)}, file)

    def stop(done, total):
        raise InterruptedError("enough")

    with pytest.raises(InterruptedError):
        checkpoint.save({"new": torch.ones(10 << 20)}, file, progress=stop)
    assert_same(checkpoint.load(file), {"old": torch.ones(3)})
    assert os.listdir(tmp_path) == [file.name]
