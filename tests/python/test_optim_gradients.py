"""Gradients on the drive: the same numbers as in memory, and no memory for them."""

import pytest
import tensorferry.optim
import torch
from master_adamw import MasterAdamW
from training import (
    TINY,
    assert_same,
    compute_gradients,
    copies,
    give_gradients,
    loss_of,
    on_drive,
    parameters,
    small_model,
    twin,
)


def sides(tmp_path, dtype=torch.float32, **own):
    """(model, our optimizer), (its twin, the reference)."""
    model = small_model(dtype=dtype)
    other = twin(model)
    ours = tensorferry.optim.AdamW(
        model.parameters(), lr=0.02, nvme_path=tmp_path, offload_gradients=True, **(TINY | own)
    )
    params = list(other.parameters())
    if dtype == torch.float32:
        return (model, ours), (other, torch.optim.AdamW(params, lr=0.02, fused=True))
    return (model, ours), (other, MasterAdamW(params, lr=0.02))


def zero(side, optimizer):
    (optimizer if isinstance(optimizer, tensorferry.optim.Offloaded) else side).zero_grad()


def clip(side, optimizer, *settings):
    if isinstance(optimizer, tensorferry.optim.Offloaded):
        return optimizer.clip_grad_norm_(*settings)
    return torch.nn.utils.clip_grad_norm_(side.parameters(), *settings)


def check(one, other, when=""):
    assert_same(list(one[0].parameters()), list(other[0].parameters()), when)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pipeline_write", [False, True])
def test_micro_batches_accumulate_on_the_drive(tmp_path, dtype, pipeline_write):
    ours, theirs = sides(tmp_path, dtype, pipeline_write=pipeline_write)
    for step in range(4):
        for side, optimizer in (ours, theirs):
            for micro in range(3):
                loss_of(side, 10 * step + micro).backward()
            if side is ours[0]:
                assert all(map(on_drive, side.parameters()))
            optimizer.step()
            zero(side, optimizer)
        check(ours, theirs, f"after step {step}")
    ours[1].close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm_type", [2.0, float("inf"), 1.0])
