"""offload.parameters: the same numbers as in memory, with a part of the weights in memory."""

import copy
import gc
import pickle

import pytest

torch = pytest.importorskip("torch")

import tensorferry.offload
import tensorferry.optim
from in_threads import in_threads
from offload_models import (
    MODELS,
    WIDTH,
    adamw,
    limit_of,
    make,
    nothing_is_in_use,
    offloaded,
    same,
    train,
)
from tensorferry._memory.weight_memory import WeightMemory
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")

SHARES = pytest.mark.parametrize("share", ["third", "less", "all"])
EVERY_MODEL = pytest.mark.parametrize("name", MODELS)


# ---- the same numbers ----------------------------------------------------------------------------


@EVERY_MODEL
@SHARES
def test_inference_gives_the_same_bits(tmp_path, name, share):
    model, other = make(name).eval(), make(name).eval()
    data = MODELS[name][1]
    with offloaded(model, tmp_path, share) as weights:
        written = weights.stats()["written_bytes"]
        for seed, mode in enumerate([torch.no_grad, torch.inference_mode] * 2):
            with mode():
                torch.manual_seed(seed)
                expected = other(data())
                torch.manual_seed(seed)
                same(model(data()), expected)
        assert nothing_is_in_use(weights)
        assert weights.stats()["written_bytes"] == written  # clean weights are not written back


@EVERY_MODEL
@pytest.mark.parametrize(
    "share, micro_batches", [("third", 1), ("third", 3), ("less", 1), ("all", 1)]
)
def test_training_gives_the_same_bits(tmp_path, name, share, micro_batches):
    model, other = make(name), make(name)
    data = MODELS[name][1]
    expected, gradients = train(other, 3, data, micro_batches=micro_batches)
    with offloaded(model, tmp_path, share) as weights:
        with torch.inference_mode():  # nothing of it stays behind
            model.eval()(data().detach())
            model.train()
            if name == "conv_net":
                model.load_state_dict(make(name).state_dict())  # the running means
        losses, own = train(model, 3, data, micro_batches=micro_batches)
        same(losses, expected)
        for (parameter, _), gradient, wanted in zip(other.named_parameters(), own, gradients):
            assert (gradient is None) == (wanted is None), parameter
            if wanted is not None:
                same(gradient, wanted)
        assert nothing_is_in_use(weights)


@EVERY_MODEL
@pytest.mark.parametrize("offload_gradients", [False, True])
def test_ten_steps_of_adamw_give_the_same_bits(tmp_path, name, offload_gradients):
    model, other = make(name), make(name)
    data = MODELS[name][1]
    fused = torch.optim.AdamW(other.parameters(), lr=1e-2, fused=True)
    expected, _ = train(other, 10, data, fused)
    with offloaded(model, tmp_path) as weights:
        optimizer = tensorferry.optim.AdamW(
            model.parameters(),
            lr=1e-2,
            nvme_path=tmp_path,
            offload_gradients=offload_gradients,
            buffer_bytes=1 << 20,
        )
        losses, _ = train(model, 10, data, optimizer)
        same(losses, expected)
        with weights.gather():
            for param, wanted in zip(model.parameters(), other.parameters()):
                same(param.detach(), wanted.detach())
        optimizer.close()


@pytest.mark.parametrize("offload_gradients", [False, True])
@pytest.mark.parametrize("pipeline_write", [False, True])
def test_ten_steps_in_bf16_with_masters(tmp_path, offload_gradients, pipeline_write):
    def data():
        return torch.randn(5, WIDTH, dtype=torch.bfloat16)

    model, other = make("mlp").bfloat16(), make("mlp").bfloat16()
    options = {"offload_gradients": offload_gradients, "pipeline_write": pipeline_write}
    reference = tensorferry.optim.AdamW(other.parameters(), lr=1e-2, nvme_path=tmp_path)
    expected, _ = train(other, 10, data, reference)
    with offloaded(model, tmp_path), adamw(model, tmp_path, **options) as optimizer:
        same(train(model, 10, data, optimizer)[0], expected)
        for mine, wanted in zip(model.state_dict().values(), other.state_dict().values()):
            same(mine, wanted)
    reference.close()


