"""tensorferry bench: what it says is so, and it leaves a directory as it was."""

import json
import os
import pty
import re
import signal
import subprocess
import time

import numpy
import pytest
import scipy.stats
from ferry_program import PROGRAM
from loop_mount import unmount
from test_results import validate

SMALL = ("--sizes", "64K", "1M", "--iterations", "20", "--threads", "2")


def results_of(ferry, *arguments):
    ferry("bench", *arguments, "--json", "results.json")
    results = json.loads((ferry.place / "results.json").read_text())
    validate(results)
    return results


def everything_in(folder):
    return sorted(
        (str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")
    )


def test_without_arguments_it_works_and_says_where(ferry):
    said = ferry("bench", timeout=600).stdout
    assert re.match(r"Measuring (/mnt/nvme|the working directory)", said)
    for label in ("Write Statistics:", "Read Statistics:"):
        assert said.count(f"\n{label}\n") == 3
    assert list(ferry.place.iterdir()) == []


def test_every_flag_of_the_seed_in_both_spellings(ferry):
    flags = {
        "nvme-path": ".",
        "iterations": "3",
        "threads": "4",
        "queue-depth": "8",
        "block-size": "256K",
    }
    for spelled in (str, lambda name: name.replace("-", "_")):
        words = [word for name, value in flags.items() for word in (f"--{spelled(name)}", value)]
        results = results_of(ferry, *words, "--sizes", "4K", "1M")
        settings = results["settings"]
        assert (settings["iterations"], settings["workers"], settings["queue_depth"]) == (3, 4, 8)
        assert settings["block_bytes"] == 256 << 10 and settings["sizes"] == [4096, 1 << 20]


def test_statistics_agree_with_scipy(ferry):
    results = results_of(ferry, *SMALL)
    assert len(results["series"]) == 4
    for series in results["series"]:
        seconds = numpy.array(series["seconds"])
        assert len(seconds) == 20
        for samples, summary in (
            (seconds, series["latency_seconds"]),
            (series["bytes"] / 1e6 / seconds, series["bandwidth_mb_per_second"]),
        ):
            agree_with_scipy(samples, summary)


def agree_with_scipy(samples, summary):
    expected = {
        "mean": samples.mean(),
        "median": numpy.median(samples),
        "standard_deviation": samples.std(ddof=1),
        "p50": numpy.percentile(samples, 50),
        "p90": numpy.percentile(samples, 90),
        "p99": numpy.percentile(samples, 99),
    }
    for name, value in expected.items():
        assert summary[name] == pytest.approx(value, rel=1e-9), name
    interval = scipy.stats.t.interval(
        0.95, len(samples) - 1, loc=samples.mean(), scale=scipy.stats.sem(samples)
    )
    assert summary["ci95"] == pytest.approx(interval, rel=1e-9)
    if len(samples) >= 1000:
        assert summary["p999"] == pytest.approx(numpy.percentile(samples, 99.9), rel=1e-9)
    else:
        assert "p999" not in summary


def test_a_thousand_samples_have_a_p999(ferry):
    results = results_of(ferry, "--sizes", "4K", "--iterations", "1000", "--threads", "1")
    agree_with_scipy(
        numpy.array(results["series"][0]["seconds"]), results["series"][0]["latency_seconds"]
    )
    said = ferry("bench", "--sizes", "4K", "--iterations", "1000", "--threads", "1").stdout
    assert "'99.9th': " in said


def test_what_is_printed_is_what_is_in_the_file(ferry):
    said = ferry("bench", *SMALL, "--json", "results.json").stdout
    series = json.loads((ferry.place / "results.json").read_text())["series"]
    for label, digits, member in (
        ("Latency Mean", 9, "latency_seconds"),
        ("Bandwidth Mean", 3, "bandwidth_mb_per_second"),
    ):
        printed = [float(text) for text in re.findall(rf"  {label}: ([\d.]+)", said)]
        assert printed == [round(one[member]["mean"], digits) for one in series]
    for label in (
        "Latency Median",
        "Latency Std Dev",
        "Latency 95% CI",
        "Latency Percentiles",
        "Bandwidth Median",
        "Bandwidth Std Dev",
        "Bandwidth 95% CI",
        "Bandwidth Percentiles",
        "CPU",
        "Engine",
    ):
        assert said.count(f"\n  {label}: ") == len(series)


def test_slow_is_not_nothing(ferry):
    said = ferry(
        "bench", "--sizes", "1", "--iterations", "20", "--threads", "1", "--json", "results.json"
    ).stdout
    series = json.loads((ferry.place / "results.json").read_text())["series"]
    printed = [float(text) for text in re.findall(r"^1 +(?:read|write) +([\d.]+)", said, re.M)]
    assert printed == [
        pytest.approx(one["bandwidth_mb_per_second"]["mean"], rel=0.01) for one in series
    ]


def test_one_sample_has_no_interval(ferry):
    results = results_of(ferry, "--sizes", "4K", "--iterations", "1")
    assert "ci95" not in results["series"][0]["latency_seconds"]


def sectors_read(device):
    for line in open("/proc/diskstats"):
        words = line.split()
        if words[2] == device:
            return int(words[5])
    raise AssertionError(f"no {device} in /proc/diskstats")


def test_reads_are_cold(ferry):
    """The drive's own counter, read by this test, covers what was read."""
    results = results_of(ferry, *SMALL)
    device = results["places"][0]["drive"]["name"]
    before = sectors_read(device)
    results = results_of(ferry, *SMALL)
    asked = sum(one["bytes"] * 20 for one in results["series"] if one["direction"] == "read")
    assert (sectors_read(device) - before) * 512 >= asked
    for series in results["series"]:
        if series["direction"] == "read":
            assert series["cold"]["cold"] and series["direct"]
            assert series["cold"]["device_bytes"] >= series["bytes"] * 20


def test_what_cannot_be_cold_is_not_called_so(ferry, tmp_path):
    place = tmp_path / "memory"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "none", place]).returncode != 0:
        pytest.skip("cannot mount")
    try:
        said = ferry("bench", *SMALL, "--nvme-path", place, "--json", "results.json").stdout
        results = json.loads((ferry.place / "results.json").read_text())
        validate(results)
        reads = [one for one in results["series"] if one["direction"] == "read"]
        assert not any(one["cold"]["cold"] for one in reads) and "NOT cold" in said
    finally:
        unmount(place)


