"""MemoryBudget: one number for weights and states together, and where it is spent."""

import gc
import logging

import pytest

torch = pytest.importorskip("torch")

import tensorferry
from offload_models import MODELS, Holder, make, same, train, weight_bytes
from tensorferry._memory import available
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 64
LAYERS = 24
LAYER_BYTES = 64 << 10  # of a layer in fp32
STATES = 2  # bytes of states for a byte of weights in fp32
OPTIONS = dict(buffer_count=3, buffer_bytes=400 << 10)
WARM, COUNTED = 4, 4  # iterations


class Layer(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter((torch.randn(256, WIDTH) / 1000).to(dtype))

    def forward(self, x):
        return x + x @ self.weight.t() @ self.weight


def layers(dtype=torch.float32, count=LAYERS):
    torch.manual_seed(7)
    return nn.Sequential(*(Layer(dtype) for _ in range(count)))


def iterate(model, optimizer, count):
    dtype = next(model.parameters()).dtype
    for _ in range(count):
        model(torch.ones(2, WIDTH, dtype=dtype)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


class Run:
    """A model in training, with this memory for weights and for states."""

    def __init__(self, path, weights_limit, states_limit, dtype=torch.float32):
        self.model = layers(dtype)
        self.weights = tensorferry.offload.parameters(self.model, path, weights_limit, keep_bytes=0)
        self.optimizer = tensorferry.optim.AdamW(
            self.model.parameters(), nvme_path=path, max_cpu_bytes=states_limit, **OPTIONS
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.optimizer.close()
        self.weights.close()

    def held_bytes(self):
        return (
            self.weights.stats()["kept_bytes"]
            + self.weights.stats()["buffer_bytes"]
            + self.optimizer.stats()["kept_bytes"]
        )

    def moved(self):
        both = (self.weights.stats(), self.optimizer.stats())
        return sum(own["read_bytes"] + own["written_bytes"] for own in both)

    def bytes_of_an_iteration(self, may_overflow=False):
        iterate(self.model, self.optimizer, WARM)
        self.model.state_dict()  # waits for the writes
        before = self.moved()
        iterate(self.model, self.optimizer, COUNTED)
        self.model.state_dict()
        assert may_overflow or self.weights.stats()["overflows"] == 0
        return (self.moved() - before) / COUNTED


TOTAL = LAYERS * LAYER_BYTES  # of the weights in fp32
EVERY_SHARE = pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 1.0, 1.5, 2.5, 3.5])
EVERY_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


# ---- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("share", [0.7, 1.5, 9])
def test_numbers_are_those_of_torch(tmp_path, name, share):
    model, other = make(name), make(name)
    reference = torch.optim.AdamW(other.parameters(), lr=1e-2, fused=True)
    expected, _ = train(other, 5, MODELS[name][1], reference)
    # A model of one module needs all its weights at once, and room to round them up to pages.
    budget = tensorferry.MemoryBudget(int(share * weight_bytes(model)) + (1 << 20))
    weights = tensorferry.offload.parameters(model, tmp_path, budget, units=(Holder,))
    optimizer = tensorferry.optim.AdamW(
        model.parameters(), lr=1e-2, nvme_path=tmp_path, max_cpu_bytes=budget, **OPTIONS
    )
    losses, _ = train(model, 5, MODELS[name][1], optimizer)
    same(losses, expected)
    for param, wanted in zip(model.state_dict().values(), other.state_dict().values()):
        same(param, wanted)
    optimizer.close()
    weights.close()


@EVERY_SHARE
def test_masters_are_those_of_two_numbers(tmp_path, share):
    limit = int(share * TOTAL / 2)
    results = []
    for weights_limit in (tensorferry.MemoryBudget(limit), limit):
        states_limit = 0 if weights_limit == limit else weights_limit
        with Run(tmp_path, weights_limit, states_limit, torch.bfloat16) as run:
            iterate(run.model, run.optimizer, 5)
            results.append({n: w.clone() for n, w in run.model.state_dict().items()})
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


# ---- bytes ---------------------------------------------------------------------------------------


@EVERY_SHARE
@EVERY_DTYPE
def test_memory_never_exceeds_the_number(tmp_path, share, dtype):
    budget = tensorferry.MemoryBudget(int(share * TOTAL * dtype.itemsize / 4))
    with Run(tmp_path, budget, budget, dtype) as run:
        for _ in range(WARM):
            iterate(run.model, run.optimizer, 1)
            assert run.held_bytes() <= budget.held_bytes <= budget.max_bytes
        if share < 3:  # what is left is too little for anything that is not there yet
            assert budget.max_bytes - budget.held_bytes < OPTIONS["buffer_bytes"]
    assert budget.held_bytes == 0


@EVERY_SHARE
@EVERY_DTYPE
def test_no_other_split_moves_fewer_bytes(tmp_path, share, dtype):
    """All of it for weights, or all for states but what weights need to pass through."""
    limit = int(share * TOTAL * dtype.itemsize / 4)
    passing = 2 * LAYER_BYTES * dtype.itemsize // 4
    budget = tensorferry.MemoryBudget(limit)
    with Run(tmp_path, budget, budget, dtype) as run:
        shared = run.bytes_of_an_iteration()
    with Run(tmp_path, limit, 0, dtype) as run:
        for_weights = run.bytes_of_an_iteration()
    with Run(tmp_path, passing, limit - passing, dtype) as run:
        # With late writes these weights take more memory than they have: that helps this split.
        for_states = run.bytes_of_an_iteration(may_overflow=True)
    assert shared < min(for_weights, for_states), (shared, for_weights, for_states)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_what_stays_is_neither_read_nor_written(tmp_path, share):
    limit = int(share * TOTAL)
    budget = tensorferry.MemoryBudget(limit)
    with Run(tmp_path, budget, budget) as run:
        passing = TOTAL - run.weights.stats()["kept_bytes"]
        assert passing == TOTAL - limit + 2 * LAYER_BYTES  # one in use, the next on its way
        moved = run.bytes_of_an_iteration()
    # Forward, backward and step read what is not there, less the two that are; the step writes it.
    assert moved <= 3 * (passing - LAYER_BYTES) + passing + 2 * STATES * TOTAL


def test_weights_that_fit_leave_the_rest_to_states(tmp_path):
    budget = tensorferry.MemoryBudget(2 * TOTAL)
    with Run(tmp_path, budget, budget) as run:
        assert run.weights.stats()["weight_bytes"] == 0
        assert run.weights.stats()["kept_bytes"] == TOTAL
        # Half of the states, which are twice the weights, each way.
        assert run.bytes_of_an_iteration() == pytest.approx(2 * TOTAL, rel=0.2)
        assert run.weights.stats()["written_bytes"] == 0


def test_large_weights_stay_so_that_others_pass_through_less(tmp_path):
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(WIDTH, 4096), nn.Linear(4096, WIDTH), *layers(count=8))
    budget = tensorferry.MemoryBudget((2 << 20) + 5 * LAYER_BYTES + (64 << 10))
    with tensorferry.offload.parameters(model, tmp_path, budget, keep_bytes=0) as weights:
        assert weights.stats()["weight_bytes"] == 5 * LAYER_BYTES
        assert 2 * LAYER_BYTES <= weights.stats()["buffer_bytes"] < 3 * LAYER_BYTES


