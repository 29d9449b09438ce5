"""Steps that are made while the backward pass runs: the numbers of step() after backward()."""

import contextlib
import errno

import pytest

torch = pytest.importorskip("torch")

import tensorferry
import tensorferry.offload
import tensorferry.optim
from drives import failing_drive
from offload_models import MODELS, make, same
from overlapping import SMALL, Watched, adamw, check_same, deep, train
from tensorferry.optim.backward import BackwardStep
from tensorferry.optim.spent_gradient import SpentGradient
from tensorferry.optim.store import StateStore
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

MiB = 1 << 20
pytestmark = pytest.mark.usefixtures("one_thread")


# --- the same bits ---


@pytest.mark.parametrize("name", ["conv_net", "lstm", "tied", "random_depth", "own_weights"])
def test_weights_are_those_of_a_step_after_the_backward_pass(tmp_path, name, micro_batches=2):
    results = []
    for overlap in (None, "backward"):
        model = make(name)
        optimizer = adamw(model, tmp_path, overlap)
        results.append(train(model, optimizer, MODELS[name][1], micro_batches=micro_batches))
        optimizer.close()
    check_same(results[1], results[0])


@pytest.mark.parametrize(
    "options",
    [
        dict(moments="int8"),
        dict(max_cpu_bytes="50%"),
        dict(buffer_count=1, buffer_bytes=1),
        dict(pipeline_read=False),
        dict(pipeline_write=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_form_of_states_gives_the_same_bits(tmp_path, options, dtype):
    results = []
    for overlap in (None, "backward"):
        model = deep(dtype=dtype)
        optimizer = adamw(model, tmp_path, overlap, **options)
        results.append(train(model, optimizer, lambda: torch.randn(8, 96, dtype=dtype)))
        optimizer.close()
    check_same(results[1], results[0])


def test_other_optimizers_and_states_that_load(tmp_path):
    results = []
    for overlap in (None, "backward"):
        model = deep()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = tensorferry.optim.offload(sgd, nvme_path=tmp_path, overlap=overlap, **SMALL)
        train(model, optimizer, lambda: torch.randn(8, 96))
        optimizer.load_state_dict(optimizer.state_dict())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        torch.manual_seed(11)
        for _ in range(3):
            loss = model(torch.randn(8, 96)).square().mean()
            with optimizer.last_backward() if overlap else contextlib.nullcontext():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        results.append((loss.detach(), [param.detach() for param in model.parameters()]))
        optimizer.close()
    check_same(results[1], results[0])


def test_parameters_without_a_gradient_are_skipped_as_torch_does(tmp_path, monkeypatch):
    """Another layer is left out in each pass, and one is frozen."""

    class Some(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(6))
            self.layers[2].requires_grad_(False)
            self.passes = 0

        def forward(self, x):
            self.passes += 1
            for number, layer in enumerate(self.layers):
                if number != self.passes % 3:
                    x = torch.tanh(layer(x))
            return x

    watched = Watched(monkeypatch)
    results = []
    for overlap in (None, "backward"):
        model = Some()
        optimizer = adamw(model, tmp_path, overlap, buffer_bytes=1)
        results.append(train(model, optimizer, lambda: torch.randn(8, 96), steps=6))
        optimizer.close()
    check_same(results[1], results[0])
    assert watched.inside


@pytest.mark.parametrize("name", ["mlp", "tied", "not_reentrant", "repeated"])
def test_weights_on_the_drive_can_be_stepped_in_the_backward_pass_too(tmp_path, name):
    data = MODELS[name][1]
    model = make(name)
    optimizer = adamw(model, tmp_path, None)
    expected = train(model, optimizer, data)
    optimizer.close()
    model = make(name)
    limit = sum(param.nbytes for param in model.parameters()) // 3
    weights = tensorferry.offload.parameters(model, tmp_path, limit, keep_bytes=1024)
    optimizer = adamw(model, tmp_path)
    losses, _ = train(model, optimizer, data)
    optimizer.close()
    weights.close(restore=True)
    check_same((losses, [param.detach() for param in model.parameters()]), expected)


def test_clipping_by_the_global_norm(tmp_path, monkeypatch):
    """States come in during the backward pass; gradients stay for torch's own clipping."""
    watched = Watched(monkeypatch)
    results = []
    for overlap in (None, "backward"):
        model = deep()
        optimizer = adamw(model, tmp_path, overlap)
        results.append(train(model, optimizer, lambda: torch.randn(8, 96), clip=1e-3))
        optimizer.close()
    check_same(results[1], results[0])
    assert not watched.inside


@pytest.mark.parametrize("overlap", ["backward", "iteration"])
def test_states_are_read_ahead_while_gradients_wait_to_be_clipped(tmp_path, monkeypatch, overlap):
    """As many as the buffers hold, and each once."""
    reads = []
    read = StateStore.read
    monkeypatch.setattr(
        StateStore,
        "read",
        lambda store, group, memory: reads.append(group) or read(store, group, memory),
    )
    model = deep()
    optimizer = adamw(model, tmp_path, overlap, buffer_count=3, buffer_bytes=1)
    count = len(list(optimizer._sub_groups))
    for step in range(2):
        reads.clear()
        with optimizer.last_backward(clips=True):
            model(torch.randn(8, 96)).square().mean().backward()
        ahead = len(reads)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.settle()
        optimizer.zero_grad()
        if step == 1:  # the first step has no states
            assert 1 <= ahead < count
            assert len(reads) == len(set(reads)) == count
    optimizer.close()


@pytest.mark.parametrize("kind", ["backward", "iteration"])
def test_a_step_that_is_skipped_after_clipping_leaves_nothing(tmp_path, kind):
    """A loop skips a step whose norm is infinite, and lets the model zero its gradients."""
    results = []
    for overlap in (None, kind):
        model = deep()
        optimizer = adamw(model, tmp_path, overlap)
        torch.manual_seed(11)
        for step in range(4):
            loss = model(torch.randn(8, 96)).square().mean()
            announced = contextlib.nullcontext() if overlap is None else None
            with announced or optimizer.last_backward(clips=True, gradient_scale=0.5 + step):
                loss.backward()
            if step != 1:
                optimizer.step(gradient_scale=0.5 + step if overlap is None else None)
            model.zero_grad()
        optimizer.close()
        results.append([param.detach() for param in model.parameters()])
    for one, other in zip(*results):
        same(one, other)


CONFIG = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"offload_optimizer": {"device": "nvme"}},
}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_accumulation_steps": 3},
        {"gradient_clipping": 1e-3, "gradient_accumulation_steps": 2},
        {"bf16": {"enabled": True}},
        {"bf16": {"enabled": True, "check_grad_overflow": False}},
        {"fp16": {"enabled": True}},
    ],
    ids=str,
)
def test_initialize_announces_the_last_micro_batch(tmp_path, settings, monkeypatch):
    watched = Watched(monkeypatch)
    results = []
    for overlap in (None, "backward", "iteration"):
        config = {**CONFIG, **settings}
        config["zero_optimization"] = {
            "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 1}
        }
        model, optimizer = tensorferry.initialize(deep(), config, overlap=overlap)
        torch.manual_seed(11)
        losses = []
        for _ in range(6):
            x = torch.randn(8, 96, dtype=next(model.parameters()).dtype)
            loss = model(x).float().square().mean()
            optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        results.append((torch.stack(losses), [param.detach() for param in model.parameters()]))
        optimizer.close()
    check_same(results[1], results[0])
    check_same(results[2], results[0])
    needs_norm = {"gradient_clipping", "fp16"} & settings.keys()
    needs_norm |= {key for key in settings if settings[key] == {"enabled": True}}
    assert bool(watched.inside) == (not needs_norm)


