"""Drives that fail or fill up and processes that are killed, in the middle of a step."""

import errno
import gc
import os
import signal
import subprocess
import sys

import pytest
import tensorferry.optim
import torch
from drives import failing_drive, loop_mount
from programs import FOLDERS
from training import MiB, assert_same, copies, give_gradients
from warm_python import WARM_PYTHON


def large(count=8, size=MiB, dtype=torch.float32):
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(size).to(dtype)) for _ in range(count)]


def steps(params, optimizer, first, last):
    for step in range(first, last):
        give_gradients(step, [], params)
        optimizer.step()


def pair(drive, count=8, **options):
    mine = large(count)
    theirs = copies(mine)
    ours = tensorferry.optim.AdamW(
        mine, nvme_path=drive, **(dict(buffer_count=2, buffer_bytes=9 * MiB) | options)
    )
    return mine, ours, theirs, torch.optim.AdamW(theirs, fused=True)


def saved(params, optimizer, file):
    parts = dict(params=[param.detach() for param in params], optimizer=optimizer.state_dict())
    torch.save(parts, file)


def restore(params, optimizer, file):
    parts = torch.load(file, mmap=True)
    with torch.no_grad():
        for param, value in zip(params, parts["params"]):
            param.copy_(value)
    optimizer.load_state_dict(parts["optimizer"])


def spoiled(optimizer, call):
    """The call fails, says what became of the state, and the optimizer stays out of use."""
    with pytest.raises(OSError) as caught:
        call()
    notes = " ".join(caught.value.__notes__)
    assert "load a checkpoint" in notes and "state" in notes
    for other in (optimizer.step, optimizer.state_dict):
        with pytest.raises(RuntimeError, match="load a checkpoint"):
            other()
    return caught.value


@pytest.mark.parametrize("pipeline_read", [True, False])
def test_a_read_that_fails_in_the_middle_of_a_step(tmp_path, pipeline_read):
    with failing_drive(tmp_path) as drive:
        mine, ours, theirs, reference = pair(drive.point, pipeline_read=pipeline_read)
        steps(mine, ours, 0, 2)
        steps(theirs, reference, 0, 2)
        saved(mine, ours, tmp_path / "checkpoint")
        steps(mine, ours, 2, 3)
        steps(theirs, reference, 2, 3)
        before = [param.detach().clone() for param in mine]
        drive.lose()
        give_gradients(3, [], mine)
        with pytest.raises(OSError) as caught:
            ours.step()
        assert caught.value.errno == errno.EIO
        if all(torch.equal(one, other) for one, other in zip(mine, before)):
            assert not hasattr(caught.value, "__notes__")  # nothing has changed
        else:
            assert "different steps" in caught.value.__notes__[0]
        restore(mine, ours, tmp_path / "checkpoint")
        steps(mine, ours, 2, 6)
        steps(theirs, reference, 3, 6)
        assert_same(mine, theirs)
        ours.close()


@pytest.mark.parametrize("count", [1, 4])
def test_a_drive_that_fills_up_in_the_first_step(tmp_path, count):
    """Also in its first sub-group: the parameters have changed, their states are nowhere."""
    with loop_mount(tmp_path, size="64M") as point:
        mine, ours, theirs, reference = pair(point, count)
        with open(point / "ballast", "wb") as ballast:
            free = os.statvfs(point)
            room = (count - 1) * 8 * MiB + 2 * MiB
            os.posix_fallocate(ballast.fileno(), 0, free.f_bavail * free.f_bsize - room)
        saved(mine, ours, tmp_path / "checkpoint")
        give_gradients(0, [], mine)
        error = spoiled(ours, ours.step)
        assert error.errno == errno.ENOSPC and "needed" in str(error)
        os.unlink(point / "ballast")
        restore(mine, ours, tmp_path / "checkpoint")
        steps(mine, ours, 0, 3)
        steps(theirs, reference, 0, 3)
        assert_same(mine, theirs)
        ours.close()


@pytest.mark.parametrize("pipeline_write", [True, False])
def test_a_drive_that_ends_in_the_middle_of_training(tmp_path, pipeline_write):
    """With pipeline_write the next call says so. The run goes on on another drive."""
    with failing_drive(tmp_path) as drive:
        mine, ours, theirs, reference = pair(drive.point, pipeline_write=pipeline_write)
        steps(mine, ours, 0, 2)
        steps(theirs, reference, 0, 2)
        saved(mine, ours, tmp_path / "checkpoint")
        drive.end()
        with pytest.raises(OSError) as caught:
            steps(mine, ours, 2, 4)
        assert caught.value.errno == errno.EIO
        try:
            ours.close()
        except OSError as error:
            assert error.errno == errno.EIO
        assert ours._store.space.closed
        del ours, caught
        again = tensorferry.optim.AdamW(mine, nvme_path=tmp_path, buffer_bytes=9 * MiB)
        restore(mine, again, tmp_path / "checkpoint")
        steps(mine, again, 2, 4)
        steps(theirs, reference, 2, 4)
        assert_same(mine, theirs)


