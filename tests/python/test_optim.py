"""Optimizers with states on NVMe: the same numbers as torch's, to the last bit."""

import gc
import os

import pytest
import tensorferry.optim
import torch
from master_adamw import MasterAdamW
from tensorferry import InvalidArgument
from training import (
    TINY,
    MiB,
    assert_same,
    assert_same_states,
    batch,
    both,
    copies,
    give_gradients,
    loss_of,
    parameters,
    small_model,
    twin,
)

KINDS = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}


def pair(tmp_path, name="AdamW", params=None, own=None, **options):
    """Ours and torch's, over copies of the same parameters."""
    mine = parameters() if params is None else params
    theirs = copies(mine)
    ours = getattr(tensorferry.optim, name)(mine, **options, nvme_path=tmp_path, **(own or TINY))
    return mine, ours, theirs, KINDS[name](theirs, fused=True, **options)


def train(mine, ours, theirs, reference, steps=50, skip=lambda step: ()):
    for step in range(steps):
        give_gradients(step, mine, theirs, skip=skip(step))
        ours.step()
        reference.step()
        assert_same(mine, theirs, f"after step {step}")


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
        dict(amsgrad=True, weight_decay=0.3),
        dict(maximize=True, weight_decay=0),
        dict(lr=torch.tensor(0.01)),
    ],
    ids=["plain", "settings", "amsgrad", "maximize", "tensor lr"],
)
def test_fifty_steps_are_those_of_torch(tmp_path, name, options):
    own = dict(buffer_count=2, buffer_bytes=150_000)
    mine, ours, theirs, reference = pair(tmp_path, name, own=own, **options)
    train(mine, ours, theirs, reference, steps=50 if name == "AdamW" else 15)
    assert_same_states(ours.state_dict(), reference.state_dict())
    ours.close()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("size", [1, 100_000, 16 * MiB])
@pytest.mark.parametrize("way", ["plain", "pipeline_write", "no pipeline_read", "fast_init=False"])
def test_buffers_do_not_change_the_numbers(tmp_path, count, size, way):
    own = dict(
        buffer_count=count,
        buffer_bytes=size,
        pipeline_write=way == "pipeline_write",
        pipeline_read=way != "no pipeline_read",
        fast_init=way != "fast_init=False",
    )
    mine, ours, theirs, reference = pair(tmp_path, own=own)
    train(mine, ours, theirs, reference, steps=4)
    ours.close()


class Watched:
    """A SwapSpace that notes for what its users wait while they wait for room."""

    def __init__(self, space):
        self.space, self.waits = space, []

    def __getattr__(self, name):
        return getattr(self.space, name)

    def take(self, *arguments, until=None):
        self.waits.append(until)
        return self.space.take(*arguments, until=until)


