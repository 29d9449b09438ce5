"""Snapshots of several ranks: all of them or none, and resumed by as many."""

import os
from pathlib import Path

import pytest
from forked_ranks import ranks_of

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def run():
    with ranks_of(os.path.join(os.path.dirname(__file__), "snapshot_job.py")) as run:
        yield run


def test_two_ranks_resume_with_the_same_bits(run, tmp_path):
    run(2, "same_bits", str(tmp_path))


@pytest.mark.parametrize("taken, resumed", [(2, 1), (1, 2), (2, 3)])
def test_another_number_of_ranks_is_refused(run, tmp_path, taken, resumed):
    run(taken, "take", str(tmp_path))
    for told, number in run(resumed, "resume", str(tmp_path)):
        assert f"was taken by {taken} ranks, and this run has {resumed}" in told
        assert number == 0


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(
    "owner, name", [("space", "snapshot"), ("folder", "write_links"), ("folder", "write_manifest")]
)
def test_what_fails_on_one_rank_fails_on_all_and_leaves_nothing(
    run, tmp_path, owner, name, failing
):
    run(2, "fails_on", str(tmp_path), owner, name, failing)


def test_a_folder_that_cannot_be_read_fails_on_all(run, tmp_path):
    run(2, "fails_on", str(tmp_path), "folder", "remains", 0)


def test_a_commit_that_fails_frees_nothing_on_other_ranks(run, tmp_path):
    run(2, "commit_fails", str(tmp_path))


def test_all_ranks_go_on_from_an_older_snapshot_if_the_part_of_one_is_damaged(run, tmp_path):
    run(2, "take", str(tmp_path), 2)
    assert run(2, "resume", str(tmp_path)) == [[None, 2]] * 2
    Path(tmp_path, "snapshots", "snapshot-00000002", "rank-1.pt").unlink()
    assert run(2, "resume", str(tmp_path)) == [[None, 1]] * 2
    Path(tmp_path, "snapshots", "snapshot-00000001", "rank-0.json").write_text("{}")
    for told, number in run(2, "resume", str(tmp_path)):
        assert "rank-1.pt" in told and "rank-0.json is damaged" in told and number == 0
