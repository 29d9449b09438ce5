"""p.grad of gradients on the drive: torch's functions compute with it, or say that they cannot."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import tensorferry.optim
import torch
from drives import failing_drive
from tensorferry.optim.gradients import GradientStore
from torch.nn.utils import clip_grad_norm_  # as a program that knows nothing of tensorferry
from training import TINY, assert_same, loss_of, on_drive, small_model, twin


def sides(tmp_path, dtype=torch.float32, **own):
    """(model, our optimizer), (its twin, torch's)."""
    model = small_model(dtype=dtype)
    other = twin(model)
    ours = tensorferry.optim.AdamW(
        model.parameters(),
        lr=0.02,
        nvme_path=tmp_path,
        offload_gradients=True,
        master_weights=False,
        **(TINY | own),
    )
    return (model, ours), (other, torch.optim.AdamW(other.parameters(), lr=0.02, fused=True))


def train(both, between, steps=4):
    """The same on each side; `between(side, optimizer)` is called before each step."""
    for step in range(steps):
        said = []
        for side, optimizer in both:
            for micro in range(1 + step % 2):
                loss_of(side, 10 * step + micro).backward()
            said.append(between(side, optimizer))
            optimizer.step()
            optimizer.zero_grad()
        for mine, their in zip(*said):
            assert torch.equal(mine, their)
        assert_same(*(list(side.parameters()) for side, _ in both), f"after step {step}")


WAYS = {
    "by name": clip_grad_norm_,
    "by attribute": lambda *args, **options: torch.nn.utils.clip_grad_norm_(*args, **options),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("way", WAYS)
def test_clip_grad_norm_of_torch_clips(tmp_path, dtype, foreach, norm_type, way):
    def between(side, optimizer):
        assert side is other or all(map(on_drive, side.parameters()))
        return [
            WAYS[way](side.parameters(), limit, norm_type, foreach=foreach)
            for limit in (0.02, 1e6, 0.01)
        ]

    both = sides(tmp_path, dtype)
    other = both[1][0]
    train(both, between)


@pytest.mark.parametrize("foreach", [None, True])
def test_other_ways_to_clip_with_torch(tmp_path, foreach):
    def between(side, optimizer):
        params = list(side.parameters())
        torch.nn.utils.clip_grad_value_(params, 1e-3, foreach=foreach)
        norm = torch.nn.utils.get_total_norm([p.grad for p in params], foreach=foreach)
        torch.nn.utils.clip_grads_with_norm_(params, 1e-2, norm, foreach=foreach)
        return [norm, torch.nn.utils.get_total_norm([p.grad for p in params], foreach=foreach)]

    train(sides(tmp_path), between)


def test_a_norm_that_is_not_finite_is_an_error_where_that_is_asked_for(tmp_path):
    (model, ours), _ = sides(tmp_path)
    (loss_of(model, 0) * float("nan")).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert clip_grad_norm_(model.parameters(), 1.0).isnan()


def test_gradients_in_memory_and_of_several_optimizers_are_clipped_together(tmp_path):
    models = small_model(), small_model()
    for model in models:
        model[1].requires_grad_(False)
    parts = [[list(part.parameters()) for part in (m[0], m[3], m[5])] for m in models]
    kinds = dict(nvme_path=tmp_path, buffer_count=1, buffer_bytes=1)
    ours = [
        tensorferry.optim.AdamW(parts[0][0], offload_gradients=True, **kinds),
        tensorferry.optim.AdamW(parts[0][1], offload_gradients=True, **kinds),
        torch.optim.AdamW(parts[0][2], fused=True),
    ]
    theirs = [torch.optim.AdamW(part, fused=True) for part in parts[1]]
    for step in range(3):
        norms = []
        for model, optimizers in zip(models, (ours, theirs)):
            loss_of(model, step).backward()
            norms.append(clip_grad_norm_(model.parameters(), 0.01))
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
        assert torch.equal(*norms)
        assert_same(*(list(model.parameters()) for model in models), f"after step {step}")


def test_an_optimizer_may_step_gradients_that_another_has_on_the_drive(tmp_path):
    """One of torch and one of ours, with and without gradients of its own on the drive."""
    models = [small_model() for _ in range(2)]
    kinds = dict(nvme_path=tmp_path, lr=0.01, buffer_count=1, buffer_bytes=1)
    params, others = (list(model.parameters()) for model in models)
    ours = [
        tensorferry.optim.AdamW(params, offload_gradients=True, **kinds),
        tensorferry.optim.AdamW(params, offload_gradients=True, **kinds),
        tensorferry.optim.AdamW(params, **kinds),
        torch.optim.AdamW(params, lr=0.01, foreach=True),
    ]
    theirs = [torch.optim.AdamW(others, lr=0.01, fused=True) for _ in range(3)]
    theirs.append(torch.optim.AdamW(others, lr=0.01, foreach=True))
    for step in range(2):
        for model, optimizers in zip(models, (ours, theirs)):
            loss_of(model, step).backward()
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
        assert_same(params, others, f"after step {step}")


def test_clipping_has_one_gradient_in_memory_at_a_time(tmp_path, monkeypatch):
    (model, ours), _ = sides(tmp_path)
    load, live, most = GradientStore.load, weakref.WeakSet(), []

    def noted(*args):
        result = load(*args)
        live.add(result.untyped_storage())
        most.append(len(live))
        return result

    monkeypatch.setattr(GradientStore, "load", noted)
    for foreach in (True, False):
        for _ in range(2):  # the second time the norms are not known
            loss_of(model, 0).backward()
        clip_grad_norm_(model.parameters(), 0.01, foreach=foreach)
        clip_grad_norm_(model.parameters(), 0.01, 1.0, foreach=foreach)
    assert len(most) >= 4 * len(list(model.parameters())) and max(most) == 1


# --- GradScaler ---


@pytest.mark.parametrize("clipped", [False, True])
def test_a_grad_scaler_unscales_checks_and_skips(tmp_path, clipped):
    both = sides(tmp_path)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in both]
    for step in range(6):
        scales = []
        for (side, optimizer), scaler in zip(both, scalers):
            for micro in range(2):
                loss = loss_of(side, 10 * step + micro)
                scaler.scale(loss * float("inf") if step == 3 and micro == 0 else loss).backward()
            if clipped:
                scaler.unscale_(optimizer)
                scales.append(clip_grad_norm_(side.parameters(), 0.01))
            before = [param.detach().clone() for param in side.parameters()]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            kept = all(map(torch.equal, before, side.parameters()))
            assert kept == (step == 3)
            scales.append(torch.tensor(scaler.get_scale()))
        half = len(scales) // 2
        for mine, their in zip(scales[:half], scales[half:]):
            assert torch.equal(mine, their) or step == 3 and mine.isnan() and their.isnan()
        assert_same(*(list(side.parameters()) for side, _ in both), f"after step {step}")


def test_a_grad_scaler_does_not_take_a_norm_that_overflows_for_an_infinite_gradient(tmp_path):
    (model, ours), _ = sides(tmp_path)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(sum(param.sum() for param in model.parameters()) * 3e20).backward()
    assert model[0].weight.grad.norm().isinf()
    before = model[0].weight.detach().clone()
    scaler.step(ours)
    assert not torch.equal(model[0].weight, before)


# --- as a tensor ---


READS = {
    "clone": lambda g: g.clone(),
    "float": lambda g: g.double(),
    "to": lambda g: g.to("cpu", torch.bfloat16),
    "norm": lambda g: g.norm(),
    "norm in another dtype": lambda g: torch.linalg.vector_norm(g, dtype=torch.float64),
    "norm of rows": lambda g: torch.linalg.vector_norm(g, 2, dim=1),
    "largest": lambda g: g.abs().max(),
    "finite": lambda g: torch.isfinite(g).all(),
    "product": lambda g: g * 0.5 + 1,
    "stacked": lambda g: torch.stack([g, g]),
    "copied": lambda g: torch.empty_like(g, device="cpu").copy_(g),
    "out": lambda g: torch.mul(g, 2, out=torch.empty(g.shape)),
    "deepcopy": copy.deepcopy,
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "detached": lambda g: g.detach().clone(),
    "data": lambda g: g.data.clone(),
    "viewed as it is": lambda g: g.view(g.shape).clone(),
}

WRITES = {
    "mul_": lambda p: p.grad.mul_(0.5),
    "mul_ by a tensor": lambda p: p.grad.mul_(torch.tensor(0.5)),
    "mul_ by elements": lambda p: p.grad.mul_(torch.full(p.shape, 0.5)),
    "div_": lambda p: p.grad.div_(3),
    "add_": lambda p: p.grad.add_(torch.ones(p.shape), alpha=0.1),
    "add_ a number": lambda p: p.grad.add_(1),
    "copy_": lambda p: p.grad.copy_(torch.ones(p.shape)),
    "itself": lambda p: p.grad.add_(p.grad),
    "its alias": lambda p: p.grad.add_(p.grad.detach()),
    "foreach": lambda p: torch._foreach_add_([p.grad], [torch.ones(p.shape)]),
    "foreach by numbers": lambda p: torch._foreach_mul_([p.grad], [0.5]),
    "foreach by tensors": lambda p: torch._foreach_mul_([p.grad], [torch.tensor(0.5)]),
    "out": lambda p: torch.add(torch.ones(p.shape), 1, out=p.grad),
    "zero_": lambda p: p.grad.zero_(),
    "data": lambda p: p.grad.data.mul_(0.5),
    "data given": lambda p: setattr(p.grad, "data", torch.ones(p.shape)),
    "another": lambda p: setattr(p, "grad", p.grad * 2),
    "noise": lambda p: p.grad.normal_(generator=torch.Generator().manual_seed(1)),
    "in turn": lambda p: p.grad.mul_(0.5).clamp_(-1e-3, 1e-3).add_(1).mul_(2).zero_().add_(1),
}


@pytest.mark.parametrize("name", READS)
def test_a_gradient_on_the_drive_is_read(tmp_path, name):
    (model, ours), (other, _) = sides(tmp_path)
    for changed in (False, True):
        for side in (model, other):
            loss_of(side, 0).backward()
            if changed:
                side[0].weight.grad.mul_(0.7)
        mine, their = (READS[name](side[0].weight.grad) for side in (model, other))
        assert type(mine) is torch.Tensor and torch.equal(mine, their)
        assert on_drive(model[0].weight)


@pytest.mark.parametrize("name", WRITES)
def test_a_gradient_on_the_drive_is_changed(tmp_path, name):
    def between(side, optimizer):
        for param in side.parameters():
            WRITES[name](param)
        return [param.grad.clone() for param in side.parameters()]

    train(sides(tmp_path), between, steps=2)


REFUSED = {
    "view": lambda g: g.view(-1),
    "index": lambda g: g[0],
    "assigned index": lambda g: g.__setitem__((0, 0), 1.0),
    "transposed": lambda g: g.t(),
    "numpy": lambda g: g.numpy(),
    "pointer": lambda g: g.data_ptr(),
    "list": lambda g: g.tolist(),
    "shared": lambda g: g.share_memory_(),
    "dlpack": torch.from_dlpack,
    "written": lambda g: tensorferry.Handle().write(g, "gradient.bin"),
    "resized": lambda g: g.resize_(2, 2),
    "other data": lambda g: setattr(g, "data", torch.ones(2)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_wants_the_memory_of_a_gradient_on_the_drive_is_refused(tmp_path, name):
    (model, ours), _ = sides(tmp_path)
    loss_of(model, 0).backward()
    before = model[0].weight.grad.clone()
    with pytest.raises(RuntimeError, match="gradient.*on the drive"):
        REFUSED[name](model[0].weight.grad)
    assert torch.equal(model[0].weight.grad.clone(), before)


def test_a_gradient_of_before_is_not_taken_for_that_of_now(tmp_path):
    (model, ours), _ = sides(tmp_path)
    weight = model[0].weight
    for forget in (ours.zero_grad, model.zero_grad, lambda: setattr(weight, "grad", None)):
        loss_of(model, 0).backward()
        old = weight.grad
        forget()
        assert weight.grad is None
        loss_of(model, 1).backward()
        with pytest.raises(RuntimeError, match="not on the drive any more"):
            old.norm()
        weight.grad.norm()
        ours.zero_grad()


def test_a_gradient_given_to_another_parameter_is_stepped_there(tmp_path):
    models = small_model(), small_model()
    for model in models:
        model.append(twin(model[5]))
    params, others = (list(model[:6].parameters()) for model in models)
    ours = tensorferry.optim.AdamW(
        [*params, models[0][6].weight], nvme_path=tmp_path, offload_gradients=True, **TINY
    )
    theirs = torch.optim.AdamW([*others, models[1][6].weight], fused=True)
    for model, optimizer in zip(models, (ours, theirs)):
        loss_of(model[:6], 0).backward()
        model[6].weight.grad = model[5].weight.grad
        optimizer.step()
    assert_same(*(list(model.parameters()) for model in models))


def test_parameters_with_a_gradient_on_the_drive_are_copied_and_saved(tmp_path):
    (model, ours), _ = sides(tmp_path)
    loss_of(model, 0).backward()
    copied = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(dict(model=model.state_dict(), gradient=model[0].weight.grad), file)
    file.seek(0)
    loaded = torch.load(file)
    assert torch.equal(loaded["gradient"], model[0].weight.grad.clone())
    assert_same(list(model.parameters()), list(copied.parameters()))
    assert all(param.grad is None for param in copied.parameters())


def test_a_model_that_is_moved_to_where_it_is_keeps_its_gradients(tmp_path):
    def between(side, optimizer):
        side.to("cpu")
        return [param.grad.clone() for param in side.parameters()]

    train(sides(tmp_path), between)


def test_a_gradient_that_could_not_be_written_is_not_computed_with(tmp_path):
    with failing_drive(tmp_path) as drive:
        (model, ours), _ = sides(drive.point, fast_init=False)
        drive.end()
        loss_of(model, 0).backward()
        for use in (
            lambda: clip_grad_norm_(model.parameters(), 1.0, norm_type=1.0),
            lambda: model[0].weight.grad.clone(),
            lambda: loss_of(model, 0).backward(),
            ours.step,
        ):
            with pytest.raises(RuntimeError, match="gradient could not be written.*zero_grad"):
                use()
        model.zero_grad(set_to_none=False)
        assert clip_grad_norm_(model.parameters(), 1.0, norm_type=1.0) == 0
        ours.close()


def test_hooks_of_users_see_and_change_the_gradient(tmp_path):
    def between(side, optimizer):
        return [param.grad.clone() for param in side.parameters()]

    def add(param):
        param.grad.add_(param.detach())

    both = sides(tmp_path)
    for side, _ in both:
        for param in side.parameters():
            param.register_post_accumulate_grad_hook(add)
            param.register_hook(lambda gradient: gradient * 2)
    train(both, between)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_backward_pass_with_a_graph_of_its_own_is_said(tmp_path):
    (model, ours), _ = sides(tmp_path)
    loss_of(model, 0).backward(create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        sum(param.grad.square().sum() for param in model.parameters()).backward()


def test_nothing_is_left_of_an_optimizer_and_its_parameters(tmp_path):
    (model, ours), _ = sides(tmp_path)
    loss_of(model, 0).backward()
    gone = [weakref.ref(model), weakref.ref(ours), weakref.ref(ours._gradients)]
    gradient = model[0].weight.grad
    del model, ours
    gc.collect()
    assert all(reference() is None for reference in gone)
    with pytest.raises(RuntimeError, match="not on the drive any more"):
        gradient.norm()