def test_trained_weights_stay_before_frozen_ones(tmp_path):
    """The step writes them."""
    model = layers()
    model[:12].requires_grad_(False)
    budget = tensorferry.MemoryBudget(14 * LAYER_BYTES)
    with tensorferry.offload.parameters(model, tmp_path, budget, keep_bytes=0):
        assert not any(layer.weight.isnan().any() for layer in model[12:])
        assert all(layer.weight.isnan().any() for layer in model[:12])


# ---- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, -1, "half", "50%", None, 1.5])
def test_what_is_no_number_is_refused(limit):
    with pytest.raises(ValueError, match=r"max_bytes is .*: give a number of bytes of at least 1"):
        tensorferry.MemoryBudget(limit)


def test_too_little_for_a_pass_is_refused_and_changes_nothing(tmp_path):
    model = layers()
    values = [param.detach().clone() for param in model.parameters()]
    budget = tensorferry.MemoryBudget(LAYER_BYTES - 1)
    expected = f"has {LAYER_BYTES - 1} bytes left for weights, and {LAYER_BYTES} bytes of them"
    with pytest.raises(ValueError, match=expected):
        tensorferry.offload.parameters(model, tmp_path, budget)
    assert all(map(torch.equal, model.parameters(), values))
    gc.collect()
    assert budget.held_bytes == 0


