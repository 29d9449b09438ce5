"""`tensorferry checkpoint`, on files that torch, safetensors and tensorferry have made."""

import contextlib
import json
import os
import pickle
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from ferry_program import BUILD, PROGRAM, WITH_PACKAGE
from warm_python import WARM_PYTHON

pytest.importorskip("torch")
pytest.importorskip("safetensors")

FILES = Path(__file__).parent / "checkpoint_files.py"
TENSORS = 17


def run_python(*words):
    done = subprocess.run(
        [*WARM_PYTHON, *map(str, words)], env=WITH_PACKAGE, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with checkpoints of all formats, for reading."""
    if not PROGRAM.is_file():
        pytest.skip(f"no {PROGRAM}: run `make` first")
    place = tmp_path_factory.mktemp("checkpoints")
    run_python(FILES, place)
    return place


FORMATS = [
    "model.safetensors",
    "plain.safetensors",
    "set",
    "model.pt",
    "torch_set",
    "theirs",
    "ours",
]


@pytest.fixture(scope="module")
def shown(made):
    """What inspect --json says of checkpoints, by their names."""
    done = subprocess.run(
        [PROGRAM, "checkpoint", "inspect", "--json", *FORMATS],
        cwd=made,
        env=WITH_PACKAGE,
        capture_output=True,
        text=True,
        check=True,
    )
    return {one["path"]: one for one in json.loads(done.stdout)["checkpoints"]}


@pytest.fixture
def without_torch(tmp_path):
    """A path for Python on which importing torch fails."""
    (tmp_path / "no_torch").mkdir()
    (tmp_path / "no_torch/torch.py").write_text("raise ImportError('torch was imported')")
    return f"{tmp_path}/no_torch:{BUILD}/python"


def sparse(path, tensor_bytes):
    """A safetensors file with one large tensor that takes no space."""
    row = {"dtype": "U8", "shape": [tensor_bytes], "data_offsets": [0, tensor_bytes]}
    header = json.dumps({"weights": row}).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + tensor_bytes)
    return path


def flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_inspect_and_verify_of_files_do_not_wait_for_torch(ferry, made, without_torch):
    files = [made / name for name in ("model.safetensors", "set", "model.pt")]
    said = ferry("checkpoint", "inspect", *files, PYTHONPATH=without_torch).stdout
    line = r"^model\.bf16 +BF16 +33 × 17 +1\.1 KiB +"
    assert len(re.findall(line + "xxh3 [0-9a-f]{16}$", said, re.MULTILINE)) == 2
    assert len(re.findall(line + "crc32 [0-9a-f]{8}$", said, re.MULTILINE)) == 1
    assert said.count("17 tensors, ") == 3
    said = ferry("checkpoint", "verify", *files, PYTHONPATH=without_torch).stdout
    assert len(re.findall(r": sound: .* match their checksums", said)) == 3


def test_all_formats_show_the_same_tensors(shown):
    shown = list(shown.values())
    formats = [one["format"] for one in shown]
    assert formats == ["safetensors"] * 3 + ["torch"] * 2 + ["dcp"] * 2
    facts = [
        sorted((t["name"], t["dtype"], t["shape"], t["bytes"]) for t in one["tensors"])
        for one in shown
    ]
    assert len(facts[0]) == TENSORS and all(fact == facts[0] for fact in facts)
    assert ["model.scalar", "F32", [], 4] in map(list, facts[0])
    assert all(one["bytes"] == sum(row[3] for row in facts[0]) for one in shown)


def test_what_is_no_tensor_is_named(ferry, made):
    said = ferry("checkpoint", "inspect", made / "training.pt").stdout
    assert "model.w" in said and "optimizer.state.0.m" in said
    assert "2 objects: step (int), betas (tuple)" in said
    refused = ferry("checkpoint", "convert", made / "training.pt", "t.safetensors", code=2).stderr
    assert "step (int), betas (tuple)" in refused and "--without-objects" in refused
    assert not os.listdir(ferry.place)
    said = ferry(
        "checkpoint", "convert", made / "training.pt", "t.safetensors", "--without-objects"
    ).stdout
    assert "Left out: step (int), betas (tuple)" in said
    said = json.loads(ferry("checkpoint", "inspect", "--json", "t.safetensors").stdout)
    names = [tensor["name"] for tensor in said["checkpoints"][0]["tensors"]]
    assert sorted(names) == ["model.w", "optimizer.state.0.m"]


def test_conversions_keep_every_bit(ferry, made):
    """By the program, and then in one process, which saves the time to import torch."""
    ferry("checkpoint", "convert", made / "model.pt", "a.safetensors")
    assert "17 tensors" in ferry("checkpoint", "convert", made / "set", "b").stdout
    program = """if True:
        import sys
        from pathlib import Path
        sys.path.insert(0, sys.argv.pop(1))
        from checkpoint_files import check
        from tensorferry.inspection import main
        first, sys.argv[1:] = sys.argv[1:3], sys.argv[3:]
        for target in first:
            check(Path(target))
        for source, target in zip(sys.argv[1::2], sys.argv[2::2]):
            assert main(["convert", source, target]) == 0, (source, target)
            check(Path(target))
            assert main(["verify", target]) == 0
    """
    chain = [made / "theirs", "c.pt", "d", "e.pt", "f.safetensors", "g.safetensors", "h.pt"]
    chain = [ferry.place / name for name in chain]
    pairs = [*zip(chain, chain[1:]), (ferry.place / "b", ferry.place / "i.safetensors")]
    first = ferry.place / "a.safetensors", ferry.place / "b"
    words = [name for pair in pairs for name in pair]
    done = run_python("-c", program, FILES.parent, *first, *words)
    assert done.stdout.count(": sound: ") == len(pairs)
    same = [(ferry.place / name).read_bytes() for name in ("f.safetensors", "g.safetensors")]
    assert same[0] == same[1]


def test_the_parts_of_a_sharded_tensor_come_together(tmp_path):
    """Columns of two files, and rows that are cut within a window."""
    program = """if True:
        import sys, torch
        from tensorferry.inspection.gathering import source_of
        from tensorferry.inspection.tensors import StoredBox, Tensor
        from tensorferry.inspection.windows import Stream
        whole = torch.arange(3000 * 2000, dtype=torch.int32).view(3000, 2000)
        boxes = []
        for begin, end in ((0, 700), (700, 2000)):
            path = f"{sys.argv[1]}/{begin}"
            part = whole[:, begin:end].contiguous()
            open(path, "wb").write(b"head" + part.numpy().tobytes())
            boxes.append(StoredBox(path, 4, (0, begin), tuple(part.shape), part.stride()))
        columns = Tensor("t", "I32", (3000, 2000), tuple(boxes), None)
        assert columns.stretches() is None
        stream = Stream([source_of(columns), source_of(columns)])
        for _ in range(2):
            taken = b"".join(stream.take(n) for n in (1, 20_000_003, whole.nbytes - 20_000_004))
            assert taken == whole.numpy().tobytes()
    """
    run_python("-c", program, tmp_path)


def test_damage_is_named_and_ends_with_1(ferry, made, shown):
    """A flipped bit in one tensor of each format."""
    for name in [*DAMAGED, "theirs"]:
        copy = shutil.copytree if (made / name).is_dir() else shutil.copy
        copy(made / name, ferry.place / name)
    places = {}
    for name in DAMAGED:
        (tensor,) = [one for one in shown[name]["tensors"] if one["name"] == "model.large"]
        (places[name],) = tensor["places"]
        flip(ferry.place / places[name]["path"], places[name]["offset"] + 20_000_000)
    said = ferry("checkpoint", "verify", *DAMAGED, "theirs", code=1).stdout
    assert said.count(": DAMAGED: 1 place\n") == len(DAMAGED)
    line = r"^  model\.large: [\w./-]+, offset \d+, length \d+: .* checksum is wrong$"
    assert len(re.findall(line, said, re.MULTILINE)) == len(DAMAGED)
    assert "theirs: sound" in said
    said = json.loads(ferry("checkpoint", "verify", "--json", "set", code=1).stdout)
    (verdict,) = said["checkpoints"]
    assert not verdict["sound"] and verdict["read_bytes"] == shown["set"]["bytes"]
    # The first 16 MiB of the tensor are sound.
    (damage,) = verdict["damages"]
    assert damage["offset"] == places["set"]["offset"] + (16 << 20)


DAMAGED = ["model.safetensors", "set", "model.pt", "ours"]


def test_only_what_has_checksums_is_called_sound(ferry, made):
    said = ferry("checkpoint", "verify", made / "plain.safetensors").stdout
    assert "has no checksums" in said and "sound" not in said
    header = (made / "model.safetensors").read_bytes()
    at = header.index(b"tensorferry.xxh3")
    digits = at + re.search(rb"[0-9a-f]{16}", header[at:]).start()
    (ferry.place / "m.safetensors").write_bytes(header[:digits] + b"g" + header[digits + 1 :])
    said = ferry("checkpoint", "verify", "m.safetensors", code=1).stdout
    assert "its checksums (tensorferry.xxh3) are not those of its tensors" in said


def test_an_answer_that_cannot_be_written_is_a_failure(ferry, made):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [PROGRAM, "checkpoint", "inspect", made / "model.safetensors"],
            env=ferry.env,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert done.stderr == "tensorferry: could not write all of the output\n"


def test_compare_says_what_differs_where_and_by_how_much(ferry, made):
    same = ferry("checkpoint", "compare", made / "model.safetensors", made / "set").stdout
    assert same.startswith("Equal, bit by bit: 17 tensors")
    files = made / "plain.safetensors", made / "changed.safetensors"
    said = ferry("checkpoint", "compare", *files, code=1).stdout
    assert re.search(r"^model\.large .* 2 of 5324800 +0\.5 +\[700, 3000\]$", said, re.MULTILINE)
    assert "6 of 18 tensors differ; 12 are equal" in said
    found = json.loads(ferry("checkpoint", "compare", "--json", *files, code=1).stdout)
    by_name = {one["name"]: one for one in found["different"]}
    assert {name: one["what"] for name, one in by_name.items()} == {
        "model.bool": "only before",
        "new": "only after",
        "model.i64": "dtype",
        "model.f16": "shape",
        "model.large": "values",
        "model.nan": "values",
    }
    # A NaN equals itself; -0 and 0 differ by nothing.
    nan = by_name["model.nan"]
    assert (nan["elements"], nan["largest"], nan["at"], nan["nan"]) == (1, 0, [1], 0)
    assert not found["equal"] and found["tensors"] == 18


def zip_with(path, data_pkl):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data_pkl)
        archive.writestr("archive/byteorder", "little")


def hostile_files(made, place):
    """Files that are wrong on purpose."""
    whole = (made / "model.pt").read_bytes()
    good = (made / "model.safetensors").read_bytes()
    endless = []
    endless.append(endless)
    wide = []
    for _ in range(60):
        wide = [wide, wide]
    files = {
        "empty.pt": b"",
        "text.bin": b"no checkpoint at all",
        "cut.pt": whole[: len(whole) // 2],
        "cut.safetensors": good[:-1],
        "long.safetensors": struct.pack("<Q", 1 << 60) + b"{}",
        "names.safetensors": struct.pack("<Q", 20) + b'{"a\x1b[2J": {"dtype": 1',
        "lost.safetensors.index.json": b'{"weight_map": {"a": "gone.safetensors"}}',
        "outside.safetensors.index.json": b'{"weight_map": {"a": "../../etc/passwd"}}',
        "outside.bin.index.json": b'{"weight_map": {"a": "../../etc/passwd"}}',
        "deep.bin.index.json": b"[" * 100_000,
    }
    for name, data in files.items():
        (place / name).write_bytes(data)
    zip_with(place / "endless.pt", pickle.dumps(endless))
    zip_with(place / "wide.pt", pickle.dumps(wide))
    zip_with(place / "bad_pickle.pt", b"\x80\x02}q\x00(X\x01")
    # What would run if it were unpickled.
    zip_with(place / "runs.pt", b"cposix\nsystem\n(S'touch ran'\ntR.")
    (place / "dcp").mkdir()
    (place / "dcp/.metadata").write_bytes(b"cposix\nsystem\n(S'touch ran'\ntR.")
    (place / "nothing").mkdir()
    os.mkfifo(place / "pipe.pt")
    return [
        *files,
        "endless.pt",
        "wide.pt",
        "bad_pickle.pt",
        "runs.pt",
        "dcp",
        "nothing",
        "pipe.pt",
    ]


def test_hostile_files_are_refused_in_one_line_and_run_nothing(ferry, made):
    names = hostile_files(made, ferry.place)
    names += [made / "old.pt", made / "module.pt"]
    program = """if True:
        import sys, warnings
        from tensorferry.inspection import main
        for path in sys.argv[1:]:
            print(main(["inspect", path]), path, file=sys.stderr)
    """
    done = subprocess.run(
        [*WARM_PYTHON, "-c", program, *names],
        cwd=ferry.place,
        env=ferry.env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 2 * len(names), done.stderr
    for message, outcome in zip(lines[::2], lines[1::2]):
        assert message.startswith("tensorferry checkpoint inspect: "), message
        assert outcome.split()[0] in "12" and "\x1b" not in message
        assert Path(outcome.split(" ", 1)[1]).name in message, message
    assert "torch.load and save it again" in done.stderr
    assert "state_dict()" in done.stderr
    assert not (ferry.place / "ran").exists()
    assert "damaged" in ferry("checkpoint", "verify", "cut.pt", code=1).stdout.lower()


def test_wrong_usage_is_told_from_failure(ferry, made):
    source = made / "model.safetensors"
    assert "does not exist" in ferry("checkpoint", "inspect", "gone", code=2).stderr
    assert "did you mean verify?" in ferry("checkpoint", "verfy", source, code=2).stderr
    assert "--to" in ferry("checkpoint", "convert", source, "a.onnx", code=2).stderr
    assert "is the source" in ferry("checkpoint", "convert", source, source, code=2).stderr
    assert "is a folder" in ferry("checkpoint", "convert", source, ".", "--to=torch", code=2).stderr
    refused = ferry("checkpoint", "convert", source, "no/such/place.safetensors", code=1).stderr
    assert "no/such" in refused and "Traceback" not in refused
    assert not os.listdir(ferry.place)


def test_converting_needs_little_memory(tmp_path):
    """Of a file that is several times as large as what conversions may take."""
    source = sparse(tmp_path / "large.safetensors", 768 << 20)
    program = """if True:
        import os, resource, shutil, sys
        import torch.distributed.checkpoint
        from tensorferry.inspection import main
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for name in ("small.safetensors", "small.pt", "small"):
            assert main(["convert", sys.argv[1], name]) == 0
            shutil.rmtree(name) if os.path.isdir(name) else os.unlink(name)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert after - before < 256 << 10, f"{(after - before) >> 10} MiB"
    """
    done = subprocess.run(
        [sys.executable, "-c", program, source],
        cwd=tmp_path,
        env=WITH_PACKAGE,
        capture_output=True,
        text=True,
    )
    source.unlink()
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("target", ["model.safetensors", "model.pt", "folder"])
def test_ctrl_c_leaves_the_old_file_and_nothing_else(ferry, target):
    source = sparse(ferry.place / "large.safetensors", 4 << 30)
    place = ferry.place / "place"
    place.mkdir()
    old = target != "folder"
    if old:
        (place / target).write_bytes(b"old")
    running = ferry.start("checkpoint", "convert", source, place / target)
    began = time.monotonic()
    while running.poll() is None and not new_files(place, target):
        assert time.monotonic() - began < 120
        time.sleep(0.005)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=120)
    assert (running.returncode, said) == (1, "tensorferry checkpoint convert: interrupted\n")
    assert os.listdir(place) == ([target] if old else [])
    assert not old or (place / target).read_bytes() == b"old"


def new_files(place, target):
    """What a conversion is writing."""
    inside = os.listdir(place / target) if os.path.isdir(place / target) else []
    return [name for name in os.listdir(place) if name != target] + inside


def test_a_terminal_shows_a_bar_and_a_pipe_none(ferry, made):
    main, terminal = pty.openpty()
    done = subprocess.run(
        [PROGRAM, "checkpoint", "verify", made / "model.safetensors"],
        env=ferry.env,
        stdout=subprocess.PIPE,
        stderr=terminal,
        text=True,
    )
    os.close(terminal)
    seen = ""
    with contextlib.suppress(OSError), open(main, "rb", buffering=0) as shown:  # EIO at the end
        while part := shown.read(1 << 16):
            seen += part.decode()
    assert done.returncode == 0 and "sound" in done.stdout
    assert re.search(r"Verifying: 100%\|.*\| 20\.\d MiB/20\.\d MiB \[00:", seen), seen
    assert ferry("checkpoint", "verify", made / "model.safetensors").stderr == ""
