"""offload.parameters: weights that are made, loaded, saved, gathered and given back."""

import gc
import os
import weakref

import pytest

torch = pytest.importorskip("torch")

import tensorferry.offload
from drives import loop_mount
from offload_models import (
    MODELS,
    WIDTH,
    OwnWeights,
    Tied,
    adamw,
    limit_of,
    make,
    nothing_is_in_use,
    offloaded,
    same,
    train,
)
from torch import nn

EVERY_MODEL = pytest.mark.parametrize("name", MODELS)


def same_state(mine, wanted):
    assert list(mine) == list(wanted)
    for key, value in wanted.items():
        if value.is_floating_point():
            same(mine[key], value)
        else:
            assert torch.equal(mine[key], value)


def another(name):
    """The same model with other values."""
    torch.manual_seed(99)
    return MODELS[name][0]()


def files_in(path):
    return [file for file in path.rglob("*") if file.is_file()]


# ---- state dicts ---------------------------------------------------------------------------------


@EVERY_MODEL
def test_state_dicts_go_both_ways(tmp_path, name):
    model, other, third = make(name), another(name), make(name)
    with offloaded(model, tmp_path) as weights:
        same_state(model.state_dict(), third.state_dict())
        third.load_state_dict(other.state_dict())
        model.load_state_dict(other.state_dict())
        same_state(model.state_dict(), third.state_dict())
        assert nothing_is_in_use(weights)
        fresh = make(name)
        fresh.load_state_dict(model.state_dict())
        same_state(fresh.state_dict(), third.state_dict())
        for load in ({}, {"mmap": True}):
            torch.save(model.state_dict(), tmp_path / "model.pt")
            model.load_state_dict(make(name).state_dict())
            model.load_state_dict(torch.load(tmp_path / "model.pt", **load))
            same_state(model.state_dict(), third.state_dict())
        data = MODELS[name][1]
        same(train(model, 1, data)[0], train(third, 1, data)[0])


def test_the_state_dict_of_a_part(tmp_path):
    model, other = make("encoder"), make("encoder")
    with offloaded(model, tmp_path) as weights:
        for part in ("layers.0", "layers.1.self_attn", "layers.2.linear1"):
            mine, theirs = model.get_submodule(part), other.get_submodule(part)
            same_state(mine.state_dict(), theirs.state_dict())
            mine.load_state_dict(another("encoder").get_submodule(part).state_dict())
            theirs.load_state_dict(another("encoder").get_submodule(part).state_dict())
        wrapped, other_wrapped = nn.Sequential(model), nn.Sequential(other)
        same_state(wrapped.state_dict(), other_wrapped.state_dict())
        assert nothing_is_in_use(weights)


def test_a_state_dict_that_does_not_fit_leaves_nothing_in_use(tmp_path):
    model = make("mlp")
    state = model.state_dict()
    wrong = {**state, "0.weight": torch.ones(3, 3)}
    with offloaded(model, tmp_path) as weights:
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict(wrong)
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({})
        with pytest.raises(ValueError, match="assign=False"):
            model.load_state_dict(state, assign=True)
        assert nothing_is_in_use(weights)
        same_state(model.state_dict(), make("mlp").state_dict())


@pytest.mark.parametrize("pipeline_write", [False, True])
def test_a_state_dict_outlives_steps_and_the_offload(tmp_path, pipeline_write):
    model, other = make("mlp"), make("mlp")
    data = MODELS["mlp"][1]
    with (
        offloaded(model, tmp_path),
        adamw(model, tmp_path, pipeline_write=pipeline_write) as optimizer,
    ):
        fused = torch.optim.AdamW(other.parameters(), lr=1e-2, fused=True)
        states = []
        for _ in range(4):
            wanted = {key: value.clone() for key, value in other.state_dict().items()}
            states.append((model.state_dict(), wanted))
            train(model, 1, data, optimizer)
            train(other, 1, data, fused)
        for mine, wanted in states:
            for key in mine:
                # Weights that stay in memory are the model's own, as ever.
                if mine[key].data_ptr() != dict(model.named_parameters())[key].data_ptr():
                    same(mine[key], wanted[key])
        last = model.state_dict()
    same_state(
        {k: v for k, v in last.items() if v.numel() > 1024},
        {k: v for k, v in other.state_dict().items() if v.numel() > 1024},
    )


def test_shared_weights_are_saved_once(tmp_path):
    model = Tied()
    with offloaded(model, tmp_path):
        state = model.state_dict()
        assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
        torch.save(state, tmp_path / "tied.pt")
        assert os.path.getsize(tmp_path / "tied.pt") < 1.5 * sum(
            param.nbytes for param in model.parameters()
        )


# ---- gather and close ----------------------------------------------------------------------------


