"""The jobs of `make compare` about saves in the background and snapshots. The figures are not
tests."""

import os
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.jobs.progress import Progress  # noqa: E402
from benchmarks.rows import bench, saving_rows  # noqa: E402

SIZE = 4 << 20
PARAMETERS = 80_000


class Here:
    """All peers in this environment. No job is started."""

    def python(self, _name):
        return Path(sys.executable)


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "jobs"))
    import saving_jobs

    threads = torch.get_num_threads()
    monkeypatch.setattr(saving_jobs, "ROWS", 16)
    made = saving_jobs.Jobs("run", str(tmp_path))
    yield made
    made.release()
    torch.set_num_threads(threads)
    sys.modules.pop("saving_jobs")


def test_saves_are_timed_and_leave_nothing(jobs):
    for saved in (False, True):
        assert jobs.compute(SIZE, 3, saved)["repetition_seconds"] > 0
    assert jobs.call(SIZE)["repetition_seconds"] > 0
    assert jobs.copy(SIZE)["repetition_seconds"] > 0
    assert os.listdir(jobs.folder) == []


def test_an_aged_run_has_taken_its_snapshots_before_it_is_timed(jobs):
    assert jobs.train_on(PARAMETERS, 2, steps=30)["repetition_seconds"] > 0
    names = sorted(os.listdir(Path(jobs.folder) / "snapshots"))
    assert [name for name in names if name.startswith("snapshot-")] == [
        "snapshot-00000002",
        "snapshot-00000003",
    ]
    jobs.train_on(PARAMETERS, 2, steps=30)  # is old enough
    assert sorted(os.listdir(Path(jobs.folder) / "snapshots")) == names


@pytest.mark.parametrize("checksums", [False, True])
def test_steps_and_snapshots_are_timed(jobs, checksums):
    assert jobs.train(PARAMETERS, 2, checksums=checksums)["repetition_seconds"] > 0
    assert jobs.take(PARAMETERS)["repetition_seconds"] > 0


def test_a_first_look_has_no_rows_of_minutes(tmp_path):
    def names(quick):
        made = bench.Bench(tmp_path, tmp_path / "ferry_job", quick, Progress())
        return [row.name for row in saving_rows.saving_rows(made, Here())]

    assert len(names(True)) == 2 and len(names(False)) == 5
