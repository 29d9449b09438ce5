"""tensorferry.sweep, as a script for DeepSpeed's aio_bench_perf_sweep.py uses it, and what it
leaves, as DeepSpeed's parse_aio_stats.py reads it."""

import argparse
import doctest
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sweep = pytest.importorskip("tensorferry.sweep")

SPACE = {
    "block_size": ["128K", "1M"],
    "queue_depth": [4, 16],
    "overlap_events": [True, False],
    "io_parallel": [1, 2],
    "single_submit": [False, True],
}

# Does what `tensorferry point` says it does, and keeps what it was given and saw.
STAND_IN = """#!{python}
import argparse, json, os, sys
seen = {{"arguments": sys.argv[1:]}}
if sys.argv[1] == "point":
    parser = argparse.ArgumentParser()
    for name in ("read_file", "write_file", "io_size", "loops", "block_size", "queue_depth",
                 "io_parallel", "engine"):
        parser.add_argument("--" + name)
    for name in ("overlap_events", "sequential_requests", "single_submit"):
        parser.add_argument("--" + name, action="store_true")
    given = parser.parse_args(sys.argv[2:])
    seen |= vars(given)
    if given.read_file:
        seen["bytes"] = os.path.getsize(given.read_file)
        seen["start"] = open(given.read_file, "rb").read(4096).hex()
    else:
        open(given.write_file, "wb").write(b"x")
with open({calls!r}, "a") as file:
    file.write(json.dumps(seen) + "\\n")
if sys.argv[1] == "point":
    if given.queue_depth == "13":
        sys.exit("write x at 0: No space left on device")
    kind = "Read" if given.read_file else "Write"
    print("block size", given.block_size)
    print(f"E2E {{kind}} Speed = 3.25 GB/sec")
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """stand_in() is what it was called with, and saw, so far."""
    path, calls = tmp_path / "stand in" / "tensorferry", tmp_path / "calls"
    path.parent.mkdir()
    path.write_text(STAND_IN.format(python=sys.executable, calls=str(calls)))
    path.chmod(0o755)
    monkeypatch.setenv("TENSORFERRY_COMMAND", str(path))
    return lambda: [json.loads(line) for line in calls.read_text().splitlines()]


@pytest.fixture
def real(ferry, monkeypatch):
    if ferry.start("point", "--help").wait():
        pytest.skip("this tensorferry has no command point")
    monkeypatch.setenv("TENSORFERRY_COMMAND", str(ferry.program))


@pytest.fixture(params=["stand_in", "real"])
def command(request):
    request.getfixturevalue(request.param)


@pytest.fixture
def config(tmp_path):
    """config(space, ...) is a SweepConfig over two directories of its own."""

    def make(space=None, **members):
        nvme = tmp_path / "nv me"
        nvme.mkdir(exist_ok=True)
        file = None
        if space is not None:
            file = tmp_path / "space.json"
            file.write_text(json.dumps(space))
        args = {
            "nvme_dir": str(nvme),
            "io_size": "4M",
            "sweep_config": file,
            "no_read": False,
            "no_write": False,
            "no_sudo": True,
            "log_dir": str(tmp_path / "logs"),
            "loops": 1,
        }
        return sweep.SweepConfig(argparse.Namespace(**args | members))

    return make


def run(config, direction, flush=None, cmd_lines=None):
    lines = cmd_lines or sweep.get_sweep_cmd_lines(config.search_space)
    run_sweep = {"read": sweep.run_read_sweep, "write": sweep.run_write_sweep}[direction]
    return run_sweep(config, flush, sweep.Job(["sync", "-d", "."]), lines)


def logs(config, direction):
    return sorted(path.name for path in Path(config.log_dir, direction).iterdir())


def parsed(folder, direction):
    """{fields of the file's name: speed}, the way parse_aio_stats.py does it."""

    def value(field):
        if field[0] in "tpd":
            return int(field[1:])
        if field.startswith("bs"):
            scale = {"K": 1024, "M": 1024 * 1024}.get(field[-1])
            return int(field[2:-1]) * scale if scale else int(field[2:])
        return field

    found = {}
    for path in Path(folder, direction).iterdir():
        key = tuple(value(field) for field in path.stem.split("_"))
        found[key] = None
        for line in path.read_text().splitlines():
            if line.startswith(f"E2E {direction.capitalize()} Speed"):
                found[key] = float(line.split(" ")[-2])
    return found


@pytest.mark.parametrize("direction", ["read", "write"])
def test_every_point_leaves_a_log_that_deepspeed_s_parser_reads(command, config, direction):
    asked = config(SPACE)
    assert run(asked, direction) == 0
    speeds = parsed(asked.log_dir, direction)
    assert set(speeds) == {
        (direction, submit, mode, 1, workers, depth, block)
        for submit, mode, workers, depth, block in itertools.product(
            ("single", "block"), ("overlap", "sequential"), (1, 2), (4, 16), (131072, 1048576)
        )
    }
    assert all(speed > 0 for speed in speeds.values())
    assert os.listdir(asked.nvme_dir) == []


def test_logs_are_named_as_deepspeed_names_them(stand_in, config):
    asked = config(
        {
            "block_size": ["256K", "1M"],
            "queue_depth": [16],
            "overlap_events": [True],
            "io_parallel": [2],
            "single_submit": [False],
        }
    )
    run(asked, "read")
    assert logs(asked, "read") == [
        "read_block_overlap_t1_p2_d16_bs1M.txt",
        "read_block_overlap_t1_p2_d16_bs256K.txt",
    ]


def test_the_read_file_is_made_once_of_random_bytes(stand_in, config):
    run(config({"queue_depth": [4, 8, 16]}, io_size="3M"), "read")
    calls = stand_in()
    assert len(calls) == 3 and len({call["read_file"] for call in calls}) == 1
    assert {call["bytes"] for call in calls} == {3 << 20}
    assert len(set(bytes.fromhex(calls[0]["start"]))) > 200
    assert {call["io_size"] for call in calls} == {"3M"}


def test_a_point_is_told_everything(stand_in, config):
    run(
        config(
            {
                "block_size": ["1M"],
                "queue_depth": [32],
                "overlap_events": [True],
                "io_parallel": [8],
                "single_submit": [True],
                "engine": ["libaio"],
            },
            loops=3,
        ),
        "write",
    )
    (call,) = stand_in()
    assert {
        name: call[name]
        for name in ("io_size", "loops", "block_size", "queue_depth", "io_parallel", "engine")
    } == {
        "io_size": "4M",
        "loops": "3",
        "block_size": "1M",
        "queue_depth": "32",
        "io_parallel": "8",
        "engine": "libaio",
    }
    assert call["overlap_events"] and call["single_submit"] and not call["sequential_requests"]


@pytest.mark.parametrize(
    "space, modes",
    [
        ({"overlap_events": [True, False]}, ["overlap", "sequential"]),
        ({"sequential_requests": [True, False]}, ["sequential", "overlap"]),
        ({"sequential_requests": [False]}, ["overlap"]),
        ({"queue_depth": [4]}, ["sequential"]),
    ],
)
def test_sequential_requests_is_overlap_events_turned_round(stand_in, config, space, modes):
    asked = config(space)
    run(asked, "read")
    calls = stand_in()
    assert [call["overlap_events"] for call in calls] == [mode == "overlap" for mode in modes]
    assert all(call["overlap_events"] != call["sequential_requests"] for call in calls)
    assert sorted(name.split("_")[2] for name in logs(asked, "read")) == sorted(modes)


def test_engines_get_a_folder_each(stand_in, config):
    asked = config({"queue_depth": [4], "engine": ["io_uring", "libaio"]})
    run(asked, "read")
    assert sorted(os.listdir(asked.log_dir)) == ["io_uring", "libaio"]
    assert logs(asked, "io_uring/read") == logs(asked, "libaio/read") != []


def test_a_point_that_fails_is_reported_and_the_sweep_goes_on(stand_in, config, capfd):
    asked = config({"queue_depth": [4, 13, 16]})
    assert run(asked, "write") == 1
    said = capfd.readouterr()
    assert "failed with exit status 1" in said.err and "write_block_" in said.err
    speeds = sorted(parsed(asked.log_dir, "write").items())
    assert [(key[5], speed) for key, speed in speeds] == [(4, 3.25), (13, None), (16, 3.25)]
    (log,) = Path(asked.log_dir, "write").glob("*_d13_*")
    assert "No space left on device" in log.read_text()


def test_caches_are_flushed_before_every_point(stand_in, config, tmp_path, capfd):
    flush = sweep.Job(["bash -c", f"'echo flushed >> \"{tmp_path}/flushes\"'"])
    run(config({"queue_depth": [4, 8]}), "read", flush=flush)
    assert (tmp_path / "flushes").read_text().split() == ["flushed"] * 2
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("args = ")]
    assert [line.split()[2] for line in lines[:2]] == ["sync", "bash"] and len(lines) == 6
    assert "--queue_depth 4" in lines[2] and "--read_file" in lines[2]