@EVERY_MODEL
def test_gathered_weights_are_there(tmp_path, name):
    model, other = make(name), make(name)
    with offloaded(model, tmp_path) as weights:
        with weights.gather():
            for param, wanted in zip(model.parameters(), other.parameters(), strict=True):
                same(param.detach(), wanted.detach())
                assert param.stride() == wanted.stride()
        assert nothing_is_in_use(weights)
        stats = weights.stats()
        assert stats["resident_bytes"] <= stats["buffer_bytes"]


def test_a_gathered_part(tmp_path):
    model, other = make("encoder"), make("encoder")
    with offloaded(model, tmp_path) as weights:
        for part in ("layers.1", "layers.1.linear2"):
            with weights.gather(model.get_submodule(part)) as inside:
                wanted = other.get_submodule(part).state_dict()
                for key, param in inside.named_parameters():
                    same(param.detach(), wanted[key])
                assert model.layers[0].linear1.weight.isnan().all()
        with pytest.raises(KeyError), weights.gather():
            raise KeyError
        assert nothing_is_in_use(weights)


@pytest.mark.parametrize("way", ["in place", "data", "numpy"])
def test_what_is_changed_in_a_gather_is_kept(tmp_path, way):
    model, other = make("mlp"), make("mlp")
    x = torch.ones(1, WIDTH)
    with offloaded(model, tmp_path) as weights:
        for round in range(3):
            for one, modify in ((model, way != "in place"), (other, None)):
                with weights.gather(modify=bool(modify)), torch.no_grad():
                    for param in one.parameters():
                        if way == "in place":
                            param.mul_(1.5).add_(round)
                        elif way == "data":
                            param.data.mul_(1.5).add_(round)
                        else:
                            param.numpy()[...] = param.numpy() * 1.5 + round
            same(model(x), other(x))
        same_state(model.state_dict(), other.state_dict())


UNSEEN = {
    "in place": lambda param: param.mul_(2),
    "a row": lambda param: param[0].mul_(2),
    "an element": lambda param: param.view(-1).__setitem__(0, 2.0),
    "data": lambda param: param.data.mul_(2),
    "out": lambda param: torch.mul(param, 2, out=param),
    "foreach": lambda param: torch._foreach_mul_([param], 2),
    "init": torch.nn.init.ones_,
    "functional": lambda param: torch.nn.functional.relu(param, inplace=True),
}


@pytest.mark.parametrize("outermost", ["gather", "inference mode"])
@pytest.mark.parametrize("way", UNSEEN)
def test_what_is_changed_in_inference_mode_is_kept(tmp_path, way, outermost):
    """Where autograd sees no change."""
    model, other = make("mlp"), make("mlp")
    with offloaded(model, tmp_path) as weights:
        for one in (model, other):
            modes = [weights.gather(), torch.inference_mode()]
            first, second = modes if outermost == "gather" else reversed(modes)
            with first, second:
                for param in one.parameters():
                    UNSEEN[way](param)
        same_state(model.state_dict(), other.state_dict())


def test_a_pass_in_inference_mode_writes_nothing(tmp_path):
    model = make("mlp")
    with offloaded(model, tmp_path) as weights:
        before = weights.stats()["written_bytes"]
        with weights.gather(), torch.inference_mode():
            model(torch.ones(1, WIDTH)).mul_(2)
        assert weights.stats()["written_bytes"] == before


def test_gathered_weights_in_a_loss(tmp_path):
    """A penalty on weights, and backward after the gather has ended."""
    model, other = make("mlp"), make("mlp")
    with offloaded(model, tmp_path) as weights:
        with weights.gather():
            loss = sum(param.square().sum() for param in model.parameters())
        loss.backward()
        sum(param.square().sum() for param in other.parameters()).backward()
        for param, wanted in zip(model.parameters(), other.parameters()):
            same(param.grad, wanted.grad)


@EVERY_MODEL
def test_closing_gives_the_weights_back(tmp_path, name):
    model, other = make(name), make(name)
    weights = tensorferry.offload.parameters(model, tmp_path, limit_of(model, "third"))
    weights.close(restore=True)
    weights.close()
    assert files_in(tmp_path) == []
    same_state(model.state_dict(), other.state_dict())
    for param, wanted in zip(model.parameters(), other.parameters()):
        assert param.stride() == wanted.stride()
    data = MODELS[name][1]
    options = {"lr": 1e-2, "fused": True}
    mine = train(model, 2, data, torch.optim.AdamW(model.parameters(), **options))[0]
    same(mine, train(other, 2, data, torch.optim.AdamW(other.parameters(), **options))[0])


