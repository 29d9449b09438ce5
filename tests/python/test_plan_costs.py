"""What `tensorferry plan --check` measures, with little work."""

import json
import math
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from tensorferry.plan import costs, program  # noqa: E402

COSTS_H = Path(__file__).resolve().parents[2] / "src/bench/plan/costs.h"


@pytest.fixture
def little_work(monkeypatch):
    monkeypatch.setattr(costs, "_TENSOR_BYTES", 1 << 16)
    monkeypatch.setattr(costs, "_ELEMENTS", 3 << 12)
    monkeypatch.setattr(costs, "_SMALL_ELEMENTS", 1 << 10)
    monkeypatch.setattr(costs, "_ROUNDS", 1)
    monkeypatch.setitem(costs._PASSES, "cpu", costs._PassSample(128, 8, 32))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_every_cost_of_a_processor_is_measured(little_work, tmp_path, dtype):
    found = tmp_path / "costs.json"
    assert program.main([str(tmp_path), "--dtype", dtype, "--output", str(found)]) == 0
    measured = json.loads(found.read_text())
    named = set(re.findall(r"^  double (\w+) =", COSTS_H.read_text(), re.MULTILINE))
    assert set(measured["costs"]) == {name for name in named if not name.startswith("copy_")}
    numbers = [*measured["drive"].values(), *measured["costs"].values(), measured["flops"]]
    assert all(math.isfinite(number) and number >= 0 for number in numbers)
    assert min(*measured["drive"].values(), measured["flops"]) > 0


def test_passes_that_take_the_same_time_do_not_make_a_processor_without_limit():
    # 100 tokens more take 1 s more.
    assert costs.token_seconds(0.5, 1.5, 50, 150) == pytest.approx(0.01)
    # They take no more, or less: the GPU has waited for the program.
    for many in (0.5, 0.5001, 0.4):
        assert costs.token_seconds(0.5, many, 50, 150) == pytest.approx(many / 150)