def test_initialize_refuses_overlap_where_gradients_would_wait_in_memory(tmp_path):
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    states = {"zero_optimization": {"offload_optimizer": nvme}}
    weights = {"zero_optimization": {"offload_optimizer": nvme, "offload_param": nvme}}
    for settings, words in (
        ({}, "keeps the states in memory"),
        ({**weights, "gradient_clipping": 1.0}, "needs gradients that are final"),
        ({**states, "aio": {"overlap_events": False}}, "choose one"),
    ):
        config = {"optimizer": CONFIG["optimizer"], **settings}
        with pytest.raises(tensorferry.ConfigError, match=words):
            tensorferry.initialize(deep(), config, overlap="backward")


# --- what happens in the backward pass ---


def test_gradients_are_freed_and_states_are_read_in_the_order_of_the_backward_pass(
    tmp_path, monkeypatch
):
    watched = Watched(monkeypatch)
    model = deep(layers=12)
    optimizer = adamw(model, tmp_path)
    for step in range(3):
        with optimizer.last_backward():
            model(torch.randn(8, 96)).square().mean().backward()
        assert all(isinstance(param.grad, SpentGradient) for param in model.parameters())
        with pytest.raises(RuntimeError, match="this gradient is gone"):
            model[0].weight.grad.add(1)
        assert "that is stepped" in repr(model[0].weight.grad)
        optimizer.step()
        if step < 2:
            optimizer.zero_grad()
    assert watched.inside
    for call in (optimizer.step, lambda: optimizer.last_backward().__enter__()):
        with pytest.raises(RuntimeError, match="used up its gradients"):
            call()
    optimizer.zero_grad(set_to_none=False)
    assert all(param.grad is None for param in model.parameters())
    optimizer.close()