@pytest.mark.parametrize("name", ["mlp", "repeated", "lstm"])
def test_autocast_gives_the_same_bits(tmp_path, name):
    model, other = make(name), make(name)
    data = MODELS[name][1]
    with offloaded(model, tmp_path), torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            torch.manual_seed(0)
            expected = other(data())
            torch.manual_seed(0)
            same(model(data()), expected)
        assert torch.is_autocast_cache_enabled()
        expected, gradients = train(other, 2, data)
        losses, own = train(model, 2, data)
        same(losses, expected)
        for gradient, wanted in zip(own, gradients):
            same(gradient, wanted)


def test_clipping_is_that_of_torch(tmp_path):
    def run(model, optimizer, clip):
        norms = []
        losses, _ = train(
            model, 5, MODELS["conv_net"][1], optimizer, after=lambda: norms.append(clip())
        )
        return losses, torch.stack(norms)

    def torch_clip(model):
        return lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    other = make("conv_net")
    expected = run(other, torch.optim.AdamW(other.parameters(), fused=True), torch_clip(other))
    for own in ("torch", "optimizer", "on the drive"):
        model = make("conv_net")
        with (
            offloaded(model, tmp_path),
            adamw(model, tmp_path, lr=1e-3, offload_gradients=own == "on the drive") as optimizer,
        ):
            clip = lambda: optimizer.clip_grad_norm_(0.01)  # noqa: E731
            actual = run(model, optimizer, torch_clip(model) if own == "torch" else clip)
            # A norm is a sum in the order of memory, and that may be another here.
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)


def test_retained_graphs_and_second_derivatives(tmp_path):
    def second(model):
        torch.manual_seed(3)
        x = torch.randn(4, WIDTH, requires_grad=True)
        y = model(x).square().sum()
        y.backward(retain_graph=True)
        once = [param.grad.clone() for param in model.parameters()]
        y.backward(retain_graph=True)
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        slope.square().sum().backward()
        return once + [param.grad for param in model.parameters()] + [slope.detach()]

    model, other = make("mlp"), make("mlp")
    with offloaded(model, tmp_path) as weights:
        with torch.inference_mode():  # what that brought in can be saved by autograd too
            model(torch.ones(1, WIDTH))
        for mine, wanted in zip(second(model), second(other), strict=True):
            same(mine, wanted)
        assert nothing_is_in_use(weights)


def test_parts_of_a_model_are_called_by_themselves(tmp_path):
    """With gradients, without the model around them, and from inside a unit."""
    model, other = make("encoder"), make("encoder")
    net, other_net = make("conv_net"), make("conv_net")
    x = torch.randn(2, 6, WIDTH)
    image = torch.randn(2, 3, 8, 8)
    with offloaded(model, tmp_path), offloaded(net, tmp_path):
        for mine, wanted in (
            (model.layers[1], other.layers[1]),
            (model.layers[0].linear1, other.layers[0].linear1),
            (model.layers[0].norm1, other.layers[0].norm1),
        ):
            same(mine(x), wanted(x))
            mine(x).square().sum().backward()
            wanted(x).square().sum().backward()
        net[0](image).square().sum().backward()
        other_net[0](image).square().sum().backward()
        for one, two in ((model, other), (net, other_net)):
            for param, expected in zip(one.parameters(), two.parameters()):
                if expected.grad is not None:
                    same(param.grad, expected.grad)


def test_hooks_of_others_see_what_is_saved_but_weights(tmp_path):
    """So activation checkpointing saves memory as ever."""
    seen = []
    model = make("mlp")
    sizes = {param.shape for param in model.parameters() if param.numel() > 1024}
    sizes |= {size[::-1] for size in sizes}
    with offloaded(model, tmp_path):
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: seen.append(tensor.shape) or tensor, lambda tensor: tensor
        )
        with hooks:
            loss = model(torch.ones(3, WIDTH)).sum()
        loss.backward()
    assert (3, 4 * WIDTH) in seen and (3, WIDTH) in seen
    assert not sizes.intersection(seen)


def test_hooks_of_users_on_modules_see_the_weights(tmp_path):
    model, other = make("mlp"), make("mlp")
    x = torch.randn(3, WIDTH)
    with offloaded(model, tmp_path):
        for side in (model, other):
            side[3].register_forward_pre_hook(lambda module, inputs: inputs[0] @ module.weight.t())
            side[3].register_forward_hook(lambda module, _, output: output @ module.weight)
            side[3].forward = lambda x: x
            side[4] = nn.Linear(4 * WIDTH, WIDTH, bias=False).requires_grad_(False)
            nn.init.ones_(side[4].weight)
        same(model(x), other(x))


