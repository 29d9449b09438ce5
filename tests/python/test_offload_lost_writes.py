"""Weights that a step has computed and that did not reach the drive: older ones are never used."""

import contextlib
import time

import pytest

torch = pytest.importorskip("torch")

import tensorferry.offload
import tensorferry.optim
from drives import overbooked_drive
from offload_models import nothing_is_in_use

MiB = 1 << 20
WIDTH = 1024
LAYERS = 4


def make_model():
    torch.manual_seed(1)
    layers = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
    return torch.nn.Sequential(*layers)


def step(model, optimizer, seed):
    torch.manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randn(2, WIDTH)).square().mean().backward()
    optimizer.step()


def outputs(model):
    with torch.no_grad():
        return model(torch.ones(1, WIDTH))


class Run:
    """A model with weights on a drive, an optimizer whose states are on another, and their twins in
    memory."""

    def __init__(self, tmp_path, drive, max_cpu_bytes, kind):
        self.model, self.twin = make_model(), make_model()
        self.weights = tensorferry.offload.parameters(self.model, drive, max_cpu_bytes)
        (tmp_path / "states").mkdir()
        self.optimizer = tensorferry.optim.offload(
            kind(self.model.parameters()),
            tmp_path / "states",
            pipeline_write=True,
            buffer_count=2,
            buffer_bytes=24 * MiB,
        )
        self.reference = kind(self.twin.parameters())

    def step(self, seed):
        step(self.model, self.optimizer, seed)
        step(self.twin, self.reference, seed)

    def end_writes(self):
        """Until they have failed, what is being written is read from where it is written from."""
        while not all(operation.done() for operation in self.optimizer._store.writes):
            time.sleep(0.01)

    def check(self):
        assert torch.equal(outputs(self.model), outputs(self.twin))
        assert nothing_is_in_use(self.weights)

    def saved(self):
        state = {name: value.clone() for name, value in self.twin.state_dict().items()}
        return state, self.reference.state_dict()

    def close(self):
        with contextlib.suppress(OSError):
            self.optimizer.close()
        self.weights.close()


KINDS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_pass_after_a_write_that_failed_says_so(tmp_path, kind):
    with overbooked_drive(tmp_path) as (drive, fill), contextlib.ExitStack() as stack:
        run = stack.enter_context(contextlib.closing(Run(tmp_path, drive, 5 * MiB, KINDS[kind])))
        run.check()
        fill()
        run.step(1)  # which cannot know yet
        run.end_writes()
        for use in (
            lambda: outputs(run.model),
            lambda: outputs(run.model),
            lambda: run.model[LAYERS - 1](torch.ones(1, WIDTH)),
            lambda: run.weights.gather(run.model[LAYERS - 1]).__enter__(),
            lambda: run.weights.close(restore=True),
        ):
            with pytest.raises(RuntimeError, match="older one: load a checkpoint"):
                use()
            assert nothing_is_in_use(run.weights)
        with pytest.raises(OSError):
            run.model.state_dict()
        with pytest.raises(OSError):
            run.optimizer.step()


def test_a_forward_pass_beside_a_write_that_fails_is_right_or_says_so(tmp_path):
    with overbooked_drive(tmp_path) as (drive, fill), contextlib.ExitStack() as stack:
        run = stack.enter_context(contextlib.closing(Run(tmp_path, drive, 5 * MiB, KINDS["SGD"])))
        fill()
        run.step(1)
        wanted = outputs(run.twin)
        for _ in range(20):
            try:
                got = outputs(run.model)
            except RuntimeError as error:
                assert "load a checkpoint" in str(error)
            else:
                assert torch.equal(got, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_brings_the_weights_back(tmp_path, kind):
    with overbooked_drive(tmp_path) as (drive, fill), contextlib.ExitStack() as stack:
        run = stack.enter_context(contextlib.closing(Run(tmp_path, drive, 5 * MiB, KINDS[kind])))
        fill()
        run.step(1)
        run.end_writes()
        with pytest.raises(RuntimeError, match="load a checkpoint"):
            outputs(run.model)
        (tmp_path / "tmpfs/filler").unlink()
        weights, states = run.saved()
        first = {"0.weight": weights.pop("0.weight")}
        run.model.load_state_dict(weights, strict=False)
        with pytest.raises(RuntimeError, match="load a checkpoint"):  # one is missing
            outputs(run.model)
        assert torch.equal(*(m[1](torch.ones(1, WIDTH)) for m in (run.model, run.twin)))
        run.optimizer.load_state_dict(states)
        with pytest.raises(RuntimeError, match="load a checkpoint"):  # nor is that stepped
            run.optimizer.step()
        run.model.load_state_dict(first, strict=False)
        run.optimizer.load_state_dict(states)
        run.check()
        for seed in range(2, 4):
            run.step(seed)
            run.check()


def test_weights_that_are_in_memory_are_used_though_they_could_not_be_written(tmp_path):
    with overbooked_drive(tmp_path) as (drive, fill), contextlib.ExitStack() as stack:
        run = stack.enter_context(contextlib.closing(Run(tmp_path, drive, 64 * MiB, KINDS["SGD"])))
        run.check()
        fill()
        run.step(1)
        run.check()
        run.end_writes()
        run.check()
        with pytest.raises(OSError):
            run.optimizer.step()
