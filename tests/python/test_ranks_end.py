"""A rank that fails ends all ranks soon, and torchrun names it and its error."""

import re
import time

import pytest
from drives import loop_mount
from elastic import start_torchrun

pytest.importorskip("torch")

ALONE = ["--standalone", "--nproc-per-node", "2"]
MOST_SECONDS = 30  # from the fault to the end of the last process


def failed_run(folder, drive, fault):
    """What torchrun wrote about a run that a fault has ended."""
    process = start_torchrun(ALONE, folder, drive, fault, log=folder / "log")
    try:
        assert process.wait(timeout=120) != 0
    finally:
        process.kill()
        process.wait()
    begun = float((folder / "fault").read_text())
    assert time.time() - begun < MOST_SECONDS
    return (folder / "log").read_text()


def failure_of(log, rank):
    """What torchrun says about a rank in its table of failures.

    It calls the earliest failure the root cause, by clocks of one second: which of two ranks that
    end within one look of torchrun comes first there is chance.
    """
    table = log[log.index("Failures:") :]
    parts = re.split(r"^\[\d+\]:$", table, flags=re.MULTILINE)
    (part,) = (part for part in parts if re.search(rf"^  rank +: {rank} ", part, re.MULTILINE))
    return part


@pytest.mark.parametrize("fault, word", [("end", "OSError"), ("full", "No space left")])
def test_a_drive_of_one_rank_that_fails_ends_all_with_its_error(tmp_path, fault, word):
    with loop_mount(tmp_path, size="128M") as drive:
        log = failed_run(tmp_path, drive, fault)
    assert word in failure_of(log, 1), log


def test_a_rank_that_is_killed_ends_all(tmp_path):
    log = failed_run(tmp_path, tmp_path, "kill")
    assert "Signal 9" in failure_of(log, 1), log