def test_a_gradient_is_freed_before_the_next_ones_come(tmp_path):
    model = deep(layers=12)
    optimizer = adamw(model, tmp_path, buffer_bytes=1, max_cpu_bytes="100%")  # no state is late
    gradients, living = [], []

    def note(param):
        living.append(sum(not gradient.expired() for gradient in gradients))
        gradients.append(StorageWeakRef(param.grad.untyped_storage()))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(note)
    for _ in range(2):
        with optimizer.last_backward():
            model(torch.randn(8, 96)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(living) == 2 * 24 and max(living) <= 2
    optimizer.close()


@pytest.mark.parametrize("overlap", ["backward", "iteration"])
def test_while_a_gpu_is_behind_the_backward_pass_waits_for_states(tmp_path, monkeypatch, overlap):
    """torch gives a GPU a whole backward pass at once. Here it is played by nobody."""
    watched = Watched(monkeypatch)
    model = deep(layers=12)
    optimizer = adamw(model, tmp_path, overlap, buffer_count=1)
    for step in range(2):
        watched.inside.clear()
        if step == 1:
            monkeypatch.setattr(BackwardStep, "_is_gpu_behind", lambda step: True)
        with optimizer.last_backward():
            model(torch.randn(8, 96)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(watched.inside) == len(list(optimizer._sub_groups)) > 2
    optimizer.close()


def test_the_order_is_that_of_the_last_backward_pass(tmp_path, monkeypatch):
    """The parameters are listed from the last layer to the first: the first guess is wrong."""
    watched = Watched(monkeypatch)
    model = deep()
    listed = list(reversed(list(model.parameters())))
    options = dict(SMALL, buffer_bytes=1, max_cpu_bytes="100%")  # no read can be late
    optimizer = tensorferry.optim.AdamW(listed, nvme_path=tmp_path, overlap="backward", **options)
    orders = []
    for _ in range(3):
        watched.inside.clear()
        with optimizer.last_backward():
            model(torch.randn(8, 96)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        orders.append([int(group.key.rpartition("/")[2]) for group in watched.inside])
    count = len(orders[0])
    assert count > 2
    assert orders[0] == list(range(count))[::-1]
    # The last layer comes first now. Within a layer the order is torch's.
    assert orders[1] == orders[2]
    assert sorted(orders[1]) == list(range(count))
    assert orders[1].index(0) < orders[1].index(count - 1)
    optimizer.close()


def test_a_second_backward_through_a_kept_graph_raises_as_torch_does(tmp_path):
    model = deep()
    optimizer = adamw(model, tmp_path)
    loss = model(torch.randn(8, 96, requires_grad=True)).square().mean()
    with optimizer.last_backward():
        loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    optimizer.close()


# --- what is refused ---


def test_calls_out_of_turn_are_refused(tmp_path):
    model = deep()
    optimizer = adamw(model, tmp_path)
    x = torch.randn(8, 96)
    with optimizer.last_backward():
        model(x).sum().backward()
    for call in (
        optimizer.state_dict,
        optimizer.zero_grad,
        lambda: optimizer.last_backward().__enter__(),
        lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]}),
    ):
        with pytest.raises(RuntimeError, match=r"call step\(\) before"):
            call()
    with pytest.raises(ValueError, match="gradient_scale"):
        optimizer.step(gradient_scale=0.5)
    with pytest.raises(ValueError, match="closure"):
        optimizer.step(lambda: None)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"call zero_grad\(\)"):
        model(x).sum().backward()
    with pytest.raises(RuntimeError, match="this gradient is gone"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.zero_grad()
    with optimizer.last_backward(clips=True):
        model(x).sum().backward()
    optimizer.zero_grad()  # the step is not made
    with optimizer.last_backward(), pytest.raises(RuntimeError, match="create_graph"):
        model(x).sum().backward(create_graph=True)
    optimizer.close()


def test_options_that_exclude_it_are_refused(tmp_path):
    params = [nn.Parameter(torch.ones(3))]
    with pytest.raises(ValueError, match="overlap is 'forward'"):
        tensorferry.optim.AdamW(params, nvme_path=tmp_path, overlap="forward")
    with pytest.raises(ValueError, match="offload_gradients"):
        tensorferry.optim.AdamW(
            params, nvme_path=tmp_path, overlap="backward", offload_gradients=True
        )
    # False is the setting of the swap space.
    optimizer = tensorferry.optim.AdamW(params, nvme_path=tmp_path, overlap=False)
    with pytest.raises(RuntimeError, match="needs overlap"), optimizer.last_backward():
        pass
    optimizer.close()


def test_reentrant_checkpointing_of_shared_weights_is_refused(tmp_path):
    torch.manual_seed(0)
    layer = nn.Linear(96, 96)
    optimizer = adamw(layer, tmp_path)
    x = torch.randn(8, 96, requires_grad=True)
    y = checkpoint(layer, x, use_reentrant=True)
    loss = checkpoint(layer, y, use_reentrant=True).sum()
    with pytest.raises(RuntimeError, match="use_reentrant=False"), optimizer.last_backward():
        loss.backward()
    with pytest.raises(RuntimeError, match="load a checkpoint"):
        optimizer.step()
    optimizer.close()


def test_grad_scaler_is_refused(tmp_path):
    model = deep()
    optimizer = adamw(model, tmp_path)
    scaler = torch.amp.GradScaler("cpu")
    with optimizer.last_backward():
        scaler.scale(model(torch.randn(8, 96)).sum()).backward()
    with pytest.raises(RuntimeError, match="GradScaler cannot be used"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="load a checkpoint"):
        optimizer.step()
        optimizer.state_dict()
    optimizer.close()


# --- failures ---


def test_a_backward_pass_that_fails_in_the_middle_leaves_what_a_failed_step_leaves(tmp_path):
    model = deep()
    optimizer = adamw(model, tmp_path, buffer_bytes=1, max_cpu_bytes="100%")  # no read is late
    x = torch.randn(8, 96)
    with optimizer.last_backward():
        model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    saved = {
        "model": {name: value.clone() for name, value in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
    }

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ZeroDivisionError("in the middle")

    with pytest.raises(ZeroDivisionError) as caught, optimizer.last_backward():
        model[4:](Fails.apply(model[:4](x))).sum().backward()
    assert any("load a checkpoint" in note for note in caught.value.__notes__)
    for call in (optimizer.step, optimizer.state_dict):
        with pytest.raises(RuntimeError, match="belong to different steps"):
            call()
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    optimizer.zero_grad()
    with optimizer.last_backward():
        model(x).sum().backward()
    optimizer.step()
    optimizer.close()


def test_a_drive_that_fails_is_told_by_the_pass_that_needs_it(tmp_path):
    model = deep(layers=16, width=256)
    with failing_drive(tmp_path) as drive:
        optimizer = adamw(model, drive.point)
        x = torch.randn(8, 256)
        for _ in range(2):
            with optimizer.last_backward():
                model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        drive.lose()
        with pytest.raises(OSError) as caught:
            with optimizer.last_backward():
                model(x).sum().backward()
            optimizer.step()
        assert caught.value.errno == errno.EIO
        # If nothing had changed before, it may be tried again.
        with pytest.raises((OSError, RuntimeError), match="load a checkpoint|Input/output error"):
            optimizer.step()
        with contextlib.suppress(OSError):
            optimizer.close()
