"""Weights that wait for a late step: whoever reads one gets the new values."""

import copy
import ctypes
import threading

import pytest

torch = pytest.importorskip("torch")

import tensorferry.offload
import tensorferry.snapshot
from offload_models import MODELS, make, same
from overlapping import (
    WIDTH,
    adamw,
    begin,
    check_same,
    deep,
    inputs,
    is_pending,
    iteration,
    stepped,
    train,
)
from tensorferry.optim.spent_gradient import SpentGradient
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")


READS = {
    "state_dict": lambda model: model.state_dict()["0.weight"],
    "state_dict(keep_vars)": lambda model: model.state_dict(keep_vars=True)["0.weight"] + 0,
    "data": lambda model: model[0].weight.data,
    "detach": lambda model: model[0].weight.detach(),
    "numpy": lambda model: torch.from_numpy(model[0].weight.detach().numpy()),
    "memory": lambda model: torch.frombuffer(
        bytearray(ctypes.string_at(model[0].weight.data_ptr(), model[0].weight.nbytes)),
        dtype=torch.float32,
    ).view(WIDTH, WIDTH),
    "operator": lambda model: torch.eye(WIDTH) @ model[0].weight,
    "listed": lambda model: torch._foreach_mul([model[0].weight], 1.0)[0],
    "copy.deepcopy": lambda model: copy.deepcopy(model)[0].weight.detach(),
    "functional_call": lambda model: (
        torch.func.functional_call(model[0], dict(model[0].named_parameters()), torch.eye(WIDTH))
        - model[0].bias
    ).t(),
    "vector": lambda model: nn.utils.parameters_to_vector(model.parameters())[: WIDTH**2].view(
        WIDTH, WIDTH
    ),
    "to": lambda model: copy.deepcopy(model.to(torch.float64))[0].weight.detach().float(),
    "another thread": lambda model: _in_thread(lambda: model[0].weight.detach().clone()),
    "inference": lambda model: _in_inference_mode(lambda: model[0].weight * 1),
    "inner weight in C++": lambda model: torch.tensor(_called(model[0]).weight),
}


def _in_thread(read):
    results = []
    thread = threading.Thread(target=lambda: results.append(read()))
    thread.start()
    thread.join()
    return results[0]


def _in_inference_mode(read):
    with torch.inference_mode():
        return read()


def _called(module):
    module(inputs())
    return module


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", READS)
def test_whoever_reads_a_weight_gets_the_new_one(tmp_path, name, slow_drive):
    expected = stepped(tmp_path)
    model = deep()
    optimizer = iteration(model, tmp_path)
    begin(model, optimizer)
    with torch.no_grad():
        read = READS[name](model)
    torch.testing.assert_close(read, expected[0], rtol=0, atol=1e-6)
    optimizer.settle()
    if name != "to":
        for param, value in zip(model.parameters(), expected):
            same(param.detach(), value)
    optimizer.close()


def test_code_in_cpp_that_does_not_ask_finds_nan_and_never_old_values(tmp_path, slow_drive):
    model = deep()
    optimizer = iteration(model, tmp_path)
    begin(model, optimizer)
    assert is_pending(model[0].weight)
    with pytest.warns(UserWarning):
        assert torch.tensor(model[0].weight).isnan().all()
    optimizer.settle()
    assert not model[0].weight.isnan().any()
    optimizer.close()


def test_looking_at_shapes_and_gradients_waits_for_nothing(tmp_path, slow_drive):
    model = deep()
    optimizer = iteration(model, tmp_path)
    with optimizer.last_backward():
        model(inputs()).sum().backward()
    optimizer.step()
    weight = model[0].weight
    assert isinstance(weight.grad, SpentGradient)
    optimizer.zero_grad()
    assert weight.shape == (WIDTH, WIDTH) and weight.grad is None and weight.requires_grad
    assert sum(param.numel() for param in model.parameters()) > 0
    assert {param.device.type for param in model.parameters()} == {"cpu"}
    assert isinstance(weight, nn.Parameter) and len({weight: 1, model[0].bias: 2}) == 2
    assert all(map(is_pending, model.parameters()))
    optimizer.close()
    assert not any(map(is_pending, model.parameters()))