def test_a_step_waits_for_room_and_for_its_states_at_once(tmp_path):
    """The next reads begin as soon as writes give buffers back, not when the states have come."""
    params = [torch.nn.Parameter(torch.ones(1 << 20)) for _ in range(8)]
    run = pair(tmp_path, params=params, own=dict(buffer_count=2, buffer_bytes=8 * MiB))
    mine, ours, theirs, reference = run
    train(*run, steps=2)
    watched = ours._store.space = Watched(ours._store.space)
    train(*run, steps=1)
    assert any(wait is not None for wait in watched.waits), watched.waits
    ours._store.space = watched.space
    ours.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_parameter_that_is_cut_is_stepped_as_a_whole(tmp_path, threads):
    """At sizes where torch uses several threads, and with pieces of several sizes."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for size in (200_000, 3_000_000):
            params = [torch.nn.Parameter(torch.randn(1_000_003)), torch.nn.Parameter(torch.ones(9))]
            own = dict(buffer_count=3, buffer_bytes=size)
            mine, ours, theirs, reference = pair(tmp_path, params=params, own=own)
            train(mine, ours, theirs, reference, steps=5)
            ours.close()
    finally:
        torch.set_num_threads(before)


def test_double_precision(tmp_path):
    run = pair(tmp_path, params=parameters(torch.float64))
    train(*run, steps=10)
    assert_same_states(run[1].state_dict(), run[3].state_dict())


def test_groups_have_settings_of_their_own(tmp_path):
    mine = parameters()
    theirs = copies(mine)

    def groups(params):
        return [
            dict(params=params[:4], lr=0.1),
            dict(params=params[4:7], betas=(0.5, 0.7), weight_decay=0.2),
            dict(params=params[7:], amsgrad=True, maximize=True, eps=1e-3),
        ]

    ours = tensorferry.optim.AdamW(
        groups(mine), nvme_path=tmp_path, buffer_count=1, buffer_bytes=400_000
    )
    reference = torch.optim.AdamW(groups(theirs), fused=True)
    train(mine, ours, theirs, reference, steps=10)
    assert_same_states(ours.state_dict(), reference.state_dict())


def test_parameters_without_a_gradient_are_left_alone(tmp_path):
    """Each gets its first gradient, and its states, in another step; in one buffer of just that
    size."""
    for size in (1, 250_000):
        own = dict(buffer_count=1, buffer_bytes=size)
        mine, ours, theirs, reference = pair(tmp_path, own=own)
        count = len(mine)
        train(mine, ours, theirs, reference, steps=1, skip=lambda step: range(count))
        train(
            mine,
            ours,
            theirs,
            reference,
            steps=12,
            skip=lambda step: [i for i in range(count) if i > step or (i + step) % 4 == 1],
        )
        assert_same_states(ours.state_dict(), reference.state_dict())
        ours.close()


def test_many_small_parameters_fit_one_small_buffer(tmp_path):
    for dtype in (torch.float32, torch.bfloat16):
        for gradients in (False, True):
            params = [torch.nn.Parameter(torch.randn(i % 7 + 1).to(dtype)) for i in range(200)]
            ours = tensorferry.optim.AdamW(
                params,
                nvme_path=tmp_path,
                buffer_count=1,
                buffer_bytes=256 << 10,
                amsgrad=True,
                offload_gradients=gradients,
            )
            theirs = copies(params)
            reference = MasterAdamW(theirs, amsgrad=True)
            for step in range(3):
                give_gradients(step, params, theirs, skip=range(step, 200, 3) if step < 2 else ())
                ours.step()
                reference.step()
                ours.zero_grad()
                assert_same(params, theirs, f"{dtype} {gradients} {step}")
            ours.close()


def test_parameters_can_be_frozen_and_thawed(tmp_path):
    model = small_model()
    other = twin(model)
    ours = tensorferry.optim.AdamW(model.parameters(), nvme_path=tmp_path, **TINY)
    reference = torch.optim.AdamW(other.parameters(), fused=True)
    for step in range(12):
        for side, optimizer in ((model, ours), (other, reference)):
            side[0].requires_grad_(step not in (3, 4, 5))
            side[3].requires_grad_(step >= 8)
            optimizer.zero_grad()
            loss_of(side, step).backward()
            optimizer.step()
        assert_same(list(model.parameters()), list(other.parameters()), f"after step {step}")


def test_groups_can_be_added(tmp_path):
    mine, ours, theirs, reference = pair(tmp_path, own=dict(buffer_count=2, buffer_bytes=500_000))
    train(mine, ours, theirs, reference, steps=3)
    more = parameters(seed=3)
    also = copies(more)
    ours.add_param_group(dict(params=more, lr=0.5))
    reference.add_param_group(dict(params=also, lr=0.5))
    train(mine + more, ours, theirs + also, reference, steps=5)
    assert_same_states(ours.state_dict(), reference.state_dict())
    with pytest.raises(ValueError, match="more than one parameter group"):
        ours.add_param_group(dict(params=more[:1]))
    train(mine + more, ours, theirs + also, reference, steps=2)


def test_a_group_that_does_not_fit_the_buffers_is_refused_and_not_there(tmp_path):
    params = [torch.nn.Parameter(torch.ones(20, 30))]
    mine, ours, theirs, reference = both(tmp_path, torch.optim.Adafactor, params)
    with pytest.raises(ValueError, match="raise buffer_bytes"):
        ours.add_param_group({"params": [torch.nn.Parameter(torch.ones(300, 400))]})
    assert len(ours.param_groups) == 1
    ours.add_param_group({"params": [torch.nn.Parameter(torch.ones(10, 10))]})
    train(mine, ours, theirs, reference, steps=3)


def test_a_large_parameter_may_come_after_small_ones(tmp_path):
    ours = tensorferry.optim.AdamW([torch.nn.Parameter(torch.ones(3))], nvme_path=tmp_path, **TINY)
    mine = [torch.nn.Parameter(torch.ones(300_000, dtype=torch.float64))]
    theirs = copies(mine)
    ours.add_param_group({"params": mine, "amsgrad": True})
    train(mine, ours, theirs, torch.optim.AdamW(theirs, amsgrad=True, fused=True), steps=3)


def test_amsgrad_may_be_set_before_the_first_step(tmp_path):
    mine = [torch.nn.Parameter(torch.ones(300_000))]
    theirs = copies(mine)
    ours = tensorferry.optim.AdamW(mine, nvme_path=tmp_path, buffer_count=1, buffer_bytes=MiB)
    reference = torch.optim.AdamW(theirs, fused=True)
    for optimizer in (ours, reference):
        optimizer.param_groups[0]["amsgrad"] = True
    train(mine, ours, theirs, reference, steps=3)


def test_an_optimizer_that_nobody_has_any_more_leaves_no_files_at_once(tmp_path):
    """Without the garbage collector, which may come late or never."""
    gc.disable()
    try:
        params = parameters()
        ours = tensorferry.optim.AdamW(params, nvme_path=tmp_path, offload_gradients=True, **TINY)
        schedule = torch.optim.lr_scheduler.StepLR(ours, 1)
        give_gradients(0, params)
        ours.step()
        ours.load_state_dict(ours.state_dict())
        assert list(tmp_path.rglob("tensors"))
        del ours, schedule
        assert not list(tmp_path.rglob("tensors"))
    finally:
        gc.enable()


def test_schedulers_clipping_and_zero_grad_work(tmp_path):
    model = small_model()
    other = twin(model)
    ours = tensorferry.optim.AdamW(model.parameters(), lr=0.05, nvme_path=tmp_path, **TINY)
    reference = torch.optim.AdamW(other.parameters(), lr=0.05, fused=True)
    sides = []
    for side, optimizer in ((model, ours), (other, reference)):
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, decay], [4])
        sides.append((side, optimizer, schedule))
    norms = [[], []]
    for step in range(25):
        for number, (side, optimizer, schedule) in enumerate(sides):
            loss_of(side, step).backward()
            clip = getattr(optimizer, "clip_grad_norm_", None)
            norm = (
                clip(0.01)
                if clip and step % 2
                else torch.nn.utils.clip_grad_norm_(side.parameters(), 0.01)
            )
            norms[number].append(norm.item())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=step % 3 == 0)
        assert ours.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
        assert_same(list(model.parameters()), list(other.parameters()), f"after step {step}")
    assert norms[0] == norms[1]


@pytest.mark.parametrize("unscaled", [False, True])
def test_grad_scaler_works(tmp_path, unscaled):
    model = small_model()
    other = twin(model)
    ours = tensorferry.optim.AdamW(model.parameters(), lr=0.05, nvme_path=tmp_path, **TINY)
    reference = torch.optim.AdamW(other.parameters(), lr=0.05, fused=True)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_interval=3) for _ in "ab"]
    for step in range(12):
        for side, optimizer, scaler in zip((model, other), (ours, reference), scalers):
            optimizer.zero_grad()
            scaler.scale(loss_of(side, step)).backward()
            if step in (4, 5):  # overflow: the step is skipped
                side[3].weight.grad[3, 3] = float("inf")
            if unscaled:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(side.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert_same(list(model.parameters()), list(other.parameters()), f"after step {step}")


def test_a_closure_is_called_once_with_gradients(tmp_path):
    model = small_model()
    other = twin(model)
    ours = tensorferry.optim.Adam(model.parameters(), nvme_path=tmp_path, **TINY)
    reference = torch.optim.Adam(other.parameters(), fused=True)
    for step in range(5):
        losses = []
        for side, optimizer in ((model, ours), (other, reference)):

            def closure():
                optimizer.zero_grad()
                loss = loss_of(side, step)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        assert losses[0] == losses[1]
        assert_same(list(model.parameters()), list(other.parameters()))


def test_step_hooks_are_called_once_a_step(tmp_path):
    params = parameters()
    ours = tensorferry.optim.AdamW(params, nvme_path=tmp_path, **TINY)
    calls = []
    ours.register_step_pre_hook(lambda *_: calls.append("pre"))
    ours.register_step_post_hook(lambda *_: calls.append("post"))
    give_gradients(0, params)
    ours.step()
    assert calls == ["pre", "post"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [dict(), dict(amsgrad=True, weight_decay=0.2)], ids=str)
def test_half_precision_has_masters_in_fp32(tmp_path, dtype, options):
    mine = parameters(dtype)
    theirs = copies(mine)
    own = TINY if dtype == torch.float16 else dict(buffer_count=2, buffer_bytes=400_000)
    ours = tensorferry.optim.AdamW(mine, lr=1e-4, **options, nvme_path=tmp_path, **own)
    reference = MasterAdamW(theirs, lr=1e-4, **options)
    for step in range(50 if dtype == torch.bfloat16 else 10):
        give_gradients(step, mine, theirs, skip=[step % 5])
        ours.step()
        reference.step()
        assert_same(mine, theirs, f"after step {step}")
    states = ours.state_dict()["state"]
    for number, master in enumerate(reference.masters):
        assert master.numel() == 0 or torch.equal(states[number]["master"], master)
    assert_same_states(ours.state_dict(), reference.inner.state_dict())


def test_half_precision_without_masters_is_as_in_torch(tmp_path):
    own = TINY | dict(master_weights=False)
    mine, ours, theirs, reference = pair(tmp_path, params=parameters(torch.bfloat16), own=own)
    train(mine, ours, theirs, reference, steps=20)
    assert "master" not in ours.state_dict()["state"][3]
    assert_same_states(ours.state_dict(), reference.state_dict())


def test_precisions_can_be_mixed(tmp_path):
    mine = parameters() + parameters(torch.bfloat16, seed=5)
    theirs = copies(mine)
    ours = tensorferry.optim.AdamW(mine, nvme_path=tmp_path, buffer_count=2, buffer_bytes=200_000)
    reference = MasterAdamW(theirs)
    for step in range(5):
        give_gradients(step, mine, theirs)
        ours.step()
        reference.step()
        assert_same(mine, theirs)


OTHERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "SGD nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, nesterov=True),
    "SGD dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, dampening=0.3),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p),
    "RMSprop all": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True, weight_decay=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr_decay=0.1, initial_accumulator_value=0.3),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, fused=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p, weight_decay=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, decoupled_weight_decay=True, weight_decay=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "ASGD": lambda p: torch.optim.ASGD(p, t0=5),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "Adam foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p),
}


def parameters_for(name):
    """Adafactor of torch divides by the size of a parameter."""
    return [param for param in parameters() if param.numel() > 0 or name != "Adafactor"]


def step_both(name, step, mine, ours, theirs, reference):
    """A step with the same gradients. Fused kernels of torch want all of them, in the order of the
    parameters' memory; sums over gradients come out the same in the same order only."""
    if "fused" in name:
        give_gradients(step, [], mine, theirs)
    else:
        for params in (mine, theirs):
            give_gradients(step, params, skip=[step % 4, 8 if step < 4 else 100])
    ours.step()
    reference.step()


