"""Several ranks: each has its states in a directory of its own, and the numbers are torch's."""

import functools
import os

import pytest
from ranks import outputs_of_ranks
from warm_python import WARM_PYTHON

JOB = os.path.join(os.path.dirname(__file__), "optim_job.py")


def run_ranks(*arguments, ranks=2):
    """What each rank printed: (lines of steps, other lines)."""
    outcomes = []
    for output in outputs_of_ranks([*WARM_PYTHON, JOB, *arguments], ranks):
        lines = output.splitlines()
        steps = [line for line in lines if line[0].isdigit()]
        outcomes.append((steps, [line for line in lines if not line[0].isdigit()]))
    return outcomes


@functools.cache
def numbers_of_torch(kind):
    """It has no directory to write to."""
    return run_ranks(kind, "torch", os.devnull)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_get_the_numbers_of_torch(tmp_path, kind):
    expected = numbers_of_torch(kind)
    got = run_ranks(kind, "tensorferry", tmp_path)
    for rank in range(2):
        assert len(got[rank][0]) == 10
        assert got[rank][0] == expected[rank][0]
    own = [lines[1][0] for lines in got]
    assert own[0] != own[1] and all("tensorferry-swap" in line for line in own)
    assert ".0." in own[0] and ".1." in own[1]
    assert os.listdir(next(tmp_path.iterdir())) == []
    for lines in got:
        refused = [line for line in lines[1] if line.startswith("refused")]
        assert len(refused) == (2 if kind == "ddp" else 0)
        assert all("as with DistributedDataParallel" in line for line in refused)


def test_gradients_on_the_drive_of_ranks_are_those_of_torch_or_refused(tmp_path):
    """FSDP2 shards them; DistributedDataParallel has them all in memory."""
    expected = numbers_of_torch("fsdp")
    got = run_ranks("fsdp", "gradients", tmp_path)
    for rank in range(2):
        assert len(got[rank][0]) == 10
        assert got[rank][0] == expected[rank][0]
        refused = [line for line in got[rank][1] if line.startswith("refused")]
        assert len(refused) == 8
        for line in refused:
            assert "DistributedDataParallel" in line and "FSDP2" in line
