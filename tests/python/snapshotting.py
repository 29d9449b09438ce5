"""Runs that take snapshots: what the tests of tensorferry.snapshot train."""

import random

import pytest
import tensorferry.offload
import tensorferry.optim
import tensorferry.snapshot
import torch
from training import small_model

# Options of runs that must come back with the same bits.
KINDS = {
    "fp32": dict(),
    "bf16": dict(dtype=torch.bfloat16),  # masters cut in two
    "fp16": dict(dtype=torch.float16),  # whole masters
    "int8": dict(moments="int8"),
    "kept": dict(max_cpu_bytes="50%"),
    "weights": dict(weights=True),
    "bf16 weights": dict(weights=True, dtype=torch.bfloat16),
    "all in memory": dict(max_cpu_bytes="100%"),
    "plain": dict(plain=True),  # an optimizer of torch's
}


class Run:
    """A model, its optimizer and its scheduler. `number` counts the steps."""

    def __init__(self, nvme, dtype=torch.float32, weights=False, plain=False, seed=0, **options):
        self.model = torch.nn.Sequential(small_model(seed, dtype), torch.nn.Dropout(0.1))
        self.model.register_buffer("seen", torch.zeros(()))
        self.weights = None
        if weights:
            self.weights = tensorferry.offload.parameters(
                self.model, nvme, max_cpu_bytes=64 << 10, keep_bytes=0, checksums=True
            )
        params = self.model.parameters()
        if plain:
            self.optimizer = torch.optim.AdamW(params, lr=1e-2)
        else:
            self.optimizer = tensorferry.optim.AdamW(
                params, lr=1e-2, nvme_path=nvme, buffer_bytes=64 << 10, checksums=True, **options
            )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.7)
        self.number = 0

    def step(self):
        rows = random.randrange(3, 9)  # a random state of Python's
        dtype = next(self.model.parameters()).dtype
        loss = self.model(torch.randn(rows, 33).to(dtype)).float().pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.model.seen += 1
        self.number += 1
        return loss.item()

    def held(self):
        return dict(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)

    def take(self, path, **options):
        extra = {"number": self.number}
        return tensorferry.snapshot.take(path, **self.held(), extra=extra, **options)

    def resume(self, path, **options):
        found = tensorferry.snapshot.resume(path, **self.held(), **options)
        if found is not None:
            self.number = found.extra["number"]
        return found

    def bits(self):
        """All weights and states, copied."""
        states = self.optimizer.state_dict()["state"]
        found = {name: value.clone() for name, value in self.model.state_dict().items()}
        for number, own in states.items():
            for name, value in own.items():
                found[f"{number}.{name}"] = torch.as_tensor(value).clone()
        return found

    def stored_bytes(self):
        """Bytes of states, on the drive and in memory."""
        stats = self.optimizer.stats()
        return stats["tensor_bytes"] + stats["kept_bytes"]

    def close(self):
        if self.weights is not None:
            self.weights.close()
        if hasattr(self.optimizer, "close"):
            self.optimizer.close()


def seed_all(seed):
    torch.manual_seed(seed)
    random.seed(seed)


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def links(nvme):
    return sorted(name.name for name in nvme.glob("tensorferry-snapshots-*/*"))


@pytest.fixture
def nvme(tmp_path):
    folder = tmp_path / "nvme"
    folder.mkdir()
    return folder


@pytest.fixture
def path(tmp_path):
    return tmp_path / "snapshots"


@pytest.fixture
def make(nvme):
    """Makes runs, and closes them at the end."""
    made = []

    def new(kind="fp32", **options):
        made.append(Run(nvme, **(KINDS[kind] | options)))
        return made[-1]

    yield new
    for run in made:
        run.close()
