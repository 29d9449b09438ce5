"""tensorferry sweep: every point once, a log each, as programs written for DeepSpeed read them."""

import csv
import json
import os
import re
import signal
import subprocess

import pytest
from ferry_program import PROGRAM
from test_results import validate

SPACE = {
    "block_size": ["128K", "1M"],
    "queue_depth": [4, 16],
    "overlap_events": [True, False],
    "io_parallel": [1, 2],
    "single_submit": [False],
}
NAME = re.compile(r"(read|write)_(single|block)_(overlap|sequential)_t1_p(\d+)_d(\d+)_bs(\w+)\.txt")


@pytest.fixture
def space(ferry):
    (ferry.place / "space.json").write_text(json.dumps(SPACE))
    (ferry.place / "drive").mkdir()
    return ["--nvme_dir", "drive", "--sweep_config", "space.json", "--io_size", "8M", "--no_sudo"]


def results_in(folder):
    results = json.loads((folder / "results.json").read_text())
    validate(results)
    return results


def speed_in(log, verb):
    """As DeepSpeed's parse_aio_stats finds it."""
    for line in log.read_text().splitlines():
        if line.startswith(f"E2E {verb} Speed"):
            return float(line.split()[-2])
    raise AssertionError(log.read_text())


def test_every_point_once_with_a_log_each(ferry, space):
    said = ferry("sweep", *space, "--loops", "2").stdout
    logs = ferry.place / "aio_perf_sweep"
    points = results_in(logs)["points"]
    assert len(points) == 2 * 16 and results_in(logs)["complete"] is True
    for direction, verb in (("read", "Read"), ("write", "Write")):
        files = sorted((logs / direction).iterdir())
        assert len(files) == 16 and all(NAME.fullmatch(file.name) for file in files)
        for file in files:
            (point,) = [one for one in points if one["log"].endswith(file.name)]
            assert len(point["seconds"]) == 2
            assert speed_in(file, verb) == pytest.approx(point["gib_per_second"], rel=1e-6)
            assert file.read_text().count(f"{verb} Latency = ") == 2 + 2
            assert "block_size = " in file.read_text() and "queue_depth = " in file.read_text()
    # The command line of each point, on stdout.
    assert len(re.findall(r"^tensorferry point --(?:read|write)_file ", said, re.MULTILINE)) == 32
    assert list((ferry.place / "drive").iterdir()) == []


def test_the_table_is_best_first_and_the_csv_has_all(ferry, space):
    said = ferry("sweep", *space, "--no_write").stdout
    table = re.findall(r"^ *([\d.]+) +\S+ +\d+ +\d", said.split("best first")[1], re.MULTILINE)
    speeds = [float(text) for text in table]
    assert len(speeds) == 10 and speeds == sorted(speeds, reverse=True)
    rows = list(csv.DictReader((ferry.place / "aio_perf_sweep/results.csv").open()))
    assert len(rows) == 16 and {row["status"] for row in rows} == {"ok"}
    assert max(float(row["gb_per_second"]) for row in rows) == pytest.approx(speeds[0], abs=1e-3)


def test_a_command_line_can_be_repeated_by_hand(ferry, space):
    (ferry.place / "data").write_bytes(os.urandom(8 << 20))
    said = ferry("sweep", *space, "--no_write").stdout
    line = re.search(r"^tensorferry (point .*)$", said, re.MULTILINE)[1]
    words = re.sub(r"--read_file \S+", "--read_file data", line).split()
    assert "E2E Read Speed = " in ferry(*words).stdout


def test_phases_can_be_left_out(ferry, space):
    ferry("sweep", *space, "--no_read", "--log_dir", "w")
    assert sorted(path.name for path in (ferry.place / "w").iterdir()) == [
        "results.csv",
        "results.json",
        "write",
    ]
    ferry("sweep", *space, "--no_read", "--no_write", code=2)


def test_the_default_space(ferry):
    (ferry.place / "drive").mkdir()
    ferry("sweep", "--nvme-dir", "drive", "--io-size", "1M", "--no-sudo", "--json", "all.json")
    points = json.loads((ferry.place / "all.json").read_text())["points"]
    assert len(points) == 192
    assert {one["block_bytes"] >> 10 for one in points} == {128, 256, 512, 1024}
    assert {one["queue_depth"] for one in points} == {4, 16, 32, 64}
    assert {one["workers"] for one in points} == {1, 2, 8}
    assert {one["overlap"] for one in points} == {"overlap", "sequential"}
    assert {one["submit"] for one in points} == {"block"}


