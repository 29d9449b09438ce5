"""tensorferry.safetensors when something goes wrong, and what it has beyond safetensors."""

import errno
import json
import os
import random
import signal
import subprocess
import sys

import pytest

pytest.importorskip("safetensors")
torch = pytest.importorskip("torch")

import safetensors.torch
from in_threads import in_threads
from loop_mount import loop_mount
from programs import check_python
from tensorferry.safetensors import SafetensorError, safe_open
from tensorferry.safetensors.torch import load_file, load_model, save_file, save_model
from warm_python import WARM_PYTHON


@pytest.fixture
def tensors():
    return {f"t{i}": torch.full((1 << 18,), float(i)) for i in range(8)}


def same(loaded, tensors):
    return loaded.keys() == tensors.keys() and all(
        torch.equal(loaded[name], tensor) for name, tensor in tensors.items()
    )


def test_checksums_are_hidden_and_verified(tmp_path, tensors):
    save_file(tensors, tmp_path / "x", {"my": "own"}, checksums=True)
    assert same(load_file(tmp_path / "x", verify=True), tensors)
    with safe_open(tmp_path / "x", "pt", verify=True) as file:
        assert file.metadata() == {"my": "own"}
        assert torch.equal(file.get_tensor("t3"), tensors["t3"])
        assert torch.equal(file.get_slice("t3")[5:9], tensors["t3"][5:9])
    assert same(safetensors.torch.load_file(tmp_path / "x"), tensors)


@pytest.mark.parametrize("seed", range(20))
def test_a_flipped_bit_is_found_with_its_tensor(tmp_path, tensors, seed):
    save_file(tensors, tmp_path / "x", checksums=True)
    with safe_open(tmp_path / "x", "pt") as file:
        names = file.offset_keys()
    size = (tmp_path / "x").stat().st_size
    begin = size - (8 << 20)
    place = random.Random(seed).randrange(begin, size)
    with open(tmp_path / "x", "r+b") as raw:
        raw.seek(place)
        byte = raw.read(1)[0]
        raw.seek(place)
        raw.write(bytes([byte ^ 1 << seed % 8]))
    damaged = names[(place - begin) >> 20]
    with pytest.raises(SafetensorError, match=rf"{damaged}\b"):
        load_file(tmp_path / "x", verify=True)
    with safe_open(tmp_path / "x", "pt", verify=True) as file:
        for name in names:
            if name == damaged:
                with pytest.raises(SafetensorError, match=rf"{damaged}\b"):
                    file.get_tensor(name)
                with pytest.raises(SafetensorError, match=rf"{damaged}\b"):
                    file.get_slice(name)[:1]
            else:
                file.get_tensor(name)
    assert load_file(tmp_path / "x").keys() == tensors.keys()


def test_a_file_without_checksums_cannot_be_verified(tmp_path, tensors):
    save_file(tensors, tmp_path / "x")
    with pytest.raises(SafetensorError, match="has no checksums to verify"):
        load_file(tmp_path / "x", verify=True)


def test_models_are_verified_too(tmp_path):
    model, copy = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    save_model(model, tmp_path / "x", checksums=True)
    load_model(copy, tmp_path / "x", verify=True)
    assert torch.equal(model.weight, copy.weight)


def test_a_set_of_files_is_opened_by_its_index(tmp_path, tensors):
    names = list(tensors)
    for i in range(2):
        save_file({name: tensors[name] for name in names[i::2]}, tmp_path / f"{i}.safetensors")
    weights = {name: f"{i % 2}.safetensors" for i, name in enumerate(names)}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    assert same(load_file(index), tensors)
    with safe_open(index, "pt") as file:
        assert torch.equal(file.get_slice("t5")[3:], tensors["t5"][3:])


@pytest.mark.parametrize("function", ["load", "save"])
def test_progress_reaches_the_end(tmp_path, tensors, function):
    save_file(tensors, tmp_path / "x")
    reports = []
    told = lambda done, total: reports.append((done, total))  # noqa: E731
    if function == "load":
        load_file(tmp_path / "x", progress=told)
    else:
        save_file(tensors, tmp_path / "x", progress=told)
    assert reports == sorted(reports)
    assert all(done <= total for done, total in reports)
    if function == "load":
        assert reports[-1] == (8 << 20, 8 << 20)


def test_a_bar_is_printed(tmp_path, tensors, capsys):
    save_file(tensors, tmp_path / "x")
    load_file(tmp_path / "x", progress=True)
    assert "loading [####" in capsys.readouterr().err
    with pytest.raises(TypeError, match="progress must be"):
        load_file(tmp_path / "x", progress=3)


class GiveUp(Exception):
    pass


