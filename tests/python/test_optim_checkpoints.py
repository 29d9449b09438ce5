"""Saving and loading optimizers with states on NVMe."""

import os

import pytest
import tensorferry.optim
import torch
from drives import loop_mount
from programs import FOLDERS, check_python
from training import (
    TINY,
    MiB,
    assert_same,
    assert_same_states,
    both,
    copies,
    give_gradients,
    parameters,
)
from warm_python import WARM_PYTHON


def steps(params, optimizer, first, last):
    for step in range(first, last):
        give_gradients(step, [], params)
        optimizer.step()


def adamw(params, tmp_path, **options):
    return tensorferry.optim.AdamW(params, nvme_path=tmp_path, **(TINY | options))


@pytest.mark.parametrize("fused", [True, None])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_torch_continues_what_we_began(tmp_path, fused, amsgrad):
    mine = parameters()
    theirs = copies(mine)
    ours = adamw(mine, tmp_path, amsgrad=amsgrad)
    reference = torch.optim.AdamW(theirs, fused=fused, amsgrad=amsgrad)
    steps(mine, ours, 0, 3)
    with torch.no_grad():
        for param, other in zip(theirs, mine):
            param.copy_(other)
    reference.load_state_dict(ours.state_dict())
    steps(theirs, reference, 3, 6)
    steps(mine, ours, 3, 6)
    assert_same(mine, theirs)


@pytest.mark.parametrize("fused", [True, None])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_we_continue_what_torch_began(tmp_path, fused, amsgrad):
    theirs = parameters()
    reference = torch.optim.AdamW(theirs, lr=0.03, fused=fused, amsgrad=amsgrad)
    steps(theirs, reference, 0, 3)
    mine = copies(theirs)
    ours = adamw(mine, tmp_path, amsgrad=amsgrad)
    ours.load_state_dict(reference.state_dict())
    steps(theirs, reference, 3, 6)
    steps(mine, ours, 3, 6)
    assert_same(mine, theirs)
    assert_same_states(ours.state_dict(), reference.state_dict())


@pytest.mark.parametrize("target", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_states_of_another_precision_become_that_of_the_parameter(tmp_path, target):
    """As in torch."""
    first = parameters(torch.bfloat16)
    source = torch.optim.AdamW(first, fused=True)
    steps(first, source, 0, 2)
    mine = parameters(target, seed=4)
    theirs = copies(mine)
    ours = adamw(mine, tmp_path, master_weights=False)
    reference = torch.optim.AdamW(theirs, fused=True)
    for optimizer in (ours, reference):
        optimizer.load_state_dict(source.state_dict())
    steps(mine, ours, 2, 4)
    steps(theirs, reference, 2, 4)
    assert_same(mine, theirs)


def test_masters_are_loaded_or_made_from_the_parameters(tmp_path):
    mine = parameters(torch.bfloat16)
    ours = adamw(mine, tmp_path)
    steps(mine, ours, 0, 3)
    saved = ours.state_dict()
    again = copies(mine)
    other = adamw(again, tmp_path)
    other.load_state_dict(saved)
    plain = copies(mine)
    without = adamw(plain, tmp_path, master_weights=False)
    without.load_state_dict(saved)
    assert "master" not in without.state_dict()["state"][0]
    steps(mine, ours, 3, 6)
    steps(again, other, 3, 6)
    steps(plain, without, 3, 6)
    assert_same(mine, again)
    torch_state = torch.optim.AdamW(copies(mine), fused=True)
    torch_state.load_state_dict(saved)
    other.load_state_dict(torch_state.state_dict())
    made = other.state_dict()["state"][3]["master"]
    assert made.dtype == torch.float32


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.3),
        lambda p: torch.optim.Adagrad(p),
        lambda p: torch.optim.Adafactor(p),
        lambda p: torch.optim.NAdam(p),
        lambda p: torch.optim.ASGD(p),
        lambda p: torch.optim.Rprop(p),
    ],
    ids=["SGD", "RMSprop", "Adagrad", "Adafactor", "NAdam", "ASGD", "Rprop"],
)
def test_other_optimizers_go_both_ways(tmp_path, make):
    start = [param for param in parameters() if param.numel() > 0]
    mine, ours, theirs, reference = both(tmp_path, make, start)
    steps(mine, ours, 0, 3)
    steps(theirs, reference, 0, 3)
    mine_again, theirs_again = copies(mine), copies(theirs)
    ours_again = tensorferry.optim.offload(make(mine_again), tmp_path, **TINY)
    ours_again.load_state_dict(reference.state_dict())
    reference_again = make(theirs_again)
    reference_again.load_state_dict(ours.state_dict())
    steps(theirs, reference, 3, 7)
    for params, optimizer in ((mine_again, ours_again), (theirs_again, reference_again)):
        steps(params, optimizer, 3, 7)
        assert_same(params, theirs)


