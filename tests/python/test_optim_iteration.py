"""Steps that go on behind the next forward pass: the numbers of step() after backward()."""

import contextlib
import errno
import gc
import os
import signal
import threading
import warnings
import weakref

import pytest

torch = pytest.importorskip("torch")

import tensorferry
import tensorferry.offload
import tensorferry.optim
from drives import failing_drive
from offload_models import MODELS, make, same
from overlapping import (
    WIDTH,
    Watched,
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
from tensorferry.optim.backward import BackwardStep
from tensorferry.optim.late import LateStep
from tensorferry.optim.step import Step
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")


# --- the same bits ---


@pytest.mark.parametrize(
    "name", ["conv_net", "lstm", "attention", "tied", "random_depth", "own_weights", "reentrant"]
)
def test_weights_are_those_of_a_step_after_the_backward_pass(tmp_path, name, slow_drive):
    results = []
    for overlap in (None, "iteration"):
        model = make(name)
        optimizer = adamw(model, tmp_path, overlap)
        results.append(train(model, optimizer, MODELS[name][1], micro_batches=2))
        optimizer.close()
    check_same(results[1], results[0])


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(moments="int8"),
        dict(max_cpu_bytes="50%"),
        dict(buffer_count=1, buffer_bytes=1),
        dict(pipeline_read=False),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip", [None, 1e-3])
def test_every_form_of_states_gives_the_same_bits(tmp_path, options, dtype, clip):
    results = []
    for overlap in (None, "iteration"):
        model = deep(dtype=dtype)
        optimizer = adamw(model, tmp_path, overlap, **options)
        data = lambda: torch.randn(8, WIDTH, dtype=dtype)  # noqa: E731
        results.append(train(model, optimizer, data, clip=clip))
        optimizer.close()
    check_same(results[1], results[0])


@pytest.mark.parametrize("name", ["mlp", "attention", "tied", "not_reentrant", "repeated"])
def test_weights_on_the_drive_are_stepped_behind_the_forward_pass_too(tmp_path, name, slow_drive):
    data = MODELS[name][1]
    model = make(name)
    optimizer = adamw(model, tmp_path, None)
    expected = train(model, optimizer, data)
    optimizer.close()
    model = make(name)
    limit = sum(param.nbytes for param in model.parameters()) // 3
    weights = tensorferry.offload.parameters(model, tmp_path, limit, keep_bytes=1024)
    optimizer = iteration(model, tmp_path)
    losses, _ = train(model, optimizer, data)
    weights.close(restore=True)  # settles what the last step has left
    check_same((losses, [param.detach() for param in model.parameters()]), expected)
    optimizer.close()


@pytest.mark.parametrize("overlap", ["backward", "iteration"])
def test_states_weights_and_activations_are_on_the_drive_together(tmp_path, overlap, slow_drive):
    data = lambda: torch.randn(64, WIDTH)  # noqa: E731
    model = deep()
    optimizer = adamw(model, tmp_path, None)
    expected = train(model, optimizer, data)
    optimizer.close()
    model = deep()
    limit = sum(param.nbytes for param in model.parameters()) // 3
    weights = tensorferry.offload.parameters(model, tmp_path, limit, keep_bytes=1024)
    activations = tensorferry.offload.activations(tmp_path, 128 << 10, keep_bytes=1024)
    optimizer = adamw(model, tmp_path, overlap)

    def loss_of(model, x):
        with activations:
            return model(x).float().square().mean()

    losses, _ = train(model, optimizer, data, loss_of=loss_of)
    weights.close(restore=True)
    stats = activations.stats()
    assert stats["saved_bytes"] > 3 * (128 << 10) and stats["written_bytes"] > 0
    check_same((losses, [param.detach() for param in model.parameters()]), expected)
    optimizer.close()
    activations.close()


def test_a_step_that_nobody_has_announced_goes_on_behind_the_forward_pass(tmp_path, slow_drive):
    """Also that of GradScaler, which steps when all gradients are there."""
    results = []
    for overlap in (None, "iteration"):
        model = deep()
        optimizer = adamw(model, tmp_path, overlap)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        torch.manual_seed(11)
        losses = []
        for _ in range(3):
            loss = model(inputs()).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            assert any(map(is_pending, model.parameters())) == (overlap is not None)
            optimizer.zero_grad()
            losses.append(loss.detach())
        optimizer.close()
        results.append((torch.stack(losses), [param.detach() for param in model.parameters()]))
    check_same(results[1], results[0])


def test_the_settings_are_those_of_the_step_and_not_of_later(tmp_path, slow_drive):
    """A scheduler moves on, and the scale is changed in place, before the rest is stepped."""
    results = []
    for overlap in (None, "iteration"):
        model = deep()
        optimizer = adamw(model, tmp_path, overlap, lr=torch.tensor(1e-2))
        torch.manual_seed(11)
        for _ in range(3):
            model(inputs()).square().mean().backward()
            scale = torch.tensor(0.5)
            optimizer.step(gradient_scale=scale)
            scale.zero_()
            optimizer.param_groups[0]["lr"].mul_(0.5)
            optimizer.param_groups[0]["weight_decay"] += 0.5
            optimizer.zero_grad()
        assert optimizer.param_groups[0]["lr"].item() == pytest.approx(1e-2 / 8)
        optimizer.close()
        results.append([param.detach() for param in model.parameters()])
    for one, other in zip(*results):
        same(one, other)


@pytest.mark.parametrize("clips", [False, True])
def test_a_scale_that_is_changed_after_it_was_given_changes_nothing(tmp_path, slow_drive, clips):
    results = []
    for changed in (False, True):
        model = deep()
        optimizer = iteration(model, tmp_path)
        torch.manual_seed(11)
        for _ in range(3):
            scale = torch.tensor(0.5)
            with optimizer.last_backward(clips=clips, gradient_scale=scale):
                model(inputs()).square().mean().backward()
            if changed:
                scale.zero_()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        results.append([param.detach() for param in model.parameters()])
    for one, other in zip(*results):
        same(one, other)


def test_parameters_without_a_gradient_are_skipped_as_torch_does(tmp_path, slow_drive):
    class Some(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
            self.layers[2].requires_grad_(False)
            self.passes = 0

        def forward(self, x):
            self.passes += 1
            for number, layer in enumerate(self.layers):
                if number != self.passes % 3:
                    x = torch.tanh(layer(x))
            return x

    results = []
    for overlap in (None, "iteration"):
        model = Some()
        optimizer = adamw(model, tmp_path, overlap, buffer_bytes=1)
        results.append(train(model, optimizer, inputs, steps=6))
        optimizer.close()
    check_same(results[1], results[0])


# --- what is stepped when ---


def test_late_sub_groups_are_stepped_in_the_order_of_need(tmp_path, monkeypatch, slow_drive):
    """The parameters are listed from the last layer to the first: the first guess is wrong."""
    watched = Watched(monkeypatch)
    model = deep()
    listed = list(reversed(list(model.parameters())))
    layers = {param: number for number, param in enumerate(model.parameters())}
    options = dict(nvme_path=tmp_path, buffer_count=1, buffer_bytes=1)
    optimizer = tensorferry.optim.AdamW(listed, overlap="iteration", **options)
    for _ in range(2):
        begin(model, optimizer)
        watched.after.clear()
        model(inputs())
    order = [layers[group.shards[0].param] for group in watched.after]
    assert set(order) == set(layers.values())
    # One was on its way already, and nothing is pending when the pass ends.
    assert order[1:] == sorted(order[1:])
    assert not any(map(is_pending, listed))
    optimizer.close()


def test_a_module_waits_for_its_own_weights_only(tmp_path, slow_drive):
    model = deep()
    optimizer = iteration(model, tmp_path, buffer_count=1, buffer_bytes=1)
    begin(model, optimizer)
    last = {}
    model[-2].register_forward_pre_hook(
        lambda *_: last.update(first=is_pending(model[0].weight), own=is_pending(model[-2].weight))
    )
    assert all(map(is_pending, model.parameters()))
    assert all(param.grad is None for param in model.parameters())  # zero_grad() may take them
    model[-2](inputs())  # another module first: need is what is called
    assert last == {"first": True, "own": False}
    model(inputs())
    assert not any(map(is_pending, model.parameters()))
    optimizer.close()


def test_what_has_arrived_is_stepped_while_modules_run(tmp_path, monkeypatch):
    model = deep(layers=12)
    optimizer = iteration(model, tmp_path, buffer_bytes=1, max_cpu_bytes="100%")
    loaded = Step.is_next_loaded
    monkeypatch.setattr(Step, "is_next_loaded", lambda step: False)
    begin(model, optimizer)
    assert all(map(is_pending, model.parameters()))
    monkeypatch.setattr(Step, "is_next_loaded", loaded)
    nn.Tanh()(inputs())  # a module without weights
    assert not any(map(is_pending, model.parameters()))
    optimizer.close()


# --- what is refused, and failures ---


def test_a_second_backward_through_a_kept_graph_raises_as_torch_does(tmp_path, slow_drive):
    model = deep()
    optimizer = iteration(model, tmp_path)
    loss = model(torch.randn(8, WIDTH, requires_grad=True)).square().mean()
    with optimizer.last_backward():
        loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    assert any(map(is_pending, model.parameters()))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    optimizer.close()


def test_gradients_without_zero_grad_are_refused(tmp_path, slow_drive):
    model = deep()
    optimizer = iteration(model, tmp_path)
    model(inputs()).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="this gradient is gone"):
        model[0].weight.grad.norm()
    with pytest.raises(RuntimeError, match="used up its gradients"):
        optimizer.step()
    with pytest.raises(ValueError, match="closure"):
        optimizer.step(lambda: None)
    optimizer.close()


def test_several_ranks_are_refused_by_name(tmp_path, monkeypatch):
    model = deep()
    optimizer = iteration(model, tmp_path)
    model(inputs()).sum().backward()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    for call in (optimizer.step, lambda: optimizer.last_backward().__enter__()):
        with pytest.raises(RuntimeError, match="DistributedDataParallel"):
            call()
    monkeypatch.undo()
    optimizer.step()
    optimizer.close()


def test_a_step_that_fails_is_raised_by_the_next_call_of_the_model(tmp_path, monkeypatch):
    model = deep()
    optimizer = iteration(model, tmp_path, buffer_count=1, buffer_bytes=1)
    begin(model, optimizer)
    saved = {
        "model": {name: value.clone() for name, value in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
    }
    compute = Step.compute_next
    monkeypatch.setattr(Step, "is_next_loaded", lambda step: False)
    begin(model, optimizer)
    count = []

    def failing(step):
        count.append(1)
        if len(count) == 3:
            with step._failing():
                raise ZeroDivisionError("in the middle")
        compute(step)

    with monkeypatch.context() as patch:
        patch.setattr(Step, "compute_next", failing)
        with pytest.raises(ZeroDivisionError) as caught:
            model(inputs())
    assert any("load a checkpoint" in note for note in caught.value.__notes__)
    assert not any(map(is_pending, model.parameters()))
    assert not any(param.isnan().any() for param in model.parameters())
    for call in (optimizer.step, optimizer.state_dict, lambda: begin(model, optimizer)):
        with pytest.raises(RuntimeError, match="belong to different steps"):
            call()
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    optimizer.zero_grad()
    begin(model, optimizer)
    optimizer.close()


def test_a_drive_that_fails_is_told_by_the_next_forward_pass(tmp_path, monkeypatch):
    model = deep(layers=16, width=256)
    x = torch.randn(8, 256)
    with failing_drive(tmp_path) as drive:
        optimizer = iteration(model, drive.point)
        for _ in range(2):
            begin(model, optimizer, x)
        monkeypatch.setattr(Step, "is_next_loaded", lambda step: False)
        begin(model, optimizer, x)
        drive.end()
        with pytest.raises(OSError) as caught:
            model(x)
        assert caught.value.errno == errno.EIO
        with pytest.raises((OSError, RuntimeError), match="load a checkpoint"):
            optimizer.step()
        with contextlib.suppress(OSError):
            optimizer.close()


class Samples(torch.utils.data.Dataset):
    """Each has passed through a module, and tells what a look at the weights gives."""

    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 4

    def __getitem__(self, index):
        told = ""
        try:
            self.model(inputs())
        except RuntimeError as error:
            told = str(error)
        return nn.Tanh()(inputs()), told


def test_a_worker_of_a_data_loader_leaves_the_step_to_its_parent(tmp_path, slow_drive):
    expected = stepped(tmp_path)
    model = deep()
    optimizer = iteration(model, tmp_path)
    begin(model, optimizer)
    loader = torch.utils.data.DataLoader(
        Samples(model), num_workers=1, multiprocessing_context="fork", timeout=60
    )
    for _, (told,) in loader:
        assert "settle() of the optimizer before you fork" in told
    assert all(map(is_pending, model.parameters()))
    for param, other in zip(model.parameters(), expected):
        same(param.detach(), other)
    optimizer.close()


def test_a_child_does_not_wait_for_a_thread_that_steps_in_its_parent(
    tmp_path, slow_drive, monkeypatch
):
    model = deep()
    optimizer = iteration(model, tmp_path)
    begin(model, optimizer)
    compute, stepping, forked = Step.compute_next, threading.Event(), threading.Event()

    def slow(step):
        stepping.set()
        forked.wait(60)
        compute(step)

    monkeypatch.setattr(Step, "compute_next", slow)
    thread = threading.Thread(target=model, args=(inputs(),))
    thread.start()
    stepping.wait(60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a fork beside threads
        child = os.fork()
    if child == 0:
        signal.alarm(60)
        nn.Tanh()(inputs())
        os._exit(0)
    forked.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    thread.join()
    optimizer.close()


def test_the_parameters_keep_what_is_left_of_an_optimizer_that_is_gone(tmp_path, slow_drive):
    expected = stepped(tmp_path)
    model = deep()
    optimizer = iteration(model, tmp_path)
    begin(model, optimizer)
    late = weakref.ref(optimizer._late)
    del optimizer
    gc.collect()
    assert isinstance(late(), LateStep)
    same(model[0].weight.detach(), expected[0])
    same(model[-2].weight.detach(), expected[-2])
    model.state_dict()
    gc.collect()
    assert late() is None


# --- who announces the last micro-batch ---


@pytest.mark.parametrize("clip", [None, 1e-3])
def test_accelerate_announces_the_last_micro_batch(tmp_path, monkeypatch, clip):
    accelerate = pytest.importorskip("accelerate")
    watched = Watched(monkeypatch)
    results = []
    for overlap in (None, "backward", "iteration"):
        accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
        model = deep()
        ours = adamw(model, tmp_path, overlap, max_cpu_bytes="100%")
        if overlap is not None:
            ours.follow(accelerator, clips=clip is not None)
        model, optimizer = accelerator.prepare(model, ours)
        torch.manual_seed(11)
        losses = []
        for _ in range(6):
            with accelerator.accumulate(model):
                loss = model(inputs()).square().mean()
                accelerator.backward(loss)
                if clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        ours.close()
        results.append((torch.stack(losses), [param.detach() for param in model.parameters()]))
    check_same(results[1], results[0])
    check_same(results[2], results[0])
    assert bool(watched.inside) == (clip is None)


def test_following_again_takes_the_place_of_the_first_time(tmp_path):
    class Plain:
        scaler = None
        sync_gradients = True

        def backward(self, loss, **options):
            loss.backward(**options)

    model, accelerator = deep(), Plain()
    others = [nn.Parameter(torch.ones(3))]
    optimizer = iteration(model, tmp_path)
    beside = tensorferry.optim.AdamW(others, nvme_path=tmp_path, overlap="backward")
    for one, clips in ((optimizer, False), (beside, False), (optimizer, True)):
        one.follow(accelerator, clips=clips)
    accelerator.backward(model(inputs()).sum() + others[0].sum(), retain_graph=True)
    assert not optimizer.is_stepping and beside.is_stepping
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    beside.step()
    optimizer.close()
    beside.close()


def test_trainer_announces_the_last_micro_batch(tmp_path, monkeypatch):
    """It asks for the norm of the gradients in any case."""
    transformers = pytest.importorskip("transformers")
    announced = []
    begin_step = BackwardStep.begin
    monkeypatch.setattr(
        BackwardStep, "begin", lambda step, *rest: (announced.append(step), begin_step(step, *rest))
    )

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = deep()

        def forward(self, x):
            return {"loss": self.inner(x).square().mean()}

    results = []
    for overlap in (None, "iteration"):
        model = Model()
        optimizer = adamw(model, tmp_path, overlap)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        trainer = transformers.Trainer(
            model,
            transformers.TrainingArguments(
                output_dir=tmp_path / "out",
                use_cpu=True,
                max_steps=3,
                gradient_accumulation_steps=2,
                per_device_train_batch_size=2,
                max_grad_norm=1e-3,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=[{"x": torch.full((WIDTH,), float(n))} for n in range(16)],
            optimizers=(optimizer, schedule),
        )
        if overlap is not None:
            optimizer.follow(trainer.accelerator, clips=True)
        trainer.train()
        optimizer.close()
        results.append([param.detach() for param in model.parameters()])
    for one, other in zip(*results):
        same(one, other)
    assert len(announced) == 3 and all(step.clips for step in announced)


def test_following_needs_overlap_and_gradients_without_a_scale(tmp_path):
    class Scaled:
        scaler = torch.amp.GradScaler("cpu")
        sync_gradients = True

        def backward(self, loss):
            loss.backward()

    model = deep()
    optimizer = iteration(model, tmp_path)
    with pytest.raises(ValueError, match="clips=True"):
        optimizer.follow(Scaled())
    optimizer.close()
    optimizer = adamw(model, tmp_path, None)
    with pytest.raises(RuntimeError, match="follow.. needs overlap"):
        optimizer.follow(Scaled())
    optimizer.close()
