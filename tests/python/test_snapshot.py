"""Snapshots of runs on NVMe: the run that resumes has the same bits."""

import errno
import re
import time

import pytest
import tensorferry
import tensorferry.snapshot
import torch
import torch.distributed.checkpoint
from programs import run_python
from snapshotting import KINDS, assert_same_bits, make, nvme, path, seed_all
from training import small_model
from warm_python import WARM_PYTHON

__all__ = ["make", "nvme", "path"]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_from_a_snapshot_with_the_same_bits(kind, make, path):
    seed_all(1)
    first = make(kind)
    for _ in range(2):
        first.step()
    first.take(path)
    losses = [first.step() for _ in range(3)]
    expected = first.bits()
    first.close()
    seed_all(2)
    second = make(kind, seed=9)
    second.step()  # has states of its own
    assert second.resume(path).snapshot.number == 1
    assert [second.step() for _ in range(3)] == losses
    assert_same_bits(second.bits(), expected)


@pytest.mark.parametrize("kind", ["bf16", "all in memory"])
def test_a_run_with_an_edited_weight_goes_on_too(kind, make, path):
    """After the step that has noticed it, all of its master is stored; and so it stays."""
    seed_all(1)
    first = make(kind, dtype=torch.bfloat16)
    first.step()
    next(first.model.parameters()).data.mul_(1.5)
    first.step()
    first.take(path)
    losses = [first.step() for _ in range(2)]
    expected, stored = first.bits(), first.stored_bytes()
    first.close()
    seed_all(2)
    second = make(kind, dtype=torch.bfloat16, seed=9)
    second.step()
    assert second.resume(path).snapshot.number == 1
    assert [second.step() for _ in range(2)] == losses
    assert_same_bits(second.bits(), expected)
    assert second.stored_bytes() == stored


def begin_step(run):
    """Up to step(): some parameters are stepped, others not."""
    loss = run.model(torch.randn(4, 33)).pow(2).mean()
    with run.optimizer.last_backward():
        loss.backward()


def test_a_snapshot_in_the_middle_of_a_step_is_refused(make, path):
    run = make(overlap="backward")
    run.step()
    begin_step(run)
    with pytest.raises(RuntimeError, match=re.escape("call step() before a snapshot")):
        run.take(path)
    run.optimizer.step()
    assert run.take(path).number == 1


@pytest.mark.parametrize("overlap", ["backward", "iteration"])
def test_a_run_resumes_in_the_middle_of_a_step(overlap, make, path):
    seed_all(1)
    run = make(overlap=overlap)
    run.step()
    run.take(path)
    losses = [run.step(), run.step()]
    begin_step(run)
    run.resume(path)
    run.optimizer.zero_grad()
    assert [run.step(), run.step()] == losses
    if overlap == "iteration":  # step() has left a part of it
        begin_step(run)
        run.optimizer.step()
        run.resume(path)
        run.optimizer.zero_grad()
        assert [run.step(), run.step()] == losses


def test_the_snapshot_that_a_run_resumes_from_stays_as_it_is(make, path):
    seed_all(1)
    first = make("weights")
    first.step()
    first.take(path)
    expected = first.bits()
    first.close()
    for _ in range(2):
        run = make("weights")
        run.resume(path)
        for _ in range(3):
            run.step()
        run.close()
    last = make("weights")
    last.resume(path)
    assert_same_bits(last.bits(), expected)


def test_resuming_reads_no_more_than_the_first_step(make, path):
    first = make()
    first.step()
    first.take(path)
    first.close()
    second = make()
    second.resume(path)
    assert second.optimizer.stats()["read_bytes"] == 0
    second.step()
    after = second.optimizer.stats()["read_bytes"]
    second.step()
    assert second.optimizer.stats()["read_bytes"] <= 2 * after


def test_states_may_stay_in_memory_in_one_run_and_on_the_drive_in_the_next(make, path):
    seed_all(1)
    first = make("kept")
    first.step()
    first.take(path)
    losses = [first.step(), first.step()]
    first.close()
    for kind in ("fp32", "all in memory"):
        run = make(kind)
        run.resume(path)
        assert [run.step(), run.step()] == losses
        run.close()


def test_weights_may_be_in_memory_in_one_run_and_on_the_drive_in_the_next(make, path, tmp_path):
    seed_all(1)
    in_memory = make("fp32")
    in_memory.step()
    on_drive = make("weights", seed=4)
    tensorferry.snapshot.take(path, model=in_memory.model)
    tensorferry.snapshot.resume(path, model=on_drive.model)
    expected = in_memory.model.state_dict()
    assert_same_bits(dict(on_drive.model.state_dict()), expected)
    tensorferry.snapshot.take(path, model=on_drive.model)
    with torch.no_grad():
        for param in in_memory.model.parameters():
            param.zero_()
    tensorferry.snapshot.resume(path, model=in_memory.model)
    assert_same_bits(dict(on_drive.model.state_dict()), in_memory.model.state_dict())


