"""Runs that are killed at any moment go on from the last snapshot that they were told of, with the
same bits: on one drive, on two, and with two ranks."""

import contextlib
import os
import random
import subprocess
import threading

import pytest
from programs import runs
from ranks import rank_environments
from warm_python import WARM_PYTHON

JOB = os.path.join(os.path.dirname(__file__), "snapshot_job.py")
ENDLESS = 10_000


class Lives:
    """Starts the same run again and again. `losses` are those of each rank and step; every life
    must find the ones of the lives before."""

    def __init__(self, place, kind, drives=1, ranks=1):
        self.nvme = [place / f"nvme{number}" for number in range(drives)]
        for folder in self.nvme:
            folder.mkdir()
        self.path = place / "snapshots"
        self.kind = kind
        self.ranks = ranks
        self.losses = {}
        self.taken = 0  # the last step whose snapshot every rank was told of

    def live(self, dice, steps=ENDLESS):
        """One life. Without a number of steps it is killed, all ranks at once, soon after one of
        its snapshots."""
        environments = (
            rank_environments(self.ranks, GLOO_SOCKET_IFNAME="lo")
            if self.ranks > 1
            else [os.environ]
        )
        command = [*WARM_PYTHON, JOB, self.kind, self.path, steps, *self.nvme]
        processes = [
            subprocess.Popen(
                list(map(str, command)),
                env=environment | {"OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for environment in environments
        ]
        said = [[] for _ in processes]
        spared = dice.randrange(1, 4)  # snapshots before the kill
        try:
            for line in processes[0].stdout:
                said[0].append(line)
                spared -= line.startswith("taken")
                if spared == 0 and steps == ENDLESS:
                    break
            if steps == ENDLESS:
                threading.Event().wait(dice.random() * 0.05)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    if steps == ENDLESS:
                        process.kill()
        for rank, process in enumerate(processes):
            out, err = process.communicate(timeout=100)
            assert err == "" or self.ranks > 1, err  # gloo complains of the other rank
            said[rank] += out.splitlines()
        self._check(said)

    def _check(self, said):
        told = []
        for rank, lines in enumerate(said):
            words = [line.split() for line in lines]
            begins = [int(number) for what, number, *_ in words if what == "begins"]
            assert begins and begins[0] >= self.taken, f"a snapshot is lost: {begins, self.taken}"
            for what, *rest in words:
                if what == "step":
                    number, loss = int(rest[0]), rest[1]
                    assert self.losses.setdefault((rank, number), loss) == loss, (rank, number)
            told.append(max([int(w[1]) for w in words if w[0] == "taken"], default=self.taken))
        self.taken = max(self.taken, *told)


@pytest.mark.parametrize(
    "kind, drives, ranks, kills",
    [("bf16", 1, 1, 8), ("weights", 2, 1, 8), ("fp32", 1, 2, 4)],
)
def test_a_killed_run_goes_on_with_the_same_bits(tmp_path, kind, drives, ranks, kills):
    lives = Lives(tmp_path, kind, drives, ranks)
    dice = random.Random(5)
    for _ in range(runs(kills)):
        lives.live(dice)
    steps = lives.taken + 2
    lives.live(dice, steps)
    # A run that nobody kills computes the same.
    (tmp_path / "alone").mkdir()
    alone = Lives(tmp_path / "alone", kind, drives, ranks)
    alone.live(dice, steps)
    assert {key: alone.losses[key] for key in lives.losses} == lives.losses