def test_engines_and_directories_get_a_folder_each(ferry, space):
    (ferry.place / "other").mkdir()
    (ferry.place / "space.json").write_text(json.dumps({"queue_depth": [4]}))
    ferry("sweep", "--nvme_dir", "drive", "other", *space[2:], "--engine", "threads", "libaio")
    logs = ferry.place / "aio_perf_sweep"
    found = {path.relative_to(logs).parts for path in logs.rglob("*.txt")}
    assert len(found) == 2 * 2 * 2
    assert {parts[1] for parts in found} == {"threads", "libaio"}
    points = results_in(logs)["points"]
    assert {one["engine_used"] for one in points} == {"threads", "libaio"}
    assert {one["directory"] for one in points} == {"drive", "other"}


def test_a_failing_point_is_reported_and_passed_over(ferry, space):
    """More requests than the system allows libaio."""
    (ferry.place / "space.json").write_text(
        json.dumps({"queue_depth": [4, 4096], "io_parallel": [128], "engine": ["libaio"]})
    )
    done = ferry("sweep", *space, "--no_write", code=1)
    ok, failed = results_in(ferry.place / "aio_perf_sweep")["points"]
    assert (ok["status"], failed["status"]) == ("ok", "failed")
    assert "io_setup" in failed["error"] and "1 of 2 points failed" in done.stdout
    assert "failed: " in done.stdout


def test_an_interrupted_sweep_goes_on_where_it_was(ferry, space):
    running = ferry.start("sweep", *space, "--io_size", "64M", "--loops", "5")
    lines = 0
    while lines < 8:
        line = running.stdout.readline()
        assert line, "it ended early"
        lines += line.startswith("tensorferry point")
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 1 and "run the same command again" in errors
    assert list((ferry.place / "drive").iterdir()) == []
    logs = ferry.place / "aio_perf_sweep"
    before = results_in(logs)
    assert before["complete"] is False and 1 <= len(before["points"]) < 32
    times = {path: path.stat().st_mtime_ns for path in logs.rglob("*.txt")}
    assert len(times) == len(before["points"]), "no half log is left"

    said = ferry("sweep", *space, "--io_size", "64M", "--loops", "5").stdout
    assert f"{len(before['points'])} of 32 points are done" in said
    after = results_in(logs)
    assert after["complete"] and after["points"][: len(times)] == before["points"]
    assert {path: path.stat().st_mtime_ns for path in times} == times
    # A finished sweep, another one, and --restart begin anew.
    assert "are done" not in ferry("sweep", *space, "--io_size", "64M", "--loops", "5").stdout


def test_without_root_it_says_that_reads_are_direct(ferry, space):
    os.chmod(ferry.place, 0o777)
    os.chmod(ferry.place / "drive", 0o777)
    for folder in list(ferry.place.parents)[:3]:
        os.chmod(folder, 0o755)
    done = subprocess.run(
        [
            "setpriv",
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
            PROGRAM,
            "sweep",
            *[word for word in space if word != "--no_sudo"],
            "--no_write",
        ],
        cwd=ferry.place,
        env=ferry.env | {"HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    if "Permission denied" in done.stderr or "Operation not permitted" in done.stderr:
        pytest.skip("an ordinary user cannot reach the program here")
    assert "reads are direct anyway" in done.stdout, done.stdout + done.stderr


def test_bad_spaces_are_refused_before_anything_is_written(ferry, space):
    for text, word in (
        ('{"blok_size": [1]}', "blok_size"),
        ("{oops", "space.json"),
        ('{"queue_depth": ["x"]}', "queue_depth"),
        ('{"queue_depth": ' + "[" * 200_000 + "]" * 200_000 + "}", "nested"),
        ('{"queue_depth": [1e999]}', "space.json"),
    ):
        (ferry.place / "space.json").write_text(text)
        assert word in ferry("sweep", *space, code=1).stderr
    assert not (ferry.place / "aio_perf_sweep").exists()
    assert "--nvme-dir" in ferry("sweep", code=2).stderr


def test_engines_are_named_once(ferry, space):
    (ferry.place / "space.json").write_text(json.dumps({"engine": ["libaio"]}))
    done = ferry("sweep", *space, "--gds", code=1)
    assert "space.json" in done.stderr
    assert "it names engines, and --gds names one too" in done.stderr


def test_no_space_for_the_io_size_is_said_before_the_start(ferry, space):
    done = ferry("sweep", *space, "--io_size", "100T", code=1)
    assert "ENOSPC" in done.stderr and "tensorferry point" not in done.stdout


@pytest.mark.parametrize("flag", ["--gpu", "--gds"])
def test_without_a_gpu_its_tensors_are_refused_before_the_first_point(ferry, space, flag):
    done = ferry("sweep", *space, flag, code=1)
    assert "libcuda.so.1" in done.stderr and "NVIDIA driver" in done.stderr
    assert not done.stdout