def test_clipping_is_that_of_torch(tmp_path, dtype, norm_type):
    ours, theirs = sides(tmp_path, dtype)
    for step in range(6):
        norms = []
        for side, optimizer in (ours, theirs):
            loss_of(side, step).backward()
            norms.append(clip(side, optimizer, 0.02 if step != 3 else 1e6, norm_type))
            if step == 4:  # again, and with more to come
                norms.append(clip(side, optimizer, 0.01, norm_type))
                loss_of(side, 100).backward()
            optimizer.step()
            zero(side, optimizer)
        assert torch.equal(norms[0], norms[len(norms) // 2]) and norms[0] > 0
        assert torch.equal(norms[-1], norms[len(norms) // 2 - 1])
        check(ours, theirs, f"after step {step}")


@pytest.mark.parametrize("norm_type", [2.0, 1.0])
def test_many_parameters_of_any_shape_have_the_norm_of_torch(tmp_path, norm_type):
    mine = [param for param in parameters() if param.numel() > 0]
    mine += parameters(seed=1, shapes={"cut": (90_001,)})
    theirs = copies(mine)
    ours = tensorferry.optim.AdamW(mine, nvme_path=tmp_path, offload_gradients=True, **TINY)
    reference = torch.optim.AdamW(theirs, fused=True)
    for step in range(4):
        for micro in range(1 + step % 2):  # one is larger than the buffers
            compute_gradients(10 * step + micro, mine, theirs)
        assert all(map(on_drive, mine))
        norm = ours.clip_grad_norm_(0.5, norm_type)
        assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(theirs, 0.5, norm_type))
        ours.step()
        reference.step()
        assert_same(mine, theirs, f"after step {step}")
        ours.zero_grad()
        reference.zero_grad()


def test_mixed_precisions_are_clipped_as_in_torch(tmp_path):
    def mixed(side):
        side[0].bfloat16()
        return side

    model = small_model()
    mine = list(mixed(model).parameters())
    theirs = copies(mine)
    ours = tensorferry.optim.AdamW(mine, nvme_path=tmp_path, offload_gradients=True, **TINY)
    reference = MasterAdamW(theirs)
    give_gradients(0, mine, theirs)
    norm = torch.nn.utils.clip_grad_norm_(theirs, 1.7)
    torch.testing.assert_close(ours.clip_grad_norm_(1.7), norm, rtol=1e-6, atol=0)
    ours.step()
    reference.step()
    for one, other in zip(mine, theirs):
        torch.testing.assert_close(
            one, other, rtol=1e-5 if one.dtype == torch.float32 else 0.01, atol=1e-7
        )


def test_a_gradient_stays_until_it_is_zeroed(tmp_path):
    ours, theirs = sides(tmp_path)
    for step in range(4):
        for side, optimizer in (ours, theirs):
            loss_of(side, step).backward()
            optimizer.step()
            optimizer.step()
            if step % 2:
                zero(side, optimizer)
        check(ours, theirs, f"after step {step}")
    before = [param.detach().clone() for param in ours[0].parameters()]
    ours[1].zero_grad()
    ours[1].step()
    assert_same(list(ours[0].parameters()), before, "by a step without gradients")


def test_gradients_that_are_zeroed_but_kept_are_stepped(tmp_path):
    """zero_grad(set_to_none=False): the moments go on moving the parameters."""
    ours, theirs = sides(tmp_path)
    for step in range(6):
        for side, optimizer in (ours, theirs):
            if step != 1:
                side[0].requires_grad_(step % 3 == 0)
                loss_of(side, step).backward()
            norm = clip(side, optimizer, 0.5)
            if step == 1:
                assert norm == 0
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        check(ours, theirs, f"after step {step}")


def test_zero_grad_of_the_model_is_enough(tmp_path):
    """As Hugging Face's Trainer does it."""
    ours, theirs = sides(tmp_path)
    for step in range(4):
        for side, optimizer in (ours, theirs):
            loss_of(side, step).backward()
            loss_of(side, step + 100).backward()
            optimizer.step()
            side.zero_grad()
            assert all(param.grad is None for param in side.parameters())
        check(ours, theirs, f"after step {step}")


@pytest.mark.parametrize("part", ["_fetch", "_put"])
def test_a_gradient_that_was_not_added_to_the_end_is_not_stepped(tmp_path, monkeypatch, part):
    (model, ours), _ = sides(tmp_path)
    loss_of(model, 0).backward()

    def stopped(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ours._gradients, part, stopped)
        with pytest.raises(KeyboardInterrupt):
            loss_of(model, 1).backward()
    with pytest.raises(RuntimeError, match="KeyboardInterrupt.*zero_grad"):
        ours.step()
    ours.zero_grad()
    loss_of(model, 1).backward()
    ours.step()


def test_parameters_may_be_frozen_at_first_and_some_get_no_gradient(tmp_path):
    model = small_model()
    model[0].requires_grad_(False)
    other = twin(model)
    ours = tensorferry.optim.AdamW(
        model.parameters(), nvme_path=tmp_path, offload_gradients=True, **TINY
    )
    reference = torch.optim.AdamW(other.parameters(), fused=True)
    for step in range(6):
        for side, optimizer in ((model, ours), (other, reference)):
            side[0].requires_grad_(step >= 2)
            side[3].requires_grad_(step != 4)
            loss_of(side, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same(list(model.parameters()), list(other.parameters()), f"after step {step}")


def test_shared_weights_and_groups_added_later(tmp_path):
    model = small_model()
    table = torch.nn.Linear(33, 33, bias=False)
    other, also = twin(model), twin(table)
    ours = tensorferry.optim.AdamW(
        model.parameters(), nvme_path=tmp_path, offload_gradients=True, **TINY
    )
    reference = torch.optim.AdamW(other.parameters(), fused=True)
    ours.add_param_group(dict(params=table.parameters(), lr=0.1))
    reference.add_param_group(dict(params=also.parameters(), lr=0.1))
    for step in range(4):
        for side, shared, optimizer in ((model, table, ours), (other, also, reference)):
            hidden = shared(shared(torch.ones(3, 33) * step))
            side(hidden).pow(2).sum().backward()
            if side is model:
                assert on_drive(table.weight)
            optimizer.step()
            optimizer.zero_grad()
        assert_same(list(model.parameters()), list(other.parameters()), f"after step {step}")
        assert_same([table.weight], [also.weight], f"after step {step}")


def test_other_optimizers_take_gradients_from_the_drive_too(tmp_path):
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        lambda p: torch.optim.Adafactor(p),
        lambda p: torch.optim.SGD(p, lr=0.05),
    ):
        model = small_model()
        other = twin(model)
        ours = tensorferry.optim.offload(
            make(model.parameters()), tmp_path, offload_gradients=True, **TINY
        )
        reference = make(other.parameters())
        for step in range(4):
            for side, optimizer in ((model, ours), (other, reference)):
                loss_of(side, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert_same(list(model.parameters()), list(other.parameters()), f"after step {step}")
        ours.close()


def test_a_parameter_without_elements_may_have_a_gradient(tmp_path):
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in ((0, 3), (5,))]
    ours = tensorferry.optim.AdamW(params, nvme_path=tmp_path, offload_gradients=True, **TINY)
    sum(param.sum() for param in params).backward()
    torch.testing.assert_close(ours.clip_grad_norm_(1e9), torch.tensor(5.0).sqrt())
    ours.step()
    assert (params[1] < 1).all()


def test_a_closed_optimizer_takes_no_more_gradients(tmp_path):
    (model, ours), _ = sides(tmp_path)
    loss_of(model, 0).backward()
    ours.close()
    loss_of(model, 1).backward()
    assert all(param.grad is not None for param in model.parameters())
    ours.zero_grad()
    assert all(param.grad is None for param in model.parameters())


def test_bytes_of_gradients_are_on_the_drive_and_go_with_zero_grad(tmp_path):
    (model, ours), _ = sides(tmp_path)
    loss_of(model, 0).backward()
    held = ours.stats()
    assert held["tensor_bytes"] >= sum(param.nbytes for param in model.parameters())
    ours.zero_grad()
    assert ours.stats()["tensor_bytes"] == 0