@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_are_those_of_torch(tmp_path, name):
    make = OTHERS[name]
    mine, ours, theirs, reference = both(tmp_path, make, parameters_for(name))
    for step in range(12):
        step_both(name, step, mine, ours, theirs, reference)
        assert_same(mine, theirs, f"after step {step}")
    assert_same_states(ours.state_dict(), reference.state_dict())
    ours.close()


@pytest.mark.parametrize("name", OTHERS)
def test_an_optimizer_may_move_in_the_middle_of_its_life(tmp_path, name):
    mine = parameters_for(name)
    theirs = copies(mine)
    first, reference = OTHERS[name](mine), OTHERS[name](theirs)
    for step in range(4):
        step_both(name, step, mine, first, theirs, reference)
    ours = tensorferry.optim.offload(first, tmp_path, **TINY)
    for step in range(4, 9):
        step_both(name, step, mine, ours, theirs, reference)
        assert_same(mine, theirs, f"after step {step}")
    assert_same_states(ours.state_dict(), reference.state_dict())


class OwnStates(torch.optim.AdamW):
    """Made of torch's AdamW, with states of its own and a count in its groups."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if not state:
                        state["mean"] = torch.zeros_like(param)
                    state["mean"].lerp_(param.grad, 0.1)
                    param.sub_(state["mean"], alpha=group["lr"] / (1 - 0.9 ** group["count"]))


class SummedInGroups(torch.optim.SGD):
    """Needs the gradients of all parameters for a number of their group."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                group["sum"] = group.get("sum", 0.0) + param.grad.abs().sum().item()