def test_a_state_dict_stays_as_it_was(tmp_path):
    mine = parameters()
    ours = adamw(mine, tmp_path)
    steps(mine, ours, 0, 2)
    taken = ours.state_dict()
    copied = {
        number: {name: value.clone() for name, value in state.items()}
        for number, state in taken["state"].items()
    }
    steps(mine, ours, 2, 8)
    ours.load_state_dict(ours.state_dict())
    for number, state in copied.items():
        for name, value in state.items():
            assert torch.equal(taken["state"][number][name], value)
    ours.close()
    assert torch.equal(taken["state"][6]["exp_avg"], copied[6]["exp_avg"])


def test_loading_ones_own_state_changes_nothing(tmp_path):
    mine, theirs = parameters(), parameters()
    ours, reference = adamw(mine, tmp_path), torch.optim.AdamW(theirs, fused=True)
    for first in range(0, 6, 2):
        steps(mine, ours, first, first + 2)
        steps(theirs, reference, first, first + 2)
        ours.load_state_dict(ours.state_dict())
        assert_same(mine, theirs)


def test_loading_forgets_states_that_the_file_has_not(tmp_path):
    mine, theirs = parameters(), parameters()
    ours, reference = adamw(mine, tmp_path), torch.optim.AdamW(theirs, fused=True)
    empty = ours.state_dict()
    assert empty["state"] == {}
    steps(mine, ours, 0, 3)
    with torch.no_grad():
        for one, other in zip(mine, theirs):
            one.copy_(other)
    ours.load_state_dict(empty)
    steps(mine, ours, 0, 3)
    steps(theirs, reference, 0, 3)
    assert_same(mine, theirs)


def test_a_tensor_lr_is_not_shared_with_what_was_loaded(tmp_path):
    optimizers = [adamw(parameters(), tmp_path, lr=torch.tensor(0.1)) for _ in "ab"]
    source = torch.optim.AdamW(parameters(), lr=torch.tensor(0.3), fused=True)
    saved = source.state_dict()
    for optimizer in optimizers:
        optimizer.load_state_dict(saved)
        optimizer.param_groups[0]["lr"].mul_(0.5)
    assert saved["param_groups"][0]["lr"].item() == pytest.approx(0.3)
    assert all(o.param_groups[0]["lr"].item() == pytest.approx(0.15) for o in optimizers)


@pytest.mark.parametrize("buffer_bytes", [1, MiB])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_checkpoint_with_amsgrad_fits_buffers_for_less(tmp_path, buffer_bytes, dtype):
    mine = [torch.nn.Parameter(torch.randn(size, dtype=dtype)) for size in (300_000, 100)]
    theirs = copies(mine)
    reference = torch.optim.AdamW(theirs, amsgrad=True, fused=True)
    ours = tensorferry.optim.AdamW(
        mine, nvme_path=tmp_path, buffer_count=1, buffer_bytes=buffer_bytes
    )
    give_gradients(0, theirs)
    reference.step()
    with torch.no_grad():
        for one, other in zip(mine, theirs):
            one.copy_(other)
    ours.load_state_dict(reference.state_dict())
    for step in range(1, 4):
        give_gradients(step, mine, theirs)
        ours.step()
        reference.step()
        assert_same(mine, theirs, f"after step {step}")
    assert_same_states(ours.state_dict(), reference.state_dict())


def test_what_does_not_fit_is_refused_and_nothing_has_changed(tmp_path):
    mine, theirs = parameters(), parameters()
    ours, reference = adamw(mine, tmp_path), torch.optim.AdamW(theirs, fused=True)
    steps(mine, ours, 0, 2)
    steps(theirs, reference, 0, 2)
    wrong_shape = reference.state_dict()
    last = max(wrong_shape["state"])
    wrong_shape["state"][last] = wrong_shape["state"][last] | {"exp_avg": torch.zeros(3, 3)}
    wrong_shape["param_groups"] = [wrong_shape["param_groups"][0] | {"lr": 55.0}]
    few = torch.optim.AdamW(parameters()[:3]).state_dict()
    groups = torch.optim.AdamW([dict(params=[p]) for p in parameters()]).state_dict()
    for wrong, match in ((wrong_shape, "exp_avg.*shape"), (few, "size"), (groups, "number")):
        with pytest.raises(ValueError, match=match):
            ours.load_state_dict(wrong)
    steps(mine, ours, 2, 4)
    steps(theirs, reference, 2, 4)
    assert_same(mine, theirs)