def test_a_second_model_gets_what_the_first_has_left(tmp_path):
    budget = tensorferry.MemoryBudget(TOTAL + 4 * LAYER_BYTES)
    first = tensorferry.offload.parameters(layers(), tmp_path, budget)
    second = tensorferry.offload.parameters(layers(), tmp_path, budget)
    assert second.stats()["kept_bytes"] == 2 * LAYER_BYTES
    first.close()
    second.close()
    assert budget.held_bytes == 0


def test_auto_is_half_of_what_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(available, "available_bytes", lambda: 2 * TOTAL + 14 * LAYER_BYTES)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    budget = tensorferry.MemoryBudget("auto")
    assert budget.max_bytes == "auto"
    with Run(tmp_path, budget, budget) as run:
        iterate(run.model, run.optimizer, 3)
        assert budget.max_bytes == TOTAL + 7 * LAYER_BYTES
        assert run.weights.stats()["kept_bytes"] == TOTAL
        assert 0 < run.optimizer.stats()["kept_bytes"] <= 7 * LAYER_BYTES


def test_the_log_says_it_once(tmp_path, caplog):
    budget = tensorferry.MemoryBudget(TOTAL + 9 * LAYER_BYTES)
    with caplog.at_level(logging.INFO, logger="tensorferry"):
        with Run(tmp_path, budget, budget) as run:
            iterate(run.model, run.optimizer, 4)
            kept = run.optimizer.stats()["kept_bytes"]
    told = [record.getMessage() for record in caplog.records]
    assert told[0] == (
        f"{TOTAL} bytes of weights stay in memory for good, the others pass through 0 bytes; the "
        f"budget leaves {9 * LAYER_BYTES} bytes for states"
    )
    assert len(told) == 2 and "sub-groups keep their states in memory (cpu)" in told[1]
    assert kept > 0


def test_a_model_without_values_gets_them(tmp_path):
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(8)))
    budget = tensorferry.MemoryBudget(4 * (68 << 10))
    with tensorferry.offload.parameters(model, tmp_path, budget, keep_bytes=0) as weights:
        assert 0 < weights.stats()["kept_bytes"] < weight_bytes(model)
        assert not model(torch.ones(1, 128)).isnan().any()


# ---- initialize() --------------------------------------------------------------------------------


def config(path, **sections):
    zero = {
        name: {"device": "nvme", "nvme_path": str(path), **own} for name, own in sections.items()
    }
    return {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
    }


@pytest.mark.parametrize("share", [0.5, 2, "auto"])
def test_initialize_takes_one_number(tmp_path, share):
    both = {"offload_optimizer": {"ratio": 0.5}, "offload_param": {"max_in_cpu": 10**9}}
    limit = share if share == "auto" else int(share * TOTAL)
    model, optimizer = tensorferry.initialize(
        layers(), config(tmp_path, **both), max_cpu_bytes=limit
    )
    iterate(model, optimizer, 3)
    weights, states = optimizer.weights.stats(), optimizer.stats()
    if share == "auto":
        assert weights["kept_bytes"] == TOTAL and states["tensor_bytes"] == 0
    else:
        assert weights["kept_bytes"] + weights["buffer_bytes"] + states["kept_bytes"] <= limit
    optimizer.close()
    optimizer.weights.close()


def test_initialize_gives_states_alone_all_of_it(tmp_path):
    model, optimizer = tensorferry.initialize(
        layers(), config(tmp_path, offload_optimizer={}), max_cpu_bytes=1 << 30
    )
    iterate(model, optimizer, 2)
    assert optimizer.stats()["tensor_bytes"] == 0
    optimizer.close()


def test_initialize_refuses_a_number_for_nothing():
    with pytest.raises(tensorferry.ConfigError, match="the configuration puts nothing on nvme"):
        tensorferry.initialize(layers(), {"optimizer": {"type": "AdamW"}}, max_cpu_bytes=1 << 30)