def test_weights_in_a_dict_that_a_module_returns(tmp_path):
    class Named(nn.Linear):
        def forward(self, x):
            return {"output": super().forward(x), "weight": self.weight}

    torch.manual_seed(7)
    model = nn.Sequential(Named(WIDTH, WIDTH))
    expected = model[0].weight.detach().clone()
    with offloaded(model, tmp_path):
        same(model(torch.ones(1, WIDTH))["weight"], expected)


def test_checkpointed_layers_do_not_hold_their_weights(tmp_path):
    """They are computed again, all of one at once, before backward takes the first of them."""
    torch.manual_seed(2)
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(12)])
    with offloaded(model, tmp_path) as weights:
        for _ in range(2):
            loss = torch.utils.checkpoint.checkpoint(model, torch.ones(2, 512), use_reentrant=False)
            loss.sum().backward()
        assert weights.stats()["overflows"] == 0


def test_a_frozen_model_passes_gradients_on(tmp_path):
    model, other = (make("mlp").requires_grad_(False) for _ in range(2))
    x, y = (torch.ones(3, WIDTH, requires_grad=True) for _ in range(2))
    with offloaded(model, tmp_path):
        model(x).square().sum().backward()
        other(y).square().sum().backward()
        same(x.grad, y.grad)


def test_a_model_that_was_made_in_inference_mode_infers(tmp_path):
    with torch.inference_mode():
        model, other = make("mlp"), make("mlp")
        x = torch.randn(3, WIDTH)
    with offloaded(model, tmp_path) as weights:
        for _ in range(3):
            with torch.inference_mode():
                same(model(x), other(x))
        with torch.inference_mode(), weights.gather(modify=True):
            model[0].weight.mul_(2)
        with torch.inference_mode():
            other[0].weight.mul_(2)
            same(model(x), other(x))


def test_what_forward_changes_of_its_weights_is_kept(tmp_path):
    """nn.Embedding(max_norm=...) scales rows of its weight when they are used."""

    def build():
        torch.manual_seed(5)
        return nn.Sequential(nn.Embedding(200, WIDTH, max_norm=1.0), nn.Linear(WIDTH, 3 * WIDTH))

    model, other = build(), build()
    with offloaded(model, tmp_path):
        for step in range(3):
            tokens = torch.arange(step * 20, step * 20 + 40)
            same(model(tokens), other(tokens))
        same(model.state_dict()["0.weight"], other.state_dict()["0.weight"])


# ---- when something goes wrong -------------------------------------------------------------------


def test_an_exception_in_forward_leaves_nothing_behind(tmp_path):
    class Breaks(nn.Module):
        broken = False

        def forward(self, x):
            if self.broken:
                raise ArithmeticError("in the middle")
            return x

    def build():
        torch.manual_seed(7)
        return nn.Sequential(
            nn.Linear(WIDTH, WIDTH),
            nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 1), Breaks(), nn.Flatten()),
            nn.Linear(WIDTH, WIDTH),
        )

    model, other = build(), build()
    x = torch.randn(2, WIDTH, 1)
    model[0], other[0] = nn.Identity(), nn.Identity()
    with offloaded(model, tmp_path) as weights:
        for mode in (torch.enable_grad, torch.no_grad):
            model[1][1].broken = True
            with mode(), pytest.raises(ArithmeticError):
                model(x)
            assert nothing_is_in_use(weights)
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
            model[1][1].broken = False
            same(model(x), other(x))
        model(x).sum().backward()
        other(x).sum().backward()
        same(model[1][0].weight.grad, other[1][0].weight.grad)