def give_up(done, total):
    raise GiveUp


def test_what_progress_raises_ends_a_load(tmp_path, tensors):
    save_file(tensors, tmp_path / "x")
    with pytest.raises(GiveUp):
        load_file(tmp_path / "x", progress=give_up)
    assert same(load_file(tmp_path / "x"), tensors)


def test_a_file_that_is_cut_while_it_is_open_is_an_error(tmp_path, tensors):
    save_file(tensors, tmp_path / "x")
    with safe_open(tmp_path / "x", "pt") as file:
        os.truncate(tmp_path / "x", 1 << 20)
        with pytest.raises(SafetensorError, match="the file ends"):
            file.get_tensors()
        with pytest.raises(SafetensorError, match="the file ends"):
            file.get_tensor("t7")


def test_many_threads_read_one_file(tmp_path, tensors):
    save_file(tensors, tmp_path / "x")
    with safe_open(tmp_path / "x", "pt") as file:

        def read(i):
            for name in tensors:
                assert torch.equal(file.get_tensor(name), tensors[name])
                assert torch.equal(file.get_slice(name)[i : i + 9], tensors[name][i : i + 9])
            assert same(load_file(tmp_path / "x"), tensors)

        in_threads(8, read)


def test_many_threads_save_one_file(tmp_path):
    def save(i):
        for _ in range(5):
            save_file({"a": torch.full((1 << 16,), float(i))}, tmp_path / "x")
            loaded = load_file(tmp_path / "x")["a"]
            assert torch.equal(loaded, torch.full((1 << 16,), loaded[0].item()))

    in_threads(4, save)
    assert os.listdir(tmp_path) == ["x"]


def test_a_forked_child_loads_and_saves(tmp_path, tensors):
    check_python(
        """
import os, sys, torch
from tensorferry.safetensors import safe_open
from tensorferry.safetensors.torch import load_file, save_file
torch.set_num_threads(1)
tensors = {f"t{i}": torch.full((1 << 18,), float(i)) for i in range(4)}
save_file(tensors, sys.argv[1])
loaded = load_file(sys.argv[1])
file = safe_open(sys.argv[1], "pt")
part = file.get_slice("t2")
for _ in range(3):
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        continue
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    loaded["t1"].zero_()
    del loaded["t2"]
    assert torch.equal(file.get_tensor("t1"), tensors["t1"])
    assert torch.equal(part[1:5], tensors["t2"][1:5])
    again = load_file(sys.argv[1])
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
    save_file(again, sys.argv[1] + ".child")
    os._exit(0)
assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
assert os.path.getsize(sys.argv[1] + ".child") == os.path.getsize(sys.argv[1])
""",
        tmp_path / "x",
        python=WARM_PYTHON,
    )


def test_ctrl_c_ends_a_save_and_leaves_the_old_file(tmp_path):
    save_file({"old": torch.ones(3)}, tmp_path / "x")
    before = (tmp_path / "x").read_bytes()
    program = subprocess.Popen(
        [
            sys.executable,
            "-c",
            """
import sys, torch
from tensorferry.safetensors.torch import save_file
tensors = {f"t{i}": torch.empty(16 << 20) for i in range(8)}
while True:
    save_file(tensors, sys.argv[1], progress=lambda done, total: print(done, flush=True))
    print("saved", flush=True)
""",
            tmp_path / "x",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    said = program.stdout.readline()
    program.send_signal(signal.SIGINT)
    rest, error = program.communicate(timeout=120)
    assert "KeyboardInterrupt" in error, error
    assert os.listdir(tmp_path) == ["x"]
    if "saved" not in said + rest:
        assert (tmp_path / "x").read_bytes() == before


def test_a_full_drive_leaves_the_old_file(tmp_path):
    with loop_mount(tmp_path, size="16M") as folder:
        save_file({"old": torch.ones(1 << 20)}, folder / "x")
        listed = sorted(os.listdir(folder))
        for _ in range(2):
            with pytest.raises(SafetensorError, match="No space left on device") as caught:
                save_file({f"t{i}": torch.ones(1 << 20) for i in range(5)}, folder / "x")
            assert caught.value.__cause__.errno == errno.ENOSPC
            assert sorted(os.listdir(folder)) == listed
            assert torch.equal(load_file(folder / "x")["old"], torch.ones(1 << 20))
        save_file({"new": torch.ones(5)}, folder / "x")
        assert load_file(folder / "x").keys() == {"new"}


def test_a_symbolic_link_stays(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "x")
    (tmp_path / "link").symlink_to("x")
    save_file({"a": torch.zeros(2)}, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert torch.equal(load_file(tmp_path / "x")["a"], torch.zeros(2))
