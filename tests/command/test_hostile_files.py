"""What happened to the command at the hands of a hostile tester must not happen again."""

import contextlib
import json
import os
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest
from ferry_program import PROGRAM
from loop_mount import unmount

QUICK = ("--sizes", "4K", "--iterations", "3", "--threads", "1")
ONE_POINT = json.dumps({"queue_depth": [4]})


@pytest.fixture
def drive(ferry):
    (ferry.place / "drive").mkdir()
    (ferry.place / "space.json").write_text(ONE_POINT)
    return ["--nvme_dir", "drive", "--sweep_config", "space.json", "--io_size", "1M", "--no_sudo"]


def test_results_go_through_a_link_to_the_output(ferry):
    """/dev/stdout is such a link; replacing it would break the machine."""
    link = ferry.place / "link"
    link.symlink_to("/proc/self/fd/1")
    said = ferry("bench", *QUICK, "--json", link).stdout
    assert link.is_symlink() and '"complete": true' in said


def test_a_file_that_is_replaced_keeps_its_rights_and_its_owner(ferry):
    config = ferry.place / "config.json"
    config.write_text("{}")
    config.chmod(0o640)
    os.chown(config, 1234, 1234)
    ferry("tune", ".", "--seconds", "5", "--no-profile", "--write-config", config)
    after = config.stat()
    assert (after.st_uid, after.st_gid, stat.S_IMODE(after.st_mode)) == (1234, 1234, 0o640)
    assert "aio" in json.loads(config.read_text())


def test_a_file_with_two_names_keeps_both(ferry):
    (ferry.place / "one.json").write_text("old")
    os.link(ferry.place / "one.json", ferry.place / "other.json")
    ferry("bench", *QUICK, "--json", "one.json")
    assert (ferry.place / "other.json").read_text() == (ferry.place / "one.json").read_text()


def test_old_results_stay_until_there_are_new_ones(ferry):
    (ferry.place / "results.json").write_text("precious")
    ferry("bench", *QUICK, "--block-size", "2G", "--json", "results.json", code=1)
    assert (ferry.place / "results.json").read_text() == "precious"


def test_what_is_finished_is_kept_whatever_goes_wrong(ferry):
    """The second size needs more memory than there may be."""
    done = subprocess.run(
        f"ulimit -v 1200000; exec {PROGRAM} bench --sizes 4K 2G --iterations 3 --threads 1 "
        "--json results.json",
        shell=True,
        cwd=ferry.place,
        env=ferry.env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stdout
    results = json.loads((ferry.place / "results.json").read_text())
    assert results["complete"] is False and len(results["series"]) == 2
    assert [path.name for path in ferry.place.iterdir()] == ["results.json"]


@pytest.mark.parametrize("one", [signal.SIGHUP, signal.SIGQUIT])
def test_a_lost_terminal_leaves_no_files(ferry, one):
    running = ferry.start("bench", "--sizes", "32M", "--iterations", "100000", "--nvme-path", ".")
    assert running.stdout.readline() is not None
    running.stdout.readline()
    running.send_signal(one)
    running.communicate(timeout=60)
    assert running.returncode == 1 and list(ferry.place.iterdir()) == []


def test_a_full_output_is_a_failure(ferry):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [PROGRAM, "bench", *QUICK],
            cwd=ferry.place,
            env=ferry.env,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1 and "output" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "--json", ""],
        ["bench", "--nvme-path="],
        ["tune", ""],
        ["sweep", "--nvme_dir", "", "--no_sudo"],
    ],
)
def test_an_empty_argument_is_wrong_usage(ferry, arguments):
    assert "empty" in ferry(*arguments, code=2).stderr


def test_a_file_to_read_is_never_changed(ferry):
    notes = ferry.place / "notes.txt"
    notes.write_text("mine")
    done = ferry("point", "--read_file", notes, "--io_size", "64K", code=1)
    assert "64 KiB" in done.stderr and notes.read_text() == "mine"


def test_a_file_without_stamps_is_not_sound(ferry):
    for content in (b"", b"short", os.urandom(4096), os.urandom(100_000)):
        (ferry.place / "x-generation-54.stamped").write_bytes(content)
        ferry("verify", "--check", "x-generation-54.stamped", code=1)


def test_foreign_files_in_the_log_directory_are_not_replaced(ferry, drive):
    results = ferry.place / "aio_perf_sweep/results.json"
    results.parent.mkdir()
    for text in (
        '{"precious": 1}',
        "not even JSON",
        '{"command": "bench", "points": []}',
        '{"command": 5}',
        '{"command": "sweep", "points": [{"log": 5}], "complete": 1}',
    ):
        results.write_text(text)
        assert "another --log_dir" in ferry("sweep", *drive, code=1).stderr
        assert results.read_text() == text