def test_ctrl_c_in_forward_leaves_nothing_in_use(tmp_path):
    """torch calls hooks after exceptions, but not after this one."""

    class Stops(nn.Linear):
        stop = False

        def forward(self, x):
            if self.stop:
                raise KeyboardInterrupt
            return super().forward(x)

    def build():
        torch.manual_seed(7)
        return nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Tanh(), Stops(WIDTH, WIDTH)), nn.ReLU()
        )

    model, other = build(), build()
    x = torch.randn(3, WIDTH)
    with offloaded(model, tmp_path) as weights:
        for mode in (torch.enable_grad, torch.no_grad):
            for module in (model, model[1]):
                model[1][1].stop = True
                with mode(), pytest.raises(KeyboardInterrupt):
                    module(x)
                model[1][1].stop = False
                same(model(x), other(x))
                assert nothing_is_in_use(weights)
                assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_several_threads_infer_at_once(tmp_path):
    model, other = make("mlp"), make("mlp")
    inputs = [torch.randn(3, WIDTH) for _ in range(4)]
    expected = [other(x).detach() for x in inputs]

    def work(number):
        with torch.no_grad():
            for _ in range(20):
                assert torch.equal(model(inputs[number]), expected[number])

    with offloaded(model, tmp_path) as weights:
        in_threads(4, work)
        assert nothing_is_in_use(weights)


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD", "Adagrad", "RMSprop"])
@pytest.mark.parametrize("way", [{}, {"fused": True}, {"foreach": True}])
def test_an_optimizer_of_torch_says_what_to_do(tmp_path, kind, way):
    if way.get("fused") and kind == "RMSprop":
        pytest.skip("has no fused step")
    model = make("mlp")
    with offloaded(model, tmp_path) as weights:
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-2, **way)
        model(torch.ones(1, WIDTH)).sum().backward()
        with pytest.raises(RuntimeError, match="tensorferry.optim"):
            optimizer.step()
        weights.close(restore=True)
        optimizer.step()


def test_an_optimizer_that_is_older_than_the_offload_says_so(tmp_path):
    model = nn.Linear(2048, 2048)
    with adamw(model, tmp_path, buffer_bytes=1 << 20) as optimizer, offloaded(model, tmp_path):
        model(torch.ones(1, 2048)).sum().backward()
        with pytest.raises(RuntimeError, match="before"):
            optimizer.step()


def test_weights_that_were_converted_on_the_drive_say_so(tmp_path):
    model = make("mlp")
    with offloaded(model, tmp_path):
        model.to("cpu").float()  # nothing to be done
        model(torch.ones(1, WIDTH))
        model.bfloat16()
        with pytest.raises(RuntimeError, match="bfloat16"):
            model(torch.ones(1, WIDTH))


@pytest.mark.parametrize(
    "change",
    [
        nn.init.zeros_,
        lambda param: param.data.fill_(3.0),
        lambda param: setattr(param, "data", torch.ones(4 * WIDTH, WIDTH)),
    ],
)
def test_values_given_to_a_weight_that_is_away_are_not_lost_in_silence(tmp_path, change):
    model, other = make("mlp"), make("mlp")
    x = torch.randn(3, WIDTH)
    with offloaded(model, tmp_path) as weights:
        change(model[0].weight)
        with pytest.raises(RuntimeError, match="gather"):
            model(x)
        assert nothing_is_in_use(weights)
        assert model[0].weight.isnan().all()
        same(model(x), other(x))
        with weights.gather(modify=True):
            change(model[0].weight)
        change(other[0].weight)
        same(model(x), other(x))


def test_a_parameter_may_be_replaced_by_one_in_memory(tmp_path):
    model, other = make("mlp"), make("mlp")
    x = torch.randn(3, WIDTH)
    with offloaded(model, tmp_path):
        for side in (model, other):
            side[3].weight = nn.Parameter(torch.ones(WIDTH, 4 * WIDTH))
        gc.collect()
        same(model(x), other(x))
        same(model.state_dict()["3.weight"], other[3].weight)


def test_a_backward_pass_over_weights_that_were_stepped_says_so(tmp_path):
    model = make("mlp")
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(3, WIDTH)
    with offloaded(model, tmp_path), adamw(model, tmp_path) as optimizer:
        for change in (optimizer.step, lambda: model.load_state_dict(saved)):
            loss = model(x).square().sum()
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)
            change()
            with pytest.raises(RuntimeError, match="changed since its forward pass"):
                loss.backward()
        model(x).square().sum().backward()


def test_weights_that_nobody_brought_are_not_numbers(tmp_path):
    model = make("mlp")
    with offloaded(model, tmp_path):
        assert model[0].weight.isnan().all()
        assert model[0].weight.shape == (4 * WIDTH, WIDTH)