def test_a_space_cannot_slip_a_command_in(stand_in, config, tmp_path):
    run(config({"queue_depth": [f"4;touch${{IFS}}{tmp_path}/slipped"]}), "write")
    assert len(stand_in()) == 1 and not (tmp_path / "slipped").exists()


def test_the_example_of_the_module_runs():
    assert doctest.testmod(sweep).attempted > 0 == doctest.testmod(sweep).failed


def test_cmd_lines_are_the_whole_product():
    lines = sweep.get_sweep_cmd_lines(SPACE)
    assert len(lines) == 32 and len(set(map(tuple, lines))) == 32
    assert lines[0] == [
        "--block_size 128K",
        "--queue_depth 4",
        "--overlap_events",
        "--io_parallel 1",
        " ",
    ]
    assert lines[-1] == [
        "--block_size 1M",
        "--queue_depth 16",
        " ",
        "--io_parallel 2",
        "--single_submit",
    ]


def test_the_config_has_deepspeed_s_attributes(config):
    asked = config(no_write=True, no_sudo=False, loops=5)
    assert (asked.read, asked.write, asked.flush_cache, asked.loops) == (True, False, True, 5)
    assert asked.search_space == sweep.DEFAULT_SWEEP_CONFIG
    assert asked.io_size == "4M" and asked.other_options == "--loops 5"
    assert len(sweep.get_sweep_cmd_lines(asked.search_space)) == 4 * 4 * 2 * 3