def test_a_load_that_fails_half_way_is_said_and_can_be_repeated(tmp_path):
    """The drive is full: the states are neither the old ones nor the new."""
    with loop_mount(tmp_path, size="48M") as point:
        mine = [torch.nn.Parameter(torch.ones(MiB // 4)) for _ in range(8)]
        theirs = copies(mine)
        ours = tensorferry.optim.AdamW(mine, nvme_path=point, buffer_count=2, buffer_bytes=4 * MiB)
        reference = torch.optim.AdamW(theirs, fused=True)
        steps(mine, ours, 0, 2)
        steps(theirs, reference, 0, 2)
        saved = reference.state_dict()
        held = ours.state_dict()  # keeps its places: there is not room for both
        with open(point / "ballast", "wb") as ballast:
            free = os.statvfs(point)
            os.posix_fallocate(ballast.fileno(), 0, (free.f_bavail - 64) * free.f_bsize)
        with pytest.raises(OSError, match="needed"):
            for _ in range(3):
                ours.load_state_dict(saved)
                held = [held, ours.state_dict()]
        with pytest.raises(RuntimeError, match="checkpoint"):
            ours.step()
        del held
        ours.load_state_dict(saved)
        steps(mine, ours, 2, 4)
        steps(theirs, reference, 2, 4)
        assert_same(mine, theirs)
        ours.close()


RESUMED = """
import os, sys, torch
sys.path[:0] = sys.argv[1].split(os.pathsep)
import tensorferry.optim
from training import TINY, loss_of, small_model
drive, file, begin, end, load = sys.argv[2:]
for dtype in (torch.float32, torch.bfloat16):
    model = small_model(dtype=dtype)
    options = dict(lr=0.02, nvme_path=drive, amsgrad=True, pipeline_write=True)
    optimizer = tensorferry.optim.AdamW(model.parameters(), **options, **TINY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    parts = dict(model=model, optimizer=optimizer, schedule=schedule)
    if load == "load":
        saved = torch.load(f"{file}.{dtype}", mmap=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    for step in range(int(begin), int(end)):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        schedule.step()
        print(dtype, step, loss.item().hex())
    torch.save({name: part.state_dict() for name, part in parts.items()}, f"{file}.{dtype}")
"""


def test_a_run_goes_on_in_another_process(tmp_path):
    def run(*words):
        return check_python(RESUMED, FOLDERS, tmp_path, *words, python=WARM_PYTHON)

    one, two = tmp_path / "one.pt", tmp_path / "two.pt"
    straight = run(one, 0, 9, "new")
    parts = run(two, 0, 4, "new")
    parts += run(two, 4, 9, "load")
    assert sorted(parts.splitlines()) == sorted(straight.splitlines())
    assert len(straight.splitlines()) == 18
    for dtype in (torch.float32, torch.bfloat16):
        saved, again = torch.load(f"{one}.{dtype}"), torch.load(f"{two}.{dtype}")
        assert_same(list(again["model"].values()), list(saved["model"].values()))
        assert_same_states(again["optimizer"], saved["optimizer"])
        assert saved["schedule"] == again["schedule"]


def test_saving_and_loading_take_no_memory_for_the_states(tmp_path):
    """320 MB of states. RssAnon: pages mapped from files are not counted, they can leave."""
    out = check_python(
        """
        import sys, threading, torch, tensorferry.optim
        def anonymous():
            with open("/proc/self/status") as file:
                return next(int(l.split()[1]) for l in file if l.startswith("RssAnon")) << 10
        most = 0
        done = threading.Event()
        def watch():
            global most
            while not done.wait(0.002):
                most = max(most, anonymous())
        params = [torch.nn.Parameter(torch.full((4_000_000,), 0.5)) for _ in range(10)]
        for param in params:
            param.grad = torch.full_like(param, 0.01)
        optimizer = tensorferry.optim.AdamW(params, nvme_path=sys.argv[1], buffer_count=2,
                                            buffer_bytes=16 << 20)
        optimizer.step()
        for param in params:
            param.grad = None
        before = anonymous()
        thread = threading.Thread(target=watch)
        thread.start()
        torch.save(optimizer.state_dict(), sys.argv[1] + "/saved.pt")
        optimizer.load_state_dict(torch.load(sys.argv[1] + "/saved.pt", mmap=True))
        done.set()
        thread.join()
        assert optimizer.stats()["tensor_bytes"] >= 320_000_000
        print(max(most, anonymous()) - before)
        """,
        tmp_path,
    )
    assert int(out) < 32 * MiB