def test_a_model_that_is_there_already_or_is_none(tmp_path):
    model = make("mlp")
    with pytest.raises(TypeError, match="Module"):
        tensorferry.offload.parameters([model], tmp_path)
    for limit in (0, -1):
        with pytest.raises(ValueError, match="max_cpu_bytes"):
            tensorferry.offload.parameters(model, tmp_path, limit)
    with pytest.raises(TypeError, match="max_cpu_bytes"):
        tensorferry.offload.parameters(model, tmp_path, "1GB")
    with pytest.raises(OSError, match="nowhere"):
        tensorferry.offload.parameters(model, tmp_path / "nowhere")
    expected = model(torch.ones(1, WIDTH))
    with offloaded(model, tmp_path):
        for again in (model, model[0], nn.Sequential(model, nn.Linear(3, 3))):
            with pytest.raises(ValueError, match="already"):
                tensorferry.offload.parameters(again, tmp_path)
        same(model(torch.ones(1, WIDTH)), expected)
    sparse = nn.Module()
    sparse.weight = nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match="weight is torch.sparse_coo"):
        tensorferry.offload.parameters(sparse, tmp_path)
    apart = nn.Module()
    apart.weight = nn.Parameter(torch.ones(600, 600)[:, ::2])
    with pytest.raises(ValueError, match="contiguous"):
        tensorferry.offload.parameters(apart, tmp_path, keep_bytes=0)
    assert apart.weight.eq(1).all()


def test_a_model_with_weights_on_nvme_is_not_copied(tmp_path):
    model = make("mlp")
    with offloaded(model, tmp_path) as weights:
        for part in (model, model[0], nn.Sequential(model)):
            with pytest.raises(TypeError, match="NVMe cannot be copied"):
                copy.deepcopy(part)
            with pytest.raises(TypeError, match="state_dict"):
                pickle.dumps(part)
        weights.close(restore=True)
        same(copy.deepcopy(model)(torch.ones(1, WIDTH)), model(torch.ones(1, WIDTH)))
        pickle.loads(pickle.dumps(model))


# ---- what is in memory ---------------------------------------------------------------------------


def deep():
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Linear(512, 512) for _ in range(24)])


def test_the_second_pass_finds_its_weights_in_memory(tmp_path):
    model = deep()
    x = torch.ones(1, 512)
    with offloaded(model, tmp_path) as weights, torch.no_grad():
        model(x)
        for _ in range(3):
            before = weights.stats()
            model(x)
            after = weights.stats()
            assert after["hits"] - before["hits"] >= 22
            assert after["misses"] - before["misses"] <= 2


@pytest.mark.parametrize("training", [False, True])
def test_resident_weights_stay_within_the_limit(tmp_path, training):
    model = deep()
    limit = limit_of(model, "third")
    seen = []
    with offloaded(model, tmp_path) as weights:

        def note(*_):
            seen.append(weights.stats()["resident_bytes"])

        for layer in model:
            layer.register_forward_hook(note)
            layer.register_full_backward_hook(note)
        with torch.set_grad_enabled(training):
            for _ in range(3):
                y = model(torch.ones(1, 512))
                if training:
                    y.sum().backward()
        assert limit // 2 < max(seen) <= limit
        assert weights.stats()["overflows"] == 0


def test_the_limit_holds_if_memory_comes_back_late(tmp_path, monkeypatch):
    """A thread that has read a weight may hold its memory while other programs have the CPUs."""
    take = WeightMemory.take

    def late(self, nbytes, timeout=0):
        return take(self, nbytes) if timeout > 0.5 else None

    model = deep()
    with offloaded(model, tmp_path) as weights:
        model(torch.ones(1, 512))
        monkeypatch.setattr(WeightMemory, "take", late)
        for _ in range(2):
            model(torch.ones(1, 512))
        assert weights.stats()["overflows"] == 0


def test_parts_called_by_themselves_are_foreseen_too(tmp_path):
    model = deep()
    with offloaded(model, tmp_path) as weights, torch.no_grad():
        for _ in range(200):
            for layer in model:
                layer(torch.ones(1, 512))
        assert weights.stats()["misses"] < 24 * 60
        assert len(weights._residency._order._trace) < 3000