def test_optimizers_of_users_may_have_states_and_counts_of_their_own(tmp_path):
    mine, ours, theirs, reference = both(tmp_path, lambda params: OwnStates(params, lr=0.1))
    train(mine, ours, theirs, reference, steps=5)
    assert ours.param_groups[0]["count"] == 5
    sums = [torch.nn.Parameter(torch.ones(n)) for n in (3, 4)]
    give_gradients(0, sums)
    with pytest.raises(RuntimeError, match="'sum' of a group from all of its parameters"):
        tensorferry.optim.offload(SummedInGroups(sums), tmp_path, **TINY).step()


def test_what_cannot_be_stepped_in_pieces_is_refused(tmp_path):
    params = parameters()
    with pytest.raises(ValueError, match="LBFGS.*all parameters"):
        tensorferry.optim.offload(torch.optim.LBFGS(params), tmp_path)
    with pytest.raises(ValueError, match="SparseAdam.*dense"):
        tensorferry.optim.offload(torch.optim.SparseAdam(params), tmp_path)
    with pytest.raises(ValueError, match="differentiable"):
        tensorferry.optim.offload(torch.optim.SGD(params, differentiable=True), tmp_path)
    with pytest.raises(ValueError, match="not dense"):
        wide = torch.nn.Parameter(torch.zeros(10, 10)[:, ::2])
        tensorferry.optim.AdamW([wide], nvme_path=tmp_path)
    with pytest.raises(ValueError, match="meta"):
        meta = torch.nn.Parameter(torch.zeros(5, device="meta"))
        tensorferry.optim.offload(torch.optim.SGD([meta]), tmp_path)
    with pytest.raises(TypeError, match="torch optimizer"):
        tensorferry.optim.offload(params, tmp_path)
    with pytest.raises(ValueError, match="already"):
        ours = tensorferry.optim.AdamW(params, nvme_path=tmp_path, **TINY)
        tensorferry.optim.offload(ours, tmp_path)
    with pytest.raises(FileNotFoundError):
        tensorferry.optim.AdamW(params, nvme_path=tmp_path / "missing")
    with pytest.raises(TypeError):
        tensorferry.optim.AdamW(params, nvme_path=tmp_path, buffer_cuont=3)
    for wrong in (dict(buffer_count=0), dict(buffer_bytes=0), dict(lr=-1)):
        with pytest.raises(ValueError):
            tensorferry.optim.AdamW(params, nvme_path=tmp_path, **wrong)


