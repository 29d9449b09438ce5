"""Checkpoints of several ranks: torch's writer and reader and ours, and other numbers of ranks."""

import json
import os
import subprocess

import pytest

torch = pytest.importorskip("torch")

import tensorferry
import torch.distributed.checkpoint as dcp
from dcp_job import full_tensors
from tensorferry import _core
from warm_python import WARM_PYTHON

JOB = os.path.join(os.path.dirname(__file__), "dcp_job.py")


@pytest.fixture(scope="module")
def run():
    """Runs a function of dcp_job.py on a number of ranks."""
    job = subprocess.Popen(
        [*WARM_PYTHON, JOB],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
    )

    def run(ranks, function, folder, *arguments):
        print(json.dumps([ranks, function, str(folder), *arguments]), file=job.stdin, flush=True)
        assert json.loads(job.stdout.readline()) == [0] * ranks

    yield run
    job.stdin.close()
    assert job.wait(timeout=60) == 0


def data_files(folder):
    return sorted(name for name in os.listdir(folder) if name.endswith(".distcp"))


@pytest.mark.parametrize("writer, reader", [("tensorferry", "torch"), ("torch", "tensorferry")])
def test_ranks_load_what_torch_saved_and_the_other_way_round(run, tmp_path, writer, reader):
    run(2, "save", tmp_path, writer, 3)
    run(2, "load", tmp_path, reader, 3)


def test_another_number_of_ranks_loads(run, tmp_path):
    run(2, "save", tmp_path, "tensorferry", 4)
    run(4, "load", tmp_path, "tensorferry", 4)
    run(4, "save", tmp_path, "tensorferry", 5)
    assert len(data_files(tmp_path)) == 4  # those of the first save are gone
    run(1, "load", tmp_path, "tensorferry", 5)


def test_async_save_of_ranks(run, tmp_path):
    run(2, "asynchronous", tmp_path)
    assert len(data_files(tmp_path)) == 2


def test_ranks_that_save_without_each_other(run, tmp_path):
    run(2, "alone", tmp_path)
    assert len(data_files(tmp_path)) == 2


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_rank_that_fails_leaves_no_new_file_of_hugging_face(run, tmp_path):
    run(2, "fail", tmp_path, "huggingface")
    assert len(os.listdir(tmp_path)) == 2
    loaded = torch.zeros(())
    dcp.load({"scalar": loaded}, storage_reader=tensorferry.dcp.Reader(tmp_path), no_dist=True)
    assert loaded == 1


def test_what_others_have_written_when_a_rank_fails_goes_with_the_next_save(run, tmp_path):
    run(2, "fail", tmp_path, "torch")
    old = data_files(tmp_path)
    assert len(old) == 3 and sum(name.startswith("__1_") for name in old) == 1
    run(2, "save", tmp_path, "tensorferry", 2)
    assert len(data_files(tmp_path)) == 2 and not set(old) & set(data_files(tmp_path))


def test_ranks_write_whole_tensors_for_hugging_face(run, tmp_path):
    from safetensors.torch import load_file

    run(2, "save_huggingface", tmp_path, 6)
    with open(tmp_path / "model.safetensors.index.json") as file:
        index = json.load(file)
    files = set(index["weight_map"].values())
    assert sorted([*files, "model.safetensors.index.json"]) == sorted(os.listdir(tmp_path))
    loaded = {}
    for name in files:
        loaded |= load_file(tmp_path / name)
    expected = full_tensors(6)
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, loaded[name]), name
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in loaded.values())
    for name in files:  # with checksums, also of what ranks have in common
        save_alone(tmp_path / name, tmp_path / "alone")
        assert (tmp_path / name).read_bytes() == (tmp_path / "alone").read_bytes()


def save_alone(saved, path):
    """Writes the tensors of a file with the saver of safetensors files, in their given order."""
    data = saved.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    given = json.loads(header["__metadata__"]["tensorferry.xxh3"])
    tensors = full_tensors(6)
    rows = [(key, header[key]["dtype"], header[key]["shape"], tensors[key]) for key in given]
    with tensorferry.Handle() as handle:
        _core.save_safetensors(handle, path, rows, metadata={"format": "pt"})


def test_shards_of_hugging_face_files_are_loaded(run, tmp_path):
    run(2, "load_huggingface", tmp_path, 7)
