"""The jobs of `make compare` about models of transformers. The figures are not tests."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def jobs(monkeypatch):
    """The jobs on small models."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "jobs"))
    import model_jobs

    small = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=3)
    monkeypatch.setattr(model_jobs, "MODEL", model_jobs.MODEL | small)
    monkeypatch.setattr(model_jobs, "PAST", 1024)
    monkeypatch.setattr(model_jobs, "PAST_BYTES", 16 * 2 * 1024 * 512 * 4)
    yield model_jobs
    torch.set_grad_enabled(True)
    sys.modules.pop("model_jobs")


@pytest.mark.parametrize("side", ["tensorferry", "transformers", "accelerate"])
def test_all_sides_run_the_model(tmp_path, jobs, side):
    made = jobs.SIDES[side](str(tmp_path))
    found = made.forward(tokens=1, repeat=2)
    assert found["repetition_seconds"] > 0
    assert (found["gb_per_second"] > 0) == (side == "tensorferry")
    if side != "accelerate":
        assert made.first_token()["repetition_seconds"] > 0
    made.release()


def test_a_long_past_is_half_on_the_drive(tmp_path, jobs):
    made = jobs.Tensorferry(str(tmp_path))
    half, whole = (made.generate(share=share, repeat=2) for share in (0.5, 1.2))
    assert half["gb_per_second"] > 0 and whole["gb_per_second"] == 0
    assert half["memory_bytes"] <= jobs.PAST_BYTES // 2