def test_verify_finds_a_byte_that_has_changed(make, path, nvme):
    run = make()
    run.step()
    run.take(path)
    run.close()
    found = tensorferry.snapshot.verify(path)
    assert found["tensors"] > 1 and found["bytes"] > 0 and found["without_checksum"] == 0
    [file] = nvme.rglob("*.0")
    with open(file, "r+b") as changed:
        changed.seek(100)
        byte = changed.read(1)
        changed.seek(100)
        changed.write(bytes([byte[0] ^ 1]))
    with pytest.raises(OSError, match="checksum is wrong") as raised:
        tensorferry.snapshot.verify(path)
    assert raised.value.errno == errno.EBADMSG
    other = make()
    other.resume(path)
    with pytest.raises(OSError, match="checksum is wrong"):
        other.step()


@pytest.mark.parametrize(
    "options, what",
    [
        (dict(dtype=torch.bfloat16), "dtype is float32 in the snapshot and bfloat16 in this run"),
        (dict(moments="int8"), "packs_moments is False in the snapshot and True in this run"),
        (dict(buffer_count=1), "records"),
    ],
)
def test_another_run_is_refused_with_what_differs(options, what, make, path):
    run = make()
    run.step()
    run.take(path)
    other = make(**options)
    with pytest.raises(ValueError, match=what):
        other.resume(path)


def test_another_model_is_refused_by_the_name_of_a_tensor(path):
    tensorferry.snapshot.take(path, model=small_model())
    other = small_model()
    other.append(torch.nn.Linear(5, 5))
    with pytest.raises(ValueError, match=re.escape("this run has tensor 6.weight, and the")):
        tensorferry.snapshot.resume(path, model=other)
    with pytest.raises(ValueError, match="has no optimizer: take"):
        optimizer = torch.optim.SGD(other.parameters())
        tensorferry.snapshot.resume(path, optimizer=optimizer)


def test_a_missing_drive_is_refused_by_its_path(make, path, nvme, tmp_path):
    run = make()
    run.step()
    run.take(path)
    run.close()
    nvme.rename(tmp_path / "elsewhere")
    nvme.mkdir()
    with pytest.raises(FileNotFoundError, match="mount the drive"):
        make().resume(path)


def test_what_cannot_be_loaded_again_is_refused_at_once(path):
    class Mine:
        pass

    with pytest.raises(TypeError, match=re.escape("extra['a'][1] is a Mine")):
        tensorferry.snapshot.take(path, extra={"a": [1, Mine()]})
    assert not path.exists()
    assert tensorferry.snapshot.resume(path) is None


def test_a_full_drive_refuses_a_snapshot_and_the_run_goes_on(make, path, monkeypatch):
    run = make()
    run.step()
    run.take(path)
    expected = tensorferry.snapshot.find(path)
    real = tensorferry.SwapSpace.snapshot

    def full(self, *args):
        raise OSError(errno.ENOSPC, "needed 1 bytes, free 0")

    monkeypatch.setattr(tensorferry.SwapSpace, "snapshot", full)
    with pytest.raises(OSError, match="needed"):
        run.take(path)
    monkeypatch.setattr(tensorferry.SwapSpace, "snapshot", real)
    assert tensorferry.snapshot.find(path) == expected
    assert len(list(path.iterdir())) == 1
    run.step()
    run.take(path)


def test_a_snapshot_gives_way_unless_its_user_says_otherwise(path, monkeypatch):
    chosen = []

    class Scope(tensorferry.PriorityScope):
        def __init__(self, priority):
            super().__init__(priority)
            chosen.append(priority)

    monkeypatch.setattr(tensorferry.snapshot, "PriorityScope", Scope)
    tensorferry.snapshot.take(path)
    tensorferry.snapshot.take(path, priority="urgent")
    assert chosen == ["background", "urgent"]
    with pytest.raises(ValueError, match="urgent, normal or background"):
        tensorferry.snapshot.take(path, priority="low")


def test_states_of_another_number_of_gpus_are_told(monkeypatch):
    from tensorferry.snapshot.random_states import random_states, set_random_states

    given = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, at: given.update({at: state}))
    states = random_states() | {"cuda": ["first", "second"]}
    for count, expected in ((1, ["first"]), (3, ["first", "second"])):
        given.clear()
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        with pytest.warns(UserWarning, match=f"random states of 2 GPUs, and this .* has {count}"):
            set_random_states(states)
        assert given == dict(enumerate(expected))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(UserWarning, match="this process has 0"):
        set_random_states(states)


