"""The jobs of `make compare` about whole iterations. The figures are not tests."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
SHAPES = {"little": (4, 64, 4096), "much": (4, 128, 4096)}  # 8 and 16 MiB are saved


@pytest.fixture
def jobs(monkeypatch):
    """The jobs on small models."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "jobs"))
    import iteration_jobs

    monkeypatch.setattr(iteration_jobs, "LAYERS", 3)
    monkeypatch.setattr(iteration_jobs, "WIDTH", 64)
    monkeypatch.setattr(iteration_jobs, "SHAPES", SHAPES)
    yield iteration_jobs
    sys.modules.pop("iteration_jobs")
    sys.modules.pop("offload_jobs", None)


def test_torch_iterates_after_a_forward_pass_alone(jobs, tmp_path):
    made = jobs.SIDES["torch"](str(tmp_path))
    for _ in range(2):
        assert made.forward(rows=2, repeat=2)["repetition_seconds"] > 0
        assert made.iterate(rows=2, repeat=2)["repetition_seconds"] > 0
        made.release()
    assert made.activate(shape="little", repeat=1)["repetition_seconds"] > 0


@pytest.mark.parametrize("stores_weights", [False, True])
def test_ours_iterates_with_each_overlap(jobs, tmp_path, stores_weights):
    made = jobs.SIDES["tensorferry"](str(tmp_path))
    for overlap in ("", "backward", "iteration"):
        found = made.iterate(2, 2, overlap=overlap, stores_weights=stores_weights)
        assert found["repetition_seconds"] > 0 and found["gb_per_second"] > 0
    made.release()


def test_activations_have_a_quarter_of_what_their_own_shape_saves(jobs, tmp_path):
    made = jobs.SIDES["tensorferry"](str(tmp_path))
    for shape in ("little", "much", "much", "little"):
        found = made.activate(shape=shape, repeat=1)
        assert found["gb_per_second"] > 0
        assert made.activations.stats()["buffer_bytes"] == jobs.saved_bytes(shape) // 4
    made.release()