def test_a_gradient_that_cannot_be_written_spoils_only_the_gradients(tmp_path):
    with failing_drive(tmp_path) as drive:
        mine = large(2)
        ours = tensorferry.optim.AdamW(
            mine, nvme_path=drive.point, buffer_count=1, offload_gradients=True, fast_init=False
        )
        drive.end()
        before = [param.detach().clone() for param in mine]
        sum(param.sum() for param in mine).backward()
        for _ in range(2):  # until zero_grad()
            with pytest.raises(RuntimeError, match="gradient could not be written.*zero_grad"):
                ours.step()
        assert_same(mine, before)
        ours.zero_grad()
        ours.step()
        assert ours.state_dict()["state"] == {}
        try:
            ours.close()
        except OSError as error:
            assert error.errno == errno.EIO
        del ours
        gc.collect()


def test_offload_to_a_full_drive_leaves_the_optimizer_its_states(tmp_path):
    mine = large(4)
    theirs = copies(mine)
    first, reference = torch.optim.AdamW(mine, fused=True), torch.optim.AdamW(theirs, fused=True)
    steps(mine, first, 0, 2)
    steps(theirs, reference, 0, 2)
    with loop_mount(tmp_path, size="24M") as point, pytest.raises(OSError, match="needed"):
        tensorferry.optim.offload(first, point, buffer_bytes=9 * MiB)
    steps(mine, first, 2, 4)
    steps(theirs, reference, 2, 4)
    assert_same(mine, theirs)


def interrupt(monkeypatch, params, optimizer, meanwhile=lambda: None):
    """Ctrl-C in the second sub-group of a step; just before it something else may happen."""
    real = torch._fused_adamw_
    calls = []

    def interrupted(*arguments, **options):
        calls.append(1)
        real(*arguments, **options)
        if len(calls) == 2:
            meanwhile()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch, "_fused_adamw_", interrupted)
        give_gradients(1, [], params)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()


def test_ctrl_c_in_the_middle_of_a_step_is_said(tmp_path, monkeypatch):
    mine, ours, theirs, reference = pair(tmp_path, 3)
    steps(mine, ours, 0, 1)
    steps(theirs, reference, 0, 1)
    saved(mine, ours, tmp_path / "checkpoint")
    interrupt(monkeypatch, mine, ours)
    with pytest.raises(RuntimeError, match="load a checkpoint"):
        ours.step()
    restore(mine, ours, tmp_path / "checkpoint")
    steps(mine, ours, 1, 3)
    steps(theirs, reference, 1, 3)
    assert_same(mine, theirs)


class Interrupted:
    """A write that has failed, and at whose first wait comes Ctrl-C."""

    waits = 0

    def wait(self):
        self.waits += 1
        raise KeyboardInterrupt if self.waits == 1 else OSError(errno.EIO, "it has failed")


def test_ctrl_c_while_writes_are_waited_for_loses_no_failure(tmp_path):
    mine, ours, _, _ = pair(tmp_path, 2)
    steps(mine, ours, 0, 1)
    ours._store.writes.append(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        ours.state_dict()
    with pytest.raises(OSError, match="it has failed"):
        ours.state_dict()
    with pytest.raises(RuntimeError, match="load a checkpoint"):
        ours.step()


def test_a_second_ctrl_c_does_not_make_a_half_step_good(tmp_path, monkeypatch):
    mine, ours, _, _ = pair(tmp_path, 4)
    steps(mine, ours, 0, 1)
    # The second comes while writes are waited for.
    interrupt(monkeypatch, mine, ours, meanwhile=lambda: ours._store.writes.append(Interrupted()))
    with pytest.raises(RuntimeError, match="a step ended after.*load a checkpoint"):
        ours.step()


TRAINING = """
import os, sys, torch
sys.path[:0] = sys.argv[1].split(os.pathsep)
import tensorferry.optim
from test_optim_faults import large, restore, saved
from training import give_gradients
drive, file, last = sys.argv[2], sys.argv[3], int(sys.argv[4])
params = large(4, 1 << 18)
optimizer = tensorferry.optim.AdamW(params, nvme_path=drive, buffer_count=2, buffer_bytes=1 << 20,
                                    block_bytes=65536, queue_depth=1)
first = 0
if os.path.exists(file):
    restore(params, optimizer, file)
    first = torch.load(file, mmap=True)["optimizer"]["state"][0]["step"].int().item()
for step in range(first, last):
    if step == 2 and first == 0:
        saved(params, optimizer, file + ".new")
        os.rename(file + ".new", file)
    give_gradients(step, [], params)
    print("step", step, flush=True)
    optimizer.step()
torch.save([param.detach() for param in params], file + ".result")
"""


def test_a_run_that_was_killed_in_a_step_goes_on_to_the_same_bits(tmp_path):
    checkpoint = tmp_path / "checkpoint"
    words = ["-c", TRAINING, FOLDERS, str(tmp_path), str(checkpoint), "5"]
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line == "step 3\n":
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    left = next(tmp_path.glob("tensorferry-swap-*"))
    assert len(os.listdir(left)) == 1
    done = subprocess.run([*WARM_PYTHON, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "step 2"
    assert os.listdir(left) == []  # also what the killed one had left
    theirs = large(4, 1 << 18)
    steps(theirs, torch.optim.AdamW(theirs, fused=True), 0, 5)
    assert_same(torch.load(f"{checkpoint}.result"), theirs)
