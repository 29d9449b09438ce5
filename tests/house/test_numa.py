"""What the library asks of the kernel for NUMA nodes, as strace sees it. This machine may have one
node, so the library sees another sysfs, in a mount namespace of its own."""

import os
import re
import shutil
import subprocess

import pytest
from house import built_job

ASKED = ("sched_setaffinity", "set_mempolicy", "mbind")


@pytest.fixture
def place(build_dir):
    """A folder on the disk of the build, which has O_DIRECT."""
    path = build_dir / "numa"
    path.mkdir(exist_ok=True)
    yield path
    shutil.rmtree(path)


def asked_by(out, *command):
    """The calls for NUMA nodes that a program makes, and that succeed: lines of strace."""
    if not shutil.which("strace"):
        pytest.skip("strace is not installed")
    strace = ["strace", "-f", "-e", f"trace={','.join(ASKED)}", "-e", "signal=none", "-o", out]
    done = subprocess.run(
        list(map(str, [*strace, *command])), capture_output=True, text=True, timeout=120
    )
    if "ptrace" in done.stderr.lower() or "mount: " in done.stderr or "unshare: " in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in out.read_text().splitlines() if "(" in line]
    refused = [line for line in lines if re.search(r"= -1 (EPERM|ENOSYS)", line)]
    if refused:
        pytest.skip(f"not permitted here: {refused[0]}")
    return lines


def names(lines):
    return {line.split("(")[0].split()[-1] for line in lines}


def sysfs(tmp_path, place, nodes):
    """The words that run a command where the disk under `place` is on node 0 of several."""
    number = place.stat().st_dev
    number = f"{os.major(number)}:{os.minor(number)}"
    texts = {
        f"block/{number}/dev": number,
        f"block/{number}/uevent": "DEVNAME=disk",
        f"block/{number}/device/numa_node": "0",
        "node/online": nodes,
        "node/node0/cpulist": str(min(os.sched_getaffinity(0))),
        "node/node1/cpulist": "",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    script = (
        'mount --bind "$0/block" /sys/dev/block && mount --bind "$0/node" /sys/devices/system/node'
        ' && exec "$@"'
    )
    rights = "-m" if os.geteuid() == 0 else "-Urm"
    return ["unshare", rights, "sh", "-c", script, tmp_path]


def test_the_tests_of_os_make_the_real_calls(build_dir, tmp_path):
    program = build_dir / "src" / "os_test"
    if not program.is_file():
        pytest.skip(f"{program} is not built: run `make` first")
    claim = "--gtest_filter=Numa.the_kernel_accepts_the_calls"
    lines = asked_by(tmp_path / "strace", program, claim)
    assert names(lines) == set(ASKED)
    assert all(line.endswith("= 0") for line in lines), "\n".join(lines)


def test_workers_and_slots_are_on_the_node_of_the_drive(build_dir, place, tmp_path):
    job = built_job(build_dir, "system_calls_job")
    elsewhere = sysfs(tmp_path, place, "0-1")
    lines = asked_by(tmp_path / "strace", *elsewhere, job, "mixed", place / "a", place / "b")
    assert names(lines) == set(ASKED)
    processor = min(os.sched_getaffinity(0))
    for line in lines:
        assert line.endswith("= 0"), line
        if "sched_setaffinity" in line:
            assert re.search(rf"\[{processor}( \.\.\.)?\]\)", line), line
        else:
            assert re.search(r"MPOL_PREFERRED, \[0x0*1\b", line), line
    main = (tmp_path / "strace").read_text().splitlines()[-1].split()[0]  # ends last
    assert not [line for line in lines if line.startswith(f"{main} ")]


@pytest.mark.parametrize("nodes", ["0", None], ids=["another_sysfs", "this_machine"])
def test_on_one_node_nothing_is_asked(build_dir, place, tmp_path, nodes):
    if nodes is None and len(list(os.scandir("/sys/bus/node/devices"))) > 1:
        pytest.skip("this machine has several nodes")
    job = built_job(build_dir, "system_calls_job")
    where = [] if nodes is None else sysfs(tmp_path, place, nodes)
    assert not asked_by(tmp_path / "strace", *where, job, "mixed", place / "a", place / "b")
