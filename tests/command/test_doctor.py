"""`tensorferry doctor`, on this machine and on machines made worse than it is."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from ferry_program import PROGRAM
from loop_mount import loop_mount

WITHOUT_IO_URING = Path(__file__).with_name("without_io_uring.py")


def findings_of(text):
    report = json.loads(text)
    assert (report["format"], report["version"]) == ("tensorferry-doctor", 1)
    return report, {(each["area"], each["name"]): each for each in report["findings"]}


def run(words, env):
    return subprocess.run(
        list(map(str, words)), capture_output=True, text=True, env=env, timeout=60, check=False
    )


def test_a_line_for_each_finding_and_a_verdict_last(ferry):
    done = subprocess.run(
        [PROGRAM, "doctor"],
        capture_output=True,
        text=True,
        cwd=ferry.place,
        env=ferry.env,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "Machine"
    assert str(ferry.place) in lines
    assert "GPU" in lines
    for name in (
        "kernel",
        "io_uring",
        "libaio",
        "memlock",
        "huge pages",
        "file system",
        "O_DIRECT",
        "free space",
        "settings",
        "CUDA",
        "GDS",
    ):
        assert any(f" {name} " in line and line.lstrip()[0] in "✓!✗" for line in lines), name
    verdict = "Tensors can move at full speed." if done.returncode == 0 else "attention"
    assert verdict in lines[-1]
    assert "\033" not in done.stdout
    assert not list(ferry.place.iterdir())


def test_json_and_exit_status_agree(ferry):
    done = run([PROGRAM, "doctor", "--json", ferry.place], ferry.env)
    report, findings = findings_of(done.stdout)
    attention = any(each["needs_attention"] for each in findings.values())
    assert report["verdict"] == ("attention" if attention else "ok")
    assert done.returncode == int(attention)
    assert all(each["status"] in ("ok", "warning", "missing") for each in findings.values())
    assert all(each["advice"] for each in findings.values() if each["status"] != "ok")
    if not Path("/proc/driver/nvidia/version").exists():
        assert findings["gpu", "CUDA"]["status"] == findings["gpu", "GDS"]["status"] == "missing"
        assert not findings["gpu", "CUDA"]["needs_attention"]


def test_a_missing_directory_is_told_and_the_others_are_checked(ferry, tmp_path):
    done = ferry("doctor", "--json", tmp_path / "nowhere", ferry.place, code=1)
    _, findings = findings_of(done.stdout)
    missing = findings[str(tmp_path / "nowhere"), "directory"]
    assert missing["status"] == "missing"
    assert "No such file or directory" in missing["found"]
    assert findings[str(ferry.place), "O_DIRECT"]["status"] in ("ok", "warning")


def test_a_file_is_no_directory(ferry, tmp_path):
    (tmp_path / "file").write_text("precious")
    done = ferry("doctor", "--json", tmp_path / "file", code=1)
    _, findings = findings_of(done.stdout)
    assert "Not a directory" in findings[str(tmp_path / "file"), "directory"]["found"]
    assert (tmp_path / "file").read_text() == "precious"


def test_memory_is_no_drive(ferry):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        _, findings = findings_of(ferry("doctor", "--json", place, code=1).stdout)
        assert findings[place, "file system"]["status"] == "warning"
        assert "memory, not a drive" in findings[place, "file system"]["found"]
        assert findings[place, "O_DIRECT"]["status"] == "warning"
        assert not os.listdir(place)


def test_a_slow_scheduler_is_found_and_the_advice_cures_it(ferry, tmp_path):
    with loop_mount(tmp_path) as point:
        source = subprocess.run(
            ["findmnt", "-no", "SOURCE", point], capture_output=True, text=True, check=True
        ).stdout.strip()
        scheduler = Path("/sys/block", Path(source).name, "queue/scheduler")
        if "bfq" not in scheduler.read_text():
            pytest.skip("this kernel has no bfq")
        before = scheduler.read_text().split("[")[1].split("]")[0]
        scheduler.write_text("bfq")
        try:
            _, findings = findings_of(ferry("doctor", "--json", point, code=1).stdout)
            finding = findings[str(point), "scheduler"]
            assert (finding["status"], "bfq" in finding["found"]) == ("warning", True)
            assert finding["advice"] == f"as root: echo none > {scheduler}"
            subprocess.run(finding["advice"].removeprefix("as root: "), shell=True, check=True)
            _, findings = findings_of(run([PROGRAM, "doctor", "--json", point], ferry.env).stdout)
            assert findings[str(point), "scheduler"]["status"] == "ok"
        finally:
            scheduler.write_text(before)


def test_a_read_only_file_system_is_told(ferry, tmp_path):
    with loop_mount(tmp_path, size="64M", options="loop,ro") as point:
        _, findings = findings_of(ferry("doctor", "--json", point, code=1).stdout)
        assert findings[str(point), "directory"]["advice"] == "the file system is mounted read-only"
        assert findings[str(point), "file system"]["status"] == "missing"


def test_a_low_memlock_limit_is_told(ferry):
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
        os.chmod(place, 0o777)
        user = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--"]
        if run([*user, PROGRAM, "--version"], ferry.env).returncode != 0:
            pytest.skip("an ordinary user cannot start the program where it lies")
        done = run(
            ["prlimit", "--memlock=1048576", *user, PROGRAM, "doctor", "--json", place], ferry.env
        )
        _, findings = findings_of(done.stdout)
        assert done.returncode == 1
        assert findings["machine", "memlock"]["found"] == "64 MiB cannot be locked; limit 1 MiB"
        assert "LimitMEMLOCK" in findings["machine", "memlock"]["advice"]
        assert not os.listdir(place)


@pytest.mark.parametrize("call", ["io_uring_setup", "io_uring_enter", "io_uring_register"])
def test_io_uring_behind_a_filter_is_told(ferry, call):
    done = run(
        [sys.executable, WITHOUT_IO_URING, call, PROGRAM, "doctor", "--json", ferry.place],
        ferry.env,
    )
    _, findings = findings_of(done.stdout)
    assert done.returncode == 1
    finding = findings["machine", "io_uring"]
    assert (finding["status"], finding["needs_attention"]) == ("missing", True)
    assert finding["found"].startswith(f"{call} is blocked by a seccomp filter")
    assert findings[str(ferry.place), "O_DIRECT"]["status"] == "ok"  # another engine moves it


def test_colours_only_on_a_terminal_that_wants_them(ferry):
    if shutil.which("script") is None:
        pytest.skip("needs script, of bsdutils")
    words = ["script", "-qec", f"{PROGRAM} doctor {ferry.place}", "/dev/null"]
    assert "\033[32m" in run(words, ferry.env).stdout
    assert "\033" not in run(words, ferry.env | {"NO_COLOR": "1"}).stdout


def test_an_unknown_flag_is_wrong_usage(ferry):
    assert "did you mean --json?" in ferry("doctor", "--jsn", code=2).stderr
