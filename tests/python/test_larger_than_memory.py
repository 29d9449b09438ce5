"""A model whose weights do not fit in memory trains and runs, in a memory cgroup that says so."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

JOB = Path(__file__).with_name("larger_than_memory_job.py")
MiB = 1 << 20
WEIGHTS = 1024 * MiB
MAX_CPU_BYTES = 340 * MiB

# What it comes to: 212 MiB for Python and torch, 340 for weights and 20 for their activations.
RUN_LIMIT = 672 * MiB
# Besides: 68 for the optimizer's buffers, 15 more for activations that backward needs, and three
# times the 16 of the largest layer: its gradient, the part of it that comes from the other place
# where that weight is used, and the sum. 746 in all, and a little for what is read from files.
TRAIN_LIMIT = 816 * MiB


@contextlib.contextmanager
def cgroup(limit):
    """A folder of the memory controller, which kills processes in it beyond the limit."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    at = [m[1] for m in mounts if m[2] == "cgroup" and "memory" in m[3].split(",")]
    if not at:
        pytest.skip("the memory controller of cgroup v1 is not mounted")
    folder = Path(at[0]) / f"tensorferry-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made: {error}")
    try:
        (folder / "memory.limit_in_bytes").write_text(str(limit))
        yield folder
    finally:
        folder.rmdir()


def start(mode, place, **options):
    words = [f"{name}={value}" for name, value in options.items()]
    return subprocess.Popen(
        [sys.executable, JOB, mode, str(place), *words], text=True, stdout=subprocess.PIPE
    )


def results(job):
    """What it has computed, and what else it said, once it has ended well."""
    said, _ = job.communicate(timeout=300)
    assert job.returncode == 0, f"exit {job.returncode}\n{said}"
    *computed, last = said.splitlines()
    return computed, dict(word.split("=") for word in last.split())


@pytest.mark.parametrize("mode, limit", [("run", RUN_LIMIT), ("train", TRAIN_LIMIT)])
def test_weights_of_three_times_the_limit(tmp_path, mode, limit):
    assert limit < 0.8 * WEIGHTS
    in_memory = start(mode, "memory")
    try:
        with cgroup(limit) as folder:
            options = {"limit": MAX_CPU_BYTES, "cgroup": folder}
            computed, stats = results(start(mode, tmp_path, **options))
            peak = int((folder / "memory.max_usage_in_bytes").read_text())
        expected, _ = results(in_memory)
    finally:
        in_memory.kill()
        in_memory.wait()
    assert len(computed) == 3 and computed == expected
    assert int(stats["weight_bytes"]) > 3 * MAX_CPU_BYTES
    assert int(stats["resident_bytes"]) <= MAX_CPU_BYTES
    assert stats["overflows"] == "0"
    assert peak <= limit


def test_the_limit_is_one(tmp_path):
    """Without the offload the same program is killed."""
    with cgroup(TRAIN_LIMIT) as folder:
        job = start("run", "memory", cgroup=folder)
        job.communicate(timeout=300)
        assert job.returncode == -signal.SIGKILL
