"""The jobs of `make compare` with many threads and many drives. The figures are not tests."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import compare  # noqa: E402
from benchmarks.jobs.job import MIB, Ferry, NotHere, run  # noqa: E402
from benchmarks.jobs.progress import Progress  # noqa: E402
from benchmarks.rows import bench, scale_rows  # noqa: E402
from benchmarks.rows.row import NO_TIME  # noqa: E402


def test_threads_share_the_handle_of_a_job(build_dir, tmp_path):
    ferry = Ferry(build_dir / "benchmarks" / "ferry_job")
    for mode in ("sync", "queue"):
        report = run(
            [str(ferry.program), "--file", str(tmp_path / "data"), "--mode", mode]
            + ["--bytes", "4K", "--file-bytes", "1M", "--count", "10", "--threads", "3"]
            + ["--warm-up", "1"]
        )
        assert report["bytes"] == 3 * 10 * 4096
        assert report["stats"]["operations"] == 2 * 3 * 10


def test_a_queued_operation_has_its_time_and_its_switches(build_dir, tmp_path):
    ferry = Ferry(build_dir / "benchmarks" / "ferry_job")
    words = ("--in-flight", "1")
    sample = ferry.calls(tmp_path / "data", "queue", 4096, MIB, 100, "pinned", 1, *words)
    assert sample.call_us_median > 0
    assert 0 < sample.switches < 100


def test_a_job_uses_several_drives(build_dir, tmp_path):
    ferry = Ferry(build_dir / "benchmarks" / "ferry_job")
    files, sizes = [tmp_path / "a", tmp_path / "b"], [MIB, 3 * MIB]
    words = ("--piece-bytes", "1M", "--warm-up", "0")
    assert ferry.drives(files, sizes, 1, *words).gb_per_second > 0
    assert [file.stat().st_size for file in files] == sizes
    assert ferry.drives(files[:1], [MIB], 1, "--beside", str(files[1]), *words).gb_per_second > 0
    folders = [tmp_path / "x", tmp_path / "y"]
    for folder in folders:
        folder.mkdir()
    for direction in ("write", "read"):
        assert ferry.swap(folders, direction, MIB, 3, 1).gb_per_second > 0


# In a process of its own, because its mounts end with it.
LOOP_JOB = """
import os, subprocess, sys
from pathlib import Path
from benchmarks.jobs.job import NotHere
from benchmarks.jobs.loop_drives import LoopDrives, Throttles

folder = Path(sys.argv[1])
try:
    drives = LoopDrives(folder)
    point = drives.add("slow", 64 << 20, 50_000_000)
except NotHere as error:
    print(error)
    sys.exit(77)
number = os.stat(point).st_dev
device = f"{os.major(number)}:{os.minor(number)}"
group = drives.throttles.folder
for way in ("read", "write"):
    assert f"{device} 50000000" in (group / f"blkio.throttle.{way}_bps_device").read_text()
inside = "cat /proc/self/cgroup"
with drives.throttled():
    assert group.name in subprocess.getoutput(inside)
assert group.name not in subprocess.getoutput(inside)
(point / "file").write_bytes(bytes(1 << 20))
print(subprocess.getoutput("losetup --noheadings --output NAME,BACK-FILE"))
if sys.argv[2] == "remove":
    drives.remove()
    drives.remove()
    assert not group.exists()
    assert str(folder) not in Path("/proc/mounts").read_text()
    assert str(folder) not in subprocess.getoutput("losetup --list --output BACK-FILE")
    assert os.listdir(folder) == []
else:
    Throttles.remove(drives.throttles)
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("how", ["remove", "kill"])
def test_loop_drives_leave_nothing_behind(tmp_path, how):
    command = [sys.executable, "-c", LOOP_JOB, tmp_path / "drives", how]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.returncode == (0 if how == "remove" else -9), done.stderr
    assert str(tmp_path) in done.stdout, "it saw its own loop device"
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    for _ in range(100):  # the kernel ends the mounts of a killed process after its end
        listed = subprocess.run(
            ["losetup", "-l", "-O", "BACK-FILE"], capture_output=True, text=True
        )
        if str(tmp_path) not in listed.stdout:
            break
        time.sleep(0.05)
    assert str(tmp_path) not in listed.stdout


def test_drives_that_this_machine_cannot_make_cost_their_rows_only(monkeypatch, tmp_path):
    asked = []

    def refuse(folder):
        asked.append(folder)
        raise NotHere("loop devices need root")

    monkeypatch.setattr(scale_rows, "LoopDrives", refuse)
    rows = scale_rows.loop_rows(bench.Bench(tmp_path, tmp_path / "none", False, Progress()))
    failed = {}
    assert compare.rehearse(rows, failed, Progress()) == []
    assert set(failed.values()) == {"not possible here: loop devices need root"}
    assert len(failed) == len(rows) and len(asked) == 1
    assert not compare.went_wrong(failed, set())
    assert compare.went_wrong({"a": "our side: it broke"}, {"a"})
    assert compare.went_wrong({"a": "fio broke"}, set())
    assert not compare.went_wrong({"a": "the peer broke", "b": NO_TIME}, {"a"})


def test_the_figures_without_fio_run(build_dir, tmp_path):
    script = (
        "import sys; from benchmarks.figures import scale_figures as f;"
        "f.THREADS = (1, 2); f.THREAD_CALLS = {4096: 20}; f.GIB = 1 << 20;"
        "f.DRIVES, f.DRIVE_BYTES = 2, 4 << 20; sys.exit(f.main())"
    )
    programs = build_dir / "benchmarks"
    command = [sys.executable, "-c", script, "--dir", tmp_path, "--programs", programs]
    done = subprocess.run(
        [*command, "--pairs", "1"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "2 threads, 4 KiB, one handle / pread in threads" in done.stdout
    assert "2 drives in memory" in done.stdout
    assert os.listdir(tmp_path) == []