def test_what_accelerate_wraps_keeps_its_states_on_the_drive(make, path):
    accelerate = pytest.importorskip("accelerate")
    seed_all(1)
    run = make()
    run.step()
    bare = run.optimizer
    accelerator = accelerate.Accelerator(cpu=True)
    run.optimizer = accelerator.prepare_optimizer(bare)
    assert run.optimizer is not bare
    assert run.take(path).stored_bytes > 0
    expected = run.bits()
    run.step()
    run.resume(path)
    assert_same_bits(run.bits(), expected)
    run.optimizer = bare
    run.step()
    run.resume(path)
    assert_same_bits(run.bits(), expected)


KILLED = """
import os, signal, sys
sys.path[:0] = sys.argv[1].split(os.pathsep)
from snapshotting import KINDS, Run, seed_all
nvme, path, kind, steps = sys.argv[2:6]
seed_all(3)
run = Run(nvme, **KINDS[kind])
run.resume(path)
for _ in range(int(steps)):
    loss = run.step()
    print(run.number, loss.hex(), flush=True)
    if run.number % 2 == 0:
        run.take(path, keep=2)
        print("taken", run.number, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("kind", ["bf16", "weights"])
def test_a_killed_run_goes_on_from_its_last_snapshot(kind, nvme, path):
    from programs import FOLDERS

    def killed(steps, nvme=nvme, path=path):
        done = run_python(KILLED, FOLDERS, nvme, path, kind, steps, python=WARM_PYTHON)
        assert done.returncode != 0 and done.stderr == "", done.stderr
        lines = (line.split() for line in done.stdout.splitlines())
        return {int(number): loss for number, loss in lines if number != "taken"}

    other = nvme / "other"
    other.mkdir()
    whole = killed(8, other, other / "snapshots")
    parts = [killed(3), killed(4), killed(2)]
    assert [min(part) for part in parts] == [1, 3, 7]
    for part in parts:
        assert part == {number: whole[number] for number in part}


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("format", ["torch", "safetensors", "dcp"])
def test_an_export_reads_each_tensor_once_and_maps_none(format, nvme, path, tmp_path, monkeypatch):
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(8, 300, 3).to(memory_format=torch.channels_last),
        torch.nn.Linear(1100, 2000),  # more than one cut
        torch.nn.BatchNorm1d(5),
    )
    fetch, keys = tensorferry.SwapSpace.fetch, []

    def note(space, key, *rest):
        keys.append(key)
        return fetch(space, key, *rest)

    with tensorferry.offload.parameters(model, nvme, keep_bytes=4096, checksums=True):
        tensorferry.snapshot.take(path, model=model)
        expected = {name: value.clone() for name, value in model.state_dict().items()}
    monkeypatch.setattr(tensorferry.SwapSpace, "fetch", note)
    monkeypatch.setattr(tensorferry.SwapSpace, "view", None)
    target = tmp_path / "out"
    counts = tensorferry.snapshot.export(path, target, format=format)
    assert counts["tensors"] == len(expected) == 9
    assert counts["bytes"] == sum(value.nbytes for value in expected.values())
    assert len(set(keys)) == len(keys) == 4
    if format == "dcp":
        found = {name: torch.zeros_like(value) for name, value in expected.items()}
        torch.distributed.checkpoint.load(found, checkpoint_id=target, no_dist=True)
    else:
        found = tensorferry.checkpoint.load(target, format=format)
    assert_same_bits(found, expected)
    [file] = nvme.rglob("*.model-0.0")
    with open(file, "r+b") as changed:
        changed.write(b"damaged")
    again = tmp_path / "again"
    with pytest.raises(OSError, match="checksum is wrong"):
        tensorferry.snapshot.export(path, again, format=format)
    assert not again.exists()


def test_weights_that_a_run_has_in_memory_are_checked_when_it_resumes(make, path, nvme):
    run = make("weights")
    run.take(path)
    run.close()
    [file] = nvme.rglob("*.model-0.0")
    with open(file, "r+b") as changed:
        changed.write(b"damaged")
    with pytest.raises(OSError, match="checksum is wrong"):
        tensorferry.snapshot.resume(path, model=make("plain").model)


def test_an_export_is_in_the_background_unless_its_user_says_otherwise(make, path, tmp_path):
    run = make("all in memory")
    run.model.register_buffer("large", torch.randn(3 << 20))
    run.take(path)
    took = {}
    tensorferry.set_rate("background", 16 << 20)
    try:
        for priority in ("normal", "background"):
            begin = time.monotonic()
            tensorferry.snapshot.export(path, tmp_path / "out.pt", priority=priority)
            took[priority] = time.monotonic() - begin
    finally:
        tensorferry.set_rate("background", None)
    assert took["background"] > 0.4 + took["normal"], took
