"""What stats() and the trace tell of a whole iteration: who waited for whom."""

import json
import time

import pytest

torch = pytest.importorskip("torch")

import tensorferry.offload
from overlapping import adamw, deep
from programs import check_python
from tensorferry.optim.load import Load
from tensorferry.optim.stepper import Stepper
from torch import nn
from warm_python import WARM_PYTHON

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("overlap", [None, "iteration"])
def test_stats_tell_what_an_iteration_waited_for(tmp_path, monkeypatch, overlap):
    """Each sub-group waits 20 ms for its states and takes 5 ms to step."""
    model = deep(layers=4)
    optimizer = adamw(model, tmp_path, overlap, buffer_count=1, buffer_bytes=1)
    count = len(list(optimizer._sub_groups))
    step = Stepper.step
    finish = Load.wait

    def slow_step(stepper, *args):
        time.sleep(0.005)
        return step(stepper, *args)

    def slow_wait(load):
        time.sleep(0.02)
        finish(load)

    monkeypatch.setattr(Stepper, "step", slow_step)
    monkeypatch.setattr(Load, "wait", slow_wait)
    for _ in range(4):
        model(torch.randn(8, 96)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.settle()
    model(torch.randn(8, 96)).square().mean().backward()
    optimizer.step()
    stats = optimizer.stats()
    optimizer.close()
    waited, stepped = stats["waited_drive_seconds"], stats["step_seconds"]
    assert stats["waited_copies_seconds"] == 0
    assert waited >= 0.02 * count and stepped >= 0.005 * count
    assert stats["iteration_seconds"] >= waited + stepped > 0.9 * 0.025 * count


def test_weights_tell_how_long_modules_waited(tmp_path):
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    with tensorferry.offload.parameters(model, tmp_path, 3 << 20) as weights:
        before = weights.stats()["waited_seconds"]
        begun = time.monotonic()
        with torch.no_grad():
            model(torch.ones(1, 512))
        assert 0 < weights.stats()["waited_seconds"] - before < time.monotonic() - begun


TRAINING = """
import sys, torch, tensorferry.optim
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
optimizer = tensorferry.optim.AdamW(model.parameters(), nvme_path=sys.argv[1], overlap="iteration",
                                    buffer_count=2, buffer_bytes=1)
tensorferry.optim.step.Step.is_next_loaded = lambda step: False  # the drive is slow
for _ in range(4):
    loss = model(torch.randn(8, 256)).square().mean()
    with optimizer.last_backward():
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model[0].weight.norm()
optimizer.close()
"""


def test_the_report_draws_the_trace_of_a_run(tmp_path):
    report = pytest.importorskip("tensorferry.report")
    trace = tmp_path / "trace.json"
    check_python(TRAINING, tmp_path, python=WARM_PYTHON, TENSORFERRY_TRACE=str(trace))
    names = [event["name"] for event in json.loads(trace.read_text())]
    assert names.count("iteration") == 3 and names.count("backward pass") == 4
    assert {"AdamW step", "wait for states", "optimizer step"} <= set(names)
    # Whoever computes what a step has left: a module, and a look at a weight.
    assert {"step behind forward", "module waits for step", "reader waits for step"} <= set(names)
    page = tmp_path / "page.html"
    assert report.main([str(trace), "-o", str(page)]) == 0
    assert "3 iterations" in page.read_text()