def test_an_interrupted_sweep_is_not_thrown_away_by_other_settings(ferry, drive):
    ferry("sweep", *drive)
    results = ferry.place / "aio_perf_sweep/results.json"
    made = json.loads(results.read_text())
    results.write_text(json.dumps(made | {"complete": False}))
    assert "--restart" in ferry("sweep", *drive, "--loops", "2", code=1).stderr
    ferry("sweep", *drive, "--loops", "2", "--restart")
    assert len(json.loads(results.read_text())["points"]) == 2


def test_points_with_damaged_figures_are_measured_again(ferry, drive):
    ferry("sweep", *drive)
    results = ferry.place / "aio_perf_sweep/results.json"
    made = json.loads(results.read_text())
    made["complete"] = False
    made["points"][0]["gb_per_second"] = None
    results.write_text(json.dumps(made))
    assert "1 of 2 points are done" in ferry("sweep", *drive).stdout


def test_directories_whose_names_look_alike_do_not_share_logs(ferry, drive):
    for name in ("a/b", "a_b"):
        (ferry.place / name).mkdir(parents=True)
    ferry("sweep", "--nvme_dir", "a/b", "a_b", "a/../a_b", *drive[2:])
    logs = list((ferry.place / "aio_perf_sweep").rglob("*.txt"))
    assert len(logs) == 4, "two directories, two phases; one that is named twice counts once"


def test_a_log_that_cannot_be_written_is_a_failed_point(ferry, drive):
    (ferry.place / "aio_perf_sweep").mkdir()
    (ferry.place / "aio_perf_sweep/read").write_text("a file, where a folder should be")
    done = ferry("sweep", *drive, code=1)
    points = json.loads((ferry.place / "aio_perf_sweep/results.json").read_text())["points"]
    assert [one["status"] for one in points] == ["failed", "ok"] and "failed: " in done.stdout


def test_two_directories_on_one_file_system_need_room_for_both(ferry, drive, tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20M", "none", place]).returncode != 0:
        pytest.skip("cannot mount")
    try:
        for name in ("one", "two"):
            (place / name).mkdir()
        done = ferry(
            "sweep",
            "--nvme_dir",
            place / "one",
            place / "two",
            *drive[2:],
            "--io_size",
            "6M",
            code=1,
        )
        assert "ENOSPC" in done.stderr and "tensorferry point" not in done.stdout
    finally:
        unmount(place)


def wait_until(true):
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def points_on(drive):
    """The processes that measure on it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            words = (process / "cmdline").read_text().split("\0")
            if "point" in words and any(word.startswith(str(drive)) for word in words):
                found.append(process)
    return found


def test_a_killed_sweep_takes_its_point_along(ferry, drive):
    folder = ferry.place / "drive"
    drive[1] = folder
    running = ferry.start("sweep", *drive, "--loops", "200000", "--no_write")
    wait_until(
        lambda: any(path.stat().st_size for path in (ferry.place / "aio_perf_sweep").rglob("*.txt"))
    )
    assert points_on(folder)
    running.kill()
    running.communicate()
    wait_until(lambda: not points_on(folder))


def test_tune_says_at_once_that_it_could_not_write(ferry):
    for flag in ("--json", "--write-config"):
        done = ferry("tune", ".", flag, "no/such/place.json", code=1, timeout=20)
        assert "place.json" in done.stderr and "Round" not in done.stdout


def test_tune_keeps_the_way_so_far_when_interrupted(ferry):
    running = ferry.start("tune", ".", "--seconds", "60", "--json", "tune.json")
    assert running.stdout.readline().startswith("Round 1")
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=60)
    results = json.loads((ferry.place / "tune.json").read_text())
    assert running.returncode == 1 and results["complete"] is False and results["rounds"]


def test_a_pipe_is_not_waited_for(ferry):
    os.mkfifo(ferry.place / "pipe")
    ferry("tune", ".", "--write-config", "pipe", code=1, timeout=20)


def test_memory_that_cannot_be_locked_is_not_called_so(ferry):
    os.chmod(ferry.place, 0o777)
    for folder in list(ferry.place.parents)[:3]:
        os.chmod(folder, 0o755)
    done = subprocess.run(
        f"ulimit -l 64; exec setpriv --reuid=65534 --regid=65534 --clear-groups {PROGRAM} bench "
        "--sizes 8M --iterations 3 --threads 1 --json results.json",
        shell=True,
        cwd=ferry.place,
        env=ferry.env | {"HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "ermission denied" in done.stderr or "not permitted" in done.stderr:
        pytest.skip("an ordinary user cannot reach the program here")
    assert "could not be page-locked" in done.stdout, done.stdout + done.stderr
    series = json.loads((ferry.place / "results.json").read_text())["series"]
    assert [one["locked"] for one in series] == [False, False]
