"""Kills, full drives and failing syncs under tensorferry.dcp: the old checkpoint or the new one."""

import errno
import os
import shutil
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp
from drives import loop_mount, memory_mount
from programs import FOLDERS, check_python, runs
from tensorferry.dcp import Reader, Writer
from torch.distributed.checkpoint.api import CheckpointException

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def save(value, folder, count=100_000, **options):
    state = {"x": torch.full((count,), float(value)), "step": torch.tensor(value)}
    dcp.save(state, storage_writer=Writer(folder, **options))


def saved_in(folder, count=100_000):
    """The value of the checkpoint, which is whole."""
    state = {"x": torch.zeros(count), "step": torch.tensor(0)}
    dcp.load(state, storage_reader=Reader(folder))
    value = int(state["step"])
    assert torch.equal(state["x"], torch.full((count,), float(value)))
    return value


def names_in(folder):
    return sorted(os.listdir(folder))


# Two ranks save for ever; one of them is killed at some moment, and soon the other.
KILLER = """
import os, random, signal, sys, time
sys.path += sys.argv[3].split(os.pathsep)
import torch, torch.distributed.checkpoint as dcp
import dcp_job
from tensorferry.dcp import Reader, Writer

def forever(mesh, folder, layout, first, told):
    step = first
    while True:
        state = dcp_job.state_of(step, mesh)["model"]
        dcp.save(state, storage_writer=Writer(folder, layout=layout))
        if mesh.get_rank() == 0:
            os.write(told, b"%d\\n" % step)
        step += 1

def value_in(folder):
    state = dcp_job.full_tensors(0)
    dcp.load(state, storage_reader=Reader(folder), no_dist=True)
    step = int(state["scalar"])
    for name, tensor in dcp_job.full_tensors(step).items():
        assert torch.equal(tensor, state[name]), name
    return step

dcp_job.forever = forever
torch.set_num_threads(1)  # OpenMP does not survive a fork
folder, layout, rounds, rng = sys.argv[1], sys.argv[4], int(sys.argv[2]), random.Random(11)
step, old, new = 0, 0, 0
for number in range(rounds):
    inner, outer = os.pipe()
    silent = os.open(os.devnull, os.O_WRONLY)
    port = dcp_job.free_port()
    spoken = os.dup(2)
    os.dup2(silent, 2)  # survivors complain
    job = [folder, layout, step + 1, outer]
    ranks = [dcp_job.fork_rank(rank, 2, port, "forever", job) for rank in (0, 1)]
    os.dup2(spoken, 2)
    for descriptor in (spoken, silent, outer):
        os.close(descriptor)
    told = os.read(inner, 1 << 16)  # they have begun
    time.sleep(rng.uniform(0, 0.1))
    rng.shuffle(ranks)
    for rank in ranks:
        os.kill(rank, signal.SIGKILL)
        time.sleep(rng.choice([0, 0.02]))
    for rank in ranks:
        os.waitpid(rank, 0)
    while more := os.read(inner, 1 << 16):
        told += more
    os.close(inner)
    acknowledged = int(told.split()[-1])
    step = value_in(folder)
    assert step in (acknowledged, acknowledged + 1), (step, acknowledged)
    old, new = old + (step == acknowledged), new + (step > acknowledged)
print(f"{rounds} kills: {old} left the old one, {new} the new one")
"""


@pytest.mark.parametrize("layout, rounds", [("torch", 40), ("huggingface", 10)])
def test_a_kill_of_a_rank_leaves_the_old_checkpoint_or_the_new_one(tmp_path, layout, rounds):
    arguments = (tmp_path, runs(rounds), FOLDERS, layout)
    check_python(KILLER, *arguments, GLOO_SOCKET_IFNAME="lo", timeout=1000)
    save(1, tmp_path, layout=layout)
    assert len(names_in(tmp_path)) == 2  # what those that were killed have left is gone
    assert saved_in(tmp_path) == 1


@pytest.mark.parametrize("layout", ["torch", "huggingface"])
@pytest.mark.parametrize("mount", [memory_mount, loop_mount])
def test_a_full_drive_leaves_the_old_checkpoint_and_works_again(tmp_path, mount, layout):
    with mount(tmp_path, size="48M") as point:
        folder = point / "checkpoint"
        save(1, folder, layout=layout)
        old = names_in(folder)
        filler = point / "filler"
        with open(filler, "wb") as out:
            free = os.statvfs(point).f_bfree * os.statvfs(point).f_frsize
            out.write(bytes(max(0, free - (5 << 20))))
        for size in range(5 << 20, (6 << 20) + 1, 256 << 10):
            with pytest.raises(CheckpointException, match=os.strerror(errno.ENOSPC)):
                save(2, folder, size // 4, layout=layout)
            assert names_in(folder) == old
            assert saved_in(folder) == 1
        filler.unlink()
        save(3, folder, 6 << 18, layout=layout)
        assert saved_in(folder, 6 << 18) == 3
        assert len(names_in(folder)) == 2


# Forks a child for each sync. strace fails the fifth one of each process: those before the save
# are of no use.
SYNCS = """
import os, sys, warnings
sys.path += sys.argv[2].split(os.pathsep)
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
from test_dcp_faults import save
for which in (1, 2, 3, 4):
    child = os.fork()
    if child == 0:
        directory = os.open(sys.argv[1], os.O_RDONLY)
        for _ in range(5 - which):
            os.fsync(directory)
        try:
            save(2, os.path.join(sys.argv[1], str(which)))
        except BaseException as error:  # torch's is no Exception
            print(which, "Input/output error" in str(error), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_every_sync_that_fails_fails_the_save(tmp_path):
    """Those of the data, the folder, the metadata, and of the folder again."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    for which in (1, 2, 3, 4):
        save(1, tmp_path / str(which))
    strace = ["strace", "-f", "-qq", "-o", os.devnull, "-e", "trace=fsync,fdatasync"]
    inject = ["-e", "inject=fsync,fdatasync:error=EIO:when=5"]
    done = subprocess.run(
        [*strace, *inject, sys.executable, "-c", SYNCS, tmp_path, FOLDERS],
        capture_output=True,
        text=True,
        timeout=200,
    )
    if "PTRACE" in done.stderr:
        pytest.skip("strace is not allowed here")
    assert done.stdout == "1 True\n2 True\n3 True\n4 True\n", done.stderr
    assert [saved_in(tmp_path / str(which)) for which in (1, 2, 3)] == [1, 1, 1]
    # The new metadata have their name; whether they keep it is up to the drive.
    assert saved_in(tmp_path / "4") == 2
    assert len(names_in(tmp_path / "4")) == 3  # so the data of both are there
    for which in (1, 2, 3, 4):
        save(3, tmp_path / str(which))
        assert saved_in(tmp_path / str(which)) == 3
        assert len(names_in(tmp_path / str(which))) == 2