def test_an_optimizer_goes_on_after_the_weights_came_back(tmp_path):
    model, other = make("mlp"), make("mlp")
    data = MODELS["mlp"][1]
    fused = torch.optim.AdamW(other.parameters(), lr=1e-2, fused=True)
    weights = tensorferry.offload.parameters(model, tmp_path, 100_000)
    with adamw(model, tmp_path) as optimizer:
        for restore in (True, False):
            same(train(model, 3, data, optimizer)[0], train(other, 3, data, fused)[0])
            if restore:
                weights.close(restore=True)


@pytest.mark.parametrize("limit", [5 << 20, 1 << 30])
def test_a_model_that_the_drive_has_no_room_for_keeps_its_weights(tmp_path, limit):
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(10)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with loop_mount(tmp_path, size="24M") as point:
        with pytest.raises(OSError, match="needed"):
            tensorferry.offload.parameters(model, point, limit)
        gc.collect()
    same_state(model.state_dict(), before)
    with offloaded(model, tmp_path):
        same_state(model.state_dict(), before)


def test_a_model_that_nobody_has_any_more_leaves_nothing(tmp_path):
    model = make("encoder")
    tensorferry.offload.parameters(model, tmp_path, limit_of(model, "third"))
    model(torch.randn(2, 6, WIDTH)).sum().backward()
    gone = weakref.ref(model)
    assert files_in(tmp_path) != []
    del model
    for _ in range(3):  # what a parameter keeps goes after the parameter
        gc.collect()
    assert gone() is None
    assert files_in(tmp_path) == []


# ---- models without memory -----------------------------------------------------------------------


def fill(module):
    """The same values for a module, whenever it is made."""
    for name, param in module.named_parameters(recurse=False):
        generator = torch.Generator().manual_seed(param.numel() + len(name))
        with torch.no_grad():
            param.copy_(torch.randn(param.shape, generator=generator) / 30)
    for buffer in module.buffers(recurse=False):
        buffer.fill_(1)


@EVERY_MODEL
def test_a_model_on_the_meta_device_is_made_here(tmp_path, name):
    if name == "own_weights":
        pytest.skip("parametrizations compute with the values when they are registered")
    with torch.device("meta"):
        model = MODELS[name][0]()
    other = make(name)
    for module in other.modules():
        fill(module)
    with offloaded(model, tmp_path, initialize=fill):
        same_state(model.state_dict(), other.state_dict())
        data = MODELS[name][1]
        with adamw(model, tmp_path) as optimizer:
            fused = torch.optim.AdamW(other.parameters(), lr=1e-2, fused=True)
            same(train(model, 3, data, optimizer)[0], train(other, 3, data, fused)[0])


@pytest.mark.parametrize(
    "name", ["mlp", "conv_net", "lstm", "encoder", "attention", "tied", "repeated", "holder"]
)
def test_modules_on_the_meta_device_reset_themselves(tmp_path, name):
    with torch.device("meta"):
        model = MODELS[name][0]()
    other = make(name)
    with offloaded(model, tmp_path):
        state = model.state_dict()
        assert {k: v.shape for k, v in state.items()} == {
            k: v.shape for k, v in other.state_dict().items()
        }
        for key, value in other.state_dict().items():
            mine = state[key].double()
            assert mine.isfinite().all(), key
            if name == "tied":
                continue  # the last to be made of those that share it has the word
            # As when it is made in memory: constant where that is, spread where that is.
            spread, expected = (values.var(correction=0) for values in (mine, value.double()))
            torch.testing.assert_close(spread, expected, rtol=0.4, atol=2e-2)
        with torch.no_grad():
            assert model(MODELS[name][1]()).isfinite().all()


def test_a_part_without_values_to_start_with_is_named(tmp_path):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), OwnWeights.Table())
    with pytest.raises(ValueError, match="Table .* initialize"):
        tensorferry.offload.parameters(model, tmp_path)


def test_weights_of_any_kind(tmp_path):
    class Kinds(nn.Module):
        def __init__(self):
            super().__init__()
            for dtype in (
                torch.float64,
                torch.float16,
                torch.complex64,
                torch.int8,
                torch.bool,
                torch.float8_e4m3fn,
            ):
                name = str(dtype).split(".")[1]
                values = (torch.arange(20_000) % 11 - 4).to(dtype)
                setattr(self, name, nn.Parameter(values, requires_grad=False))
            self.none = nn.Parameter(torch.empty(0, 3))
            self.single = nn.Parameter(torch.tensor(2.5))
            self.missing = None

        def forward(self):
            return [param.detach().clone() for param in self.parameters()]

    model, expected = Kinds(), Kinds()()
    weights = tensorferry.offload.parameters(model, tmp_path, 30_000, keep_bytes=0)
    for _ in range(2):
        for mine, wanted in zip(model(), expected, strict=True):
            assert (
                torch.equal(mine.view(torch.uint8), wanted.view(torch.uint8))
                if (wanted.dtype == torch.float8_e4m3fn)
                else torch.equal(mine, wanted)
            )
    weights.close()