def test_a_job_opens_and_closes_its_output(tmp_path):
    job = sweep.Job(["echo", "x"], output_file=tmp_path / "out", work_dir=tmp_path)
    assert job.cmd() == ["echo", "x"] and job.get_cwd() == tmp_path and job.get_stdout() is None
    job.open_output_file()
    assert job.get_stdout() is job.get_stderr() and not job.get_stdout().closed
    job.close_output_file()
    assert job.get_stdout() is None and (tmp_path / "out").exists()


def test_a_size_that_is_none_is_refused_and_nothing_is_left(stand_in, config):
    asked = config(io_size="lots")
    with pytest.raises(ValueError, match="400M"):
        run(asked, "read")
    assert os.listdir(asked.nvme_dir) == []


def test_main_is_tensorferry_sweep(stand_in):
    words = ["--nvme_dir", "/mnt/some where", "--loops", "2"]
    subprocess.run([sys.executable, "-m", "tensorferry.sweep", *words], check=True)
    assert stand_in() == [{"arguments": ["sweep", *words]}]


def test_the_command_beside_python_comes_before_the_path(tmp_path, monkeypatch):
    monkeypatch.delenv("TENSORFERRY_COMMAND", raising=False)
    for name in ("beside", "path"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tensorferry").write_text("#!/bin/sh\n")
        (tmp_path / name / "tensorferry").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "beside" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert sweep.find_command() == str(tmp_path / "beside" / "tensorferry")
    (tmp_path / "beside" / "tensorferry").unlink()
    assert sweep.find_command() == str(tmp_path / "path" / "tensorferry")


def test_a_missing_command_says_what_to_do(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "TENSORFERRY_COMMAND"}
    env["TENSORFERRY_COMMAND"] = str(tmp_path / "none")
    done = subprocess.run(
        [sys.executable, "-m", "tensorferry.sweep"], env=env, text=True, capture_output=True
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "TENSORFERRY_COMMAND is" in done.stderr and "unset it" in done.stderr