def test_other_files_stay_as_they_were(ferry):
    folder = ferry.place / "full"
    (folder / "deep").mkdir(parents=True)
    for name in ("tensors", "data", "deep/x.bin", ".hidden", "tensorferry-abcdef"):
        (folder / name).write_bytes(os.urandom(5000))
    before = everything_in(folder)
    ferry("bench", *SMALL, "--nvme-path", folder)
    assert everything_in(folder) == before


@pytest.mark.parametrize("engine", ["io_uring", "libaio", "threads"])
def test_an_engine_that_was_asked_for_is_used(ferry, engine):
    results = results_of(ferry, *SMALL, "--engine", engine, "--pageable")
    assert {one["engine"] for one in results["series"]} == {engine}
    assert results["settings"]["memory"] == "pageable"


def test_polling_that_was_asked_for_is_used(ferry):
    results = results_of(ferry, *SMALL, "--polling", "submission")
    assert results["settings"]["polling"] == "submission"
    assert all("submission" in one["engine_reason"] for one in results["series"])


def test_wrong_usage_is_exit_2_and_says_what_was_meant(ferry):
    for arguments, word in (
        (["--sizess", "4K"], "--sizes"),
        (["--block_sise=4K"], "--block-size"),
        (["--sizes", "4Q"], "4K, 2M or 1G"),
        (["--sizes", "0"], "0"),
        (["--iterations", "0"], "iterations"),
        (["--iterations", "-3"], "iterations"),
        (["--threads", "many"], "threads"),
        (["--engine", "warp"], "io_uring"),
        (["--polling", "warp"], "submission"),
        (["--pinned", "--pageable"], "pinned"),
        (["stray"], "stray"),
    ):
        done = ferry("bench", *arguments, code=2)
        assert word in done.stderr and done.stdout == "", arguments


def test_failures_are_exit_1_and_say_where(ferry):
    done = ferry("bench", "--nvme-path", "nowhere", code=1)
    assert "nowhere" in done.stderr and "ENOENT" in done.stderr
    (ferry.place / "file").write_text("x")
    assert "ENOTDIR" in ferry("bench", "--nvme-path", "file", code=1).stderr
    done = ferry("bench", *SMALL, "--json", "no/such/place.json", code=1)
    assert "place.json" in done.stderr and "Statistics" not in done.stdout


def test_too_little_space_is_said_before_the_start(ferry, tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1M", "none", place]).returncode != 0:
        pytest.skip("cannot mount")
    try:
        done = ferry("bench", "--sizes", "2M", "--nvme-path", place, code=1)
        assert "ENOSPC" in done.stderr and "are free" in done.stderr
        assert "Statistics" not in done.stdout and list(place.iterdir()) == []
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        done = ferry("bench", "--sizes", "4K", "--iterations", "1", "--nvme-path", place, code=1)
        assert "read-only" in done.stderr
    finally:
        unmount(place)


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


@pytest.mark.parametrize(
    "signals", [[signal.SIGINT], [signal.SIGTERM], [signal.SIGINT, signal.SIGINT]]
)
def test_an_interrupt_cleans_up_and_keeps_what_is_finished(ferry, signals):
    running = ferry.start(
        "bench",
        "--sizes",
        "4K",
        "64M",
        "--iterations",
        "3000",
        "--threads",
        "1",
        "--json",
        "results.json",
        "--nvme-path",
        ".",
    )
    # The second size has begun: its headline is printed.
    head = ""
    while "tensors of 64M" not in head:
        line = running.stdout.readline()
        assert line, "it ended early"
        head += line
    wait_until(lambda: list(ferry.place.glob("tensorferry-*/tensors")))
    for one in signals:
        running.send_signal(one)
    rest, errors = running.communicate(timeout=60)
    assert running.returncode == 1 and "interrupted" in errors
    assert [path.name for path in ferry.place.iterdir()] == ["results.json"]
    results = json.loads((ferry.place / "results.json").read_text())
    validate(results)
    assert results["complete"] is False
    assert [one["bytes"] for one in results["series"]] == [4096, 4096]


def test_a_terminal_gets_a_bar_and_a_pipe_gets_none(ferry):
    assert ferry("bench", *SMALL).stderr == ""
    main, terminal = pty.openpty()
    done = subprocess.run(
        [PROGRAM, "bench", *SMALL],
        stdout=subprocess.PIPE,
        stderr=terminal,
        cwd=ferry.place,
        env=ferry.env,
        timeout=120,
    )
    os.close(terminal)
    seen = os.read(main, 1 << 20).decode()
    assert done.returncode == 0
    assert re.search(r"Writes 64K: 100%\|█+\| 20/20 \[00:00<00:00, [\d.]+ GB/s\]", seen)
    assert "█" not in done.stdout.decode()


def test_a_reader_that_goes_away_leaves_no_files(ferry):
    done = subprocess.run(
        f"{PROGRAM} bench --sizes 4K --iterations 50 | head -1",
        shell=True,
        cwd=ferry.place,
        env=ferry.env,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0 and list(ferry.place.iterdir()) == []
