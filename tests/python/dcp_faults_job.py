"""Ranks that save to one folder while they are killed, or while their drive loses power.

Prints how often the old checkpoint was there after that, and how often the new one. Fails if one
of them was not whole, or if a save was lost that had returned.

    dcp_faults_job.py kills FOLDER LAYOUT ROUNDS
    dcp_faults_job.py power_cuts IMAGE POINT LAYOUT ROUNDS    (an ext4, which is not mounted)
"""

import fcntl
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import dcp_job
import torch
import torch.distributed.checkpoint as dcp
from tensorferry.dcp import Reader, Writer

sys.path.append(str(Path(__file__).parents[1] / "shared"))
from loop_mount import mount_anew, unmount

EXT4_IOC_SHUTDOWN = 0x8004587D  # in no header
JOURNAL_FLUSHED, JOURNAL_LOST = 1, 2


def value_in(folder):
    """The step that the checkpoint is of. All of it is there, and of that step."""
    state = dcp_job.full_tensors(0)
    dcp.load(state, storage_reader=Reader(folder), no_dist=True)
    step = int(state["scalar"])
    for name, tensor in dcp_job.full_tensors(step).items():
        assert torch.equal(tensor, state[name]), name
    return step


@contextmanager
def silence():
    """What survivors complain about is expected."""
    spoken, silent = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 2)
    try:
        yield
    finally:
        os.dup2(spoken, 2)
        os.close(spoken)
        os.close(silent)


def save_for_ever(mesh, folder, layout, first, told):
    for step in range(first, sys.maxsize):
        state = dcp_job.state_of(step, mesh)["model"]
        dcp.save(state, storage_writer=Writer(folder, layout=layout))
        if mesh.get_rank() == 0:
            os.write(told, b"%d\n" % step)


def wait_for_end_of_save(folder):
    """Returns when rank 0 is about to have the new metadata or index take the place of the old."""
    limit = time.monotonic() + 5
    while time.monotonic() < limit:
        if any(name.endswith(".tensorferry") for name in os.listdir(folder)):
            return


def kills(folder, layout, rounds):
    """One of two ranks that save for ever is killed at some moment, and soon the other.

    Every second time it is the moment that matters most, and rank 0.
    """
    rng = random.Random(11)
    step, old, new = 0, 0, 0
    for number in range(rounds):
        inner, outer = os.pipe()
        port = dcp_job.free_port()
        job = [folder, layout, step + 1, outer]
        with silence():
            ranks = [dcp_job.fork_rank(rank, 2, port, "save_for_ever", job) for rank in (0, 1)]
        os.close(outer)
        told = os.read(inner, 1 << 16)  # they have begun
        if number % 2:
            wait_for_end_of_save(folder)
        else:
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
    print(f"{rounds} kills: old {old}, new {new}")


def save_on_command(mesh, folder, layout, orders, answers):
    """Saves each step that the pipe of this rank names, and says how it went."""
    rank = mesh.get_rank()
    for _, write_end in orders:
        os.close(write_end)  # so that the end of the parent ends the ranks
    while line := os.read(orders[rank][0], 100):
        try:
            state = dcp_job.state_of(int(line), mesh)["model"]
            dcp.save(state, storage_writer=Writer(folder, layout=layout))
            os.write(answers[rank][1], b"saved")
        except BaseException:  # torch's is no Exception
            os.write(answers[rank][1], b"failed")


def cut_power(point, how):
    """From now on nothing reaches the drive."""
    folder = os.open(point, os.O_RDONLY)
    fcntl.ioctl(folder, EXT4_IOC_SHUTDOWN, struct.pack("I", how))
    os.close(folder)


def power_cuts(image, point, layout, rounds):
    """The drive loses power at some moment of a save by two ranks, and comes back."""
    rng = random.Random(12)
    orders, answers = [os.pipe() for _ in range(2)], [os.pipe() for _ in range(2)]
    folder = os.path.join(point, "checkpoint")
    job = [folder, layout, orders, answers]
    port = dcp_job.free_port()
    ranks = [dcp_job.fork_rank(rank, 2, port, "save_on_command", job) for rank in (0, 1)]
    for read_end, _ in orders:
        os.close(read_end)
    for _, write_end in answers:
        os.close(write_end)

    def order(step):
        for _, write_end in orders:
            os.write(write_end, b"%d" % step)

    def wait():
        return [os.read(read_end, 100) for read_end, _ in answers]

    subprocess.run(["mount", "-o", "loop", image, point], check=True)
    try:
        step, saved, lost, usual = 1, 0, 0, 0.0
        for _ in range(3):  # the first save also opens what later ones use
            begun = time.monotonic()
            order(step)
            assert wait() == [b"saved", b"saved"]
            usual = time.monotonic() - begun
        for number in range(rounds):
            order(step + 1)
            time.sleep(rng.uniform(0, 1.5 * usual))
            known = bool(select.select([answers[0][0]], [], [], 0)[0])
            cut_power(point, JOURNAL_FLUSHED if number % 3 == 0 else JOURNAL_LOST)
            assert wait()[0] == b"saved" or not known
            mount_anew(image, point)
            found = value_in(folder)
            assert found in (step, step + 1), (number, step, found)
            assert found > step or not known, f"cut {number}: a save was lost that had returned"
            saved, lost, step = saved + known, lost + (found == step), found
    finally:
        for _, write_end in orders:
            os.close(write_end)
        ended = [os.waitpid(rank, 0)[1] for rank in ranks]
        unmount(point)
    assert ended == [0, 0]
    print(f"{rounds} power cuts: old {lost}, new {rounds - lost}, returned before {saved}")


dcp_job.save_for_ever, dcp_job.save_on_command = save_for_ever, save_on_command

if __name__ == "__main__":
    torch.set_num_threads(1)  # OpenMP does not survive a fork
    globals()[sys.argv[1]](*sys.argv[2:-1], int(sys.argv[-1]))