def test_whoever_changes_a_weight_changes_the_new_one(tmp_path, slow_drive):
    """In bf16 a change must reach the master too."""
    results = []
    for overlap in (None, "iteration"):
        model = deep(dtype=torch.bfloat16)
        optimizer = adamw(model, tmp_path, overlap)
        torch.manual_seed(3)
        for _ in range(3):
            model(inputs().bfloat16()).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model[0].weight.mul_(0.5)
                model[2].bias.copy_(torch.ones(WIDTH))
        optimizer.close()
        results.append([param.detach() for param in model.parameters()])
    for one, other in zip(*results):
        same(one, other)


def _gathered(model, weights):
    with weights.gather(model[0]) as layer:
        return layer.weight.clone()


STORED_READS = {
    "state_dict": lambda model, weights: model.state_dict()["0.weight"].clone(),
    "state_dict(keep_vars)": lambda model, weights: model.state_dict(keep_vars=True)[
        "0.weight"
    ].clone(),
    "gather": _gathered,
    "restored": lambda model, weights: weights.close(restore=True) or model[0].weight.detach(),
}


@pytest.mark.parametrize("name", STORED_READS)
def test_whoever_reads_a_weight_on_the_drive_gets_the_new_one(tmp_path, name, slow_drive):
    results = []
    for overlap in (None, "iteration"):
        model = deep()
        limit = sum(param.nbytes for param in model.parameters())
        weights = tensorferry.offload.parameters(model, tmp_path, limit, keep_bytes=1024)
        optimizer = adamw(model, tmp_path, overlap)
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(3))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert is_pending(model[0].weight) == (overlap is not None)
        results.append(STORED_READS[name](model, weights))
        assert not is_pending(model[0].weight)
        optimizer.close()
        weights.close()
    same(results[1], results[0])


def test_states_are_those_after_the_step(tmp_path, slow_drive):
    model = deep()
    optimizer = iteration(model, tmp_path)
    begin(model, optimizer)
    state = optimizer.state_dict()
    assert not any(map(is_pending, model.parameters()))
    assert {int(own["step"]) for own in state["state"].values()} == {1}
    optimizer.load_state_dict(state)
    begin(model, optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert not any(map(is_pending, model.parameters()))
    optimizer.close()


def test_snapshots_and_resuming_settle_what_is_left(tmp_path, slow_drive):
    model = make("mlp")
    limit = sum(param.nbytes for param in model.parameters()) // 3
    for name in ("w", "s"):
        (tmp_path / name).mkdir()
    weights = tensorferry.offload.parameters(model, tmp_path / "w", limit, keep_bytes=1024)
    optimizer = iteration(model, tmp_path / "s")
    data = MODELS["mlp"][1]

    def run():
        torch.manual_seed(5)
        with optimizer.last_backward():
            model(data()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    run()
    tensorferry.snapshot.take(tmp_path / "snapshots", model=model, optimizer=optimizer)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    run()
    assert any(map(is_pending, model.parameters()))
    tensorferry.snapshot.resume(tmp_path / "snapshots", model=model, optimizer=optimizer)
    for name, value in model.state_dict().items():
        same(value.clone(), kept[name])
    optimizer.close()
    weights.close()


@pytest.mark.filterwarnings("ignore:Using .torch.compile")  # global hooks
@pytest.mark.parametrize("compiles", ["model", "in place", "function"])
def test_compiled_models_get_the_new_weights(tmp_path, compiles, slow_drive):
    results = []
    for overlap in (None, "iteration"):
        torch._dynamo.reset()
        model = deep(layers=2)
        called = model
        if compiles == "model":
            called = torch.compile(model, backend="eager")
        elif compiles == "in place":
            model.compile(backend="eager")
        optimizer = adamw(model, tmp_path, overlap)

        @torch.compile(backend="eager")
        def loss_of(model, x):
            return nn.functional.linear(x, model[0].weight).square().mean()

        function = loss_of if compiles == "function" else None
        for_loss = function and (lambda model, x, f=function: model(f(model, x) * x).sum())
        results.append(train(called, optimizer, inputs, loss_of=for_loss))
        optimizer.close()
    check_same(results[1], results[0])


def test_modules_in_torchscript_get_the_new_weights(tmp_path, slow_drive):
    results = []
    for overlap in (None, "iteration"):
        model = deep()
        with pytest.warns(DeprecationWarning):
            scripted = nn.Sequential(torch.jit.script(model[:2]), model[2:])
        optimizer = adamw(scripted, tmp_path, overlap)
        results.append(train(scripted, optimizer, inputs))
        optimizer.close()
    # The first runs of a script compute with other kernels than later ones.
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-5)