def test_a_failed_offload_leaves_the_optimizer_as_it_was(tmp_path):
    mine, theirs = parameters(), parameters()
    first, reference = torch.optim.AdamW(mine), torch.optim.AdamW(theirs)
    give_gradients(0, mine, theirs)
    first.step()
    reference.step()
    with pytest.raises(FileNotFoundError):
        tensorferry.optim.offload(first, tmp_path / "missing")
    with pytest.raises(InvalidArgument):
        tensorferry.optim.offload(first, tmp_path, engine="none")
    give_gradients(1, mine, theirs)
    first.step()
    reference.step()
    assert_same(mine, theirs)


def test_a_sparse_gradient_is_refused_before_anything_changes(tmp_path):
    table = torch.nn.Embedding(10, 3, sparse=True)
    before = table.weight.detach().clone()
    ours = tensorferry.optim.AdamW(table.parameters(), nvme_path=tmp_path, **TINY)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="dense"):
        ours.step()
    assert torch.equal(table.weight, before)


def test_a_closed_optimizer_says_so_and_leaves_no_files(tmp_path):
    params = parameters()
    ours = tensorferry.optim.AdamW(params, nvme_path=tmp_path, pipeline_write=True, **TINY)
    give_gradients(0, params)
    ours.step()
    assert ours.stats()["written_bytes"] > 0 and "AdamW of 11" in repr(ours)
    ours.close()
    ours.close()
    for call in (ours.step, ours.state_dict):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    assert os.listdir(next(tmp_path.iterdir())) == []
    with pytest.raises(TypeError, match="state_dict"):
        import pickle

        pickle.dumps(ours)


def test_several_drives_give_the_same_numbers(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    mine, theirs = parameters(), parameters()
    ours = tensorferry.optim.AdamW(mine, nvme_path=[tmp_path / "a", tmp_path / "b"], **TINY)
    reference = torch.optim.AdamW(theirs, fused=True)
    train(mine, ours, theirs, reference, steps=5)


def test_training_a_model_gives_the_same_losses(tmp_path):
    model = small_model(dtype=torch.float64)
    other = twin(model)
    ours = tensorferry.optim.AdamW(model.named_parameters(), nvme_path=tmp_path, **TINY)
    reference = torch.optim.AdamW(other.named_parameters(), fused=True)
    losses = [[], []]
    for step in range(10):
        for number, (side, optimizer) in enumerate(((model, ours), (other, reference))):
            loss = side(batch(step, torch.float64)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[number].append(loss.item())
    assert losses[0] == losses[1]
    names = ours.state_dict()["param_groups"][0]["param_names"]
    assert names == reference.state_dict()["param_groups"][0]["param_names"]


def test_a_scheduler_of_the_torch_optimizer_still_counts():
    param = torch.nn.Parameter(torch.ones(8))
    sgd = torch.optim.SGD([param], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: 0.5**step)
    with pytest.warns(UserWarning, match="lr_scheduler.step"):
        optimizer = tensorferry.optim.offload(sgd, nvme_path=".")
        scheduler.step()
    param.grad = torch.ones(8)
    optimizer.step()
    assert torch.equal(param, torch.full((8,), 0.5))
    with pytest.raises(RuntimeError, match="what offload"):
        sgd.step()
