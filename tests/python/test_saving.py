"""Saves with wait=False: the bytes, the stage, the line of saves, failures and ends."""

import asyncio
import errno
import gc
import logging
import os
import random
import threading
import time
import weakref

import numpy
import pytest

torch = pytest.importorskip("torch")

import tensorferry.offload
from checkpoint_objects import SAFE, UNSAFE
from drives import memory_mount
from programs import check_python, run_python, runs
from tensorferry import checkpoint
from tensorferry._saving.line import stage_stats
from tensorferry.safetensors.torch import save_file
from warm_python import WARM_PYTHON

MIB = 1 << 20
WINDOW = 16 * MIB


def tensors(mib=40):
    """So many MiB in tensors that do not begin where windows do."""
    torch.manual_seed(mib)
    count = mib * MIB // 4
    return {
        "first": torch.randn(count // 3),
        "empty": torch.empty(0),
        "few": torch.randn(77),
        "second": torch.randn(count - count // 3),
    }


def zero(state):
    for tensor in state.values():
        tensor.zero_()


class Gate:
    """A progress function that stops a save before its end until the gate opens."""

    def __init__(self):
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, done, total):
        self.reached.set()
        assert self.opened.wait(30)


@pytest.fixture
def gate():
    made = Gate()
    yield made
    made.opened.set()


def names_in(folder):
    return sorted(os.listdir(folder))


# The file


@pytest.mark.parametrize("name", SAFE | UNSAFE)
def test_the_file_is_that_of_wait_true(tmp_path, name):
    made = (SAFE | UNSAFE)[name]()
    file = tmp_path / "model.pt"
    checkpoint.save(made, file)
    expected = file.read_bytes()
    saving = checkpoint.save(made, file, wait=False)
    saving.wait()
    assert file.read_bytes() == expected
    assert saving.done() and saving.exception() is None
    assert saving.progress == (len(expected), len(expected))
    assert saving.path == str(file)


WAYS = {
    "torch": ("model.pt", checkpoint.save, {}),
    "safetensors with checksums": ("model.safetensors", checkpoint.save, {}),
    "save_file": ("model.safetensors", save_file, {"metadata": {"a": "b"}}),
    "save_file, checksums": ("model.safetensors", save_file, {"checksums": True}),
}


@pytest.mark.parametrize("stage_bytes", [None, WINDOW, 2 * WINDOW], ids=["1 GiB", "16", "32"])
@pytest.mark.parametrize("way", WAYS)
def test_tensors_may_be_changed_when_the_call_returns(tmp_path, way, stage_bytes):
    name, save, options = WAYS[way]
    state, file = tensors(), tmp_path / name
    save(state, file, **options)
    expected = file.read_bytes()
    saving = save(state, file, **options, wait=False, stage_bytes=stage_bytes)
    zero(state)
    saving.wait()
    assert file.read_bytes() == expected
    assert names_in(tmp_path) == [name]


def test_a_file_without_checksums_is_that_of_wait_true(tmp_path):
    from torch.utils.serialization import config

    file = tmp_path / "model.pt"
    with config.patch({"save.compute_crc32": False, "save.storage_alignment": 4096}):
        checkpoint.save(tensors(), file)
        expected = file.read_bytes()
        checkpoint.save(tensors(), file, wait=False).wait()
    assert file.read_bytes() == expected


# The stage


def test_the_stage_keeps_to_stage_bytes_and_the_log_says_who_waits(tmp_path, caplog):
    checkpoint.free_stage()
    with caplog.at_level(logging.INFO, "tensorferry"):
        saving = checkpoint.save(tensors(), tmp_path / "a.pt", wait=False, stage_bytes=2 * WINDOW)
        assert stage_stats()["bytes"] <= 2 * WINDOW
        saving.wait()
        [said] = [record.getMessage() for record in caplog.records]
        assert "waits until the drive has written what does not fit into 32 MiB" in said
        caplog.clear()
        checkpoint.save(tensors(), tmp_path / "a.pt", wait=False, stage_bytes=4 * WINDOW).wait()
        assert not caplog.records
    assert stage_stats() == {"bytes": 3 * WINDOW, "used_bytes": 0}  # 40 MiB lie in three
    checkpoint.save(tensors(), tmp_path / "a.pt", wait=False, stage_bytes=WINDOW).wait()
    assert stage_stats() == {"bytes": WINDOW, "used_bytes": 0}
    checkpoint.free_stage()
    assert stage_stats() == {"bytes": 0, "used_bytes": 0}


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_nobody_holds_the_tensors_when_the_call_has_returned(tmp_path, gate, name):
    array = numpy.ones(1000)
    alive = weakref.ref(array)
    saving = checkpoint.save(
        {"a": torch.from_numpy(array)}, tmp_path / name, wait=False, progress=gate
    )
    del array
    gc.collect()
    assert alive() is None
    gate.opened.set()
    saving.wait()


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_weights_on_the_drive_are_not_staged(tmp_path, gate, name):
    """state_dict() maps them; they are read when they are written, as they were."""
    file = tmp_path / name
    model = torch.nn.Sequential(*[torch.nn.Linear(2048, 1024, bias=False) for _ in range(5)])
    with tensorferry.offload.parameters(model, tmp_path, 40 * MIB, keep_bytes=0):
        checkpoint.save(model.state_dict(), file)
        expected = file.read_bytes()
        checkpoint.free_stage()
        other = checkpoint.save({}, tmp_path / "other.pt", wait=False, progress=gate)
        saving = checkpoint.save(model.state_dict(), file, wait=False)
        used = stage_stats()["used_bytes"]
        with torch.no_grad():
            changed = {key: value.clone().add_(1) for key, value in model.state_dict().items()}
        model.load_state_dict(changed)
        gate.opened.set()
        other.wait()
        saving.wait()
    assert used == 0
    assert file.read_bytes() == expected


def test_what_is_no_size_or_no_choice_is_refused(tmp_path):
    for wrong in (dict(stage_bytes=WINDOW - 1), dict(when_busy="drop")):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            checkpoint.save({}, tmp_path / "a.pt", wait=False, **wrong)
    with pytest.raises(TypeError, match="needs a path"):
        checkpoint.save({}, open(os.devnull, "wb"), wait=False)
    with pytest.raises(FileNotFoundError):
        checkpoint.save({}, tmp_path / "no" / "a.pt", wait=False)
    assert names_in(tmp_path) == []


# Waiting


def test_it_can_be_waited_for_polled_and_awaited(tmp_path, gate):
    saving = checkpoint.save(tensors(), tmp_path / "a.pt", wait=False, progress=gate)
    assert gate.reached.wait(30)
    assert not saving.done() and saving.exception() is None
    with pytest.raises(TimeoutError):
        saving.wait(timeout=0.05)
    assert names_in(tmp_path) != ["a.pt"]

    async def main():
        waiting = asyncio.ensure_future(wait_for(saving))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(wait_for(saving), 0.05)
        gate.opened.set()
        await waiting
        await saving

    async def wait_for(one):
        await one

    asyncio.run(main())
    assert saving.done() and names_in(tmp_path) == ["a.pt"]


def test_progress_grows_to_the_size_of_the_file(tmp_path):
    seen = []
    tensorferry.set_rate("background", 100 * MIB)
    try:
        saving = checkpoint.save(
            tensors(), tmp_path / "a.pt", wait=False, progress=lambda *told: seen.append(told)
        )
        while not saving.done():
            time.sleep(0.001)
    finally:
        tensorferry.set_rate("background", None)
    size = os.path.getsize(tmp_path / "a.pt")
    assert seen == sorted(seen) and seen[-1] == (size, size)
    assert saving.progress == (size, size)


def test_a_save_is_in_the_background_until_somebody_waits(tmp_path):
    tensorferry.set_rate("background", MIB)
    try:
        saving = checkpoint.save(tensors(), tmp_path / "a.pt", wait=False)
        time.sleep(0.3)
        assert saving.progress[0] <= WINDOW and not saving.done()
        saving.wait(timeout=20)  # at its rate it takes 40 s
    finally:
        tensorferry.set_rate("background", None)


def test_cancel_leaves_the_old_file(tmp_path, gate):
    file = tmp_path / "a.pt"
    checkpoint.save(torch.ones(3), file)
    saving = checkpoint.save(tensors(), file, wait=False, progress=gate)
    assert gate.reached.wait(30)
    saving.cancel()
    gate.opened.set()
    with pytest.raises(OSError) as caught:
        saving.wait()
    assert caught.value.errno == errno.ECANCELED and caught.value.filename == str(file)
    assert names_in(tmp_path) == ["a.pt"]
    assert torch.equal(checkpoint.load(file), torch.ones(3))
    saving.cancel()  # does nothing any more
    checkpoint.save(torch.ones(4), file, wait=False).wait()  # who cancels knows: nobody is told


# The line


def test_saves_queue_in_their_order(tmp_path, gate):
    file = tmp_path / "a.pt"
    first = checkpoint.save(torch.tensor(0), file, wait=False, progress=gate)
    others = [checkpoint.save(torch.tensor(n), file, wait=False) for n in range(1, 5)]
    assert gate.reached.wait(30)
    assert not any(saving.done() for saving in [first, *others])
    gate.opened.set()
    others[-1].wait()
    assert all(saving.done() for saving in [first, *others])
    assert int(checkpoint.load(file)) == 4


def test_a_save_is_refused_while_one_runs_if_so_chosen(tmp_path, gate):
    first = checkpoint.save(torch.ones(3), tmp_path / "a.pt", wait=False, progress=gate)
    with pytest.raises(OSError, match="a.pt goes on") as caught:
        checkpoint.save(torch.ones(4), tmp_path / "b.pt", wait=False, when_busy="refuse")
    assert caught.value.errno == errno.EBUSY
    gate.opened.set()
    first.wait()
    checkpoint.save(torch.ones(4), tmp_path / "b.pt", wait=False, when_busy="refuse").wait()
    assert names_in(tmp_path) == ["a.pt", "b.pt"]


def test_threads_that_save_at_once_do_not_lock_each_other(tmp_path):
    """Each of them needs more than there is of the stage."""
    failures = []

    def save(number):
        try:
            for round_number in range(3):
                file = tmp_path / f"{number}.pt"
                state = {"a": torch.full((9 * MIB,), number * 10 + round_number)}
                saving = checkpoint.save(state, file, wait=False, stage_bytes=2 * WINDOW)
                zero(state)
                saving.wait(timeout=60)
                values = checkpoint.load(file)["a"]
                assert (values == number * 10 + round_number).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert stage_stats()["used_bytes"] == 0


# Failures


def test_a_failure_is_told_once_by_wait_or_by_the_next_call(tmp_path, caplog):
    def fail(done, total):
        raise RuntimeError("no progress")

    file = tmp_path / "a.pt"
    checkpoint.save(torch.ones(3), file)
    saving = checkpoint.save(torch.ones(4), file, wait=False, progress=fail)
    with pytest.raises(RuntimeError, match="no progress"):
        saving.wait()
    checkpoint.save(torch.ones(5), tmp_path / "b.pt", wait=False).wait()
    failed = checkpoint.save(torch.ones(4), file, wait=False, progress=fail)
    while not failed.done():
        time.sleep(0.001)
    with pytest.raises(RuntimeError, match="no progress") as caught:
        checkpoint.save(torch.ones(6), tmp_path / "c.pt", wait=False)
    if hasattr(caught.value, "__notes__"):
        assert f"The save to {file} in the background" in caught.value.__notes__[0]
    checkpoint.save(torch.ones(6), tmp_path / "c.pt", wait=False).wait()
    assert names_in(tmp_path) == ["a.pt", "b.pt", "c.pt"]
    assert torch.equal(checkpoint.load(file), torch.ones(3))
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert told and all("has failed: no progress" in text for text in told)


def test_a_full_drive_leaves_the_old_file_alone(tmp_path):
    with memory_mount(tmp_path, size="60M") as point:
        file = point / "a.pt"
        checkpoint.save(torch.ones(3), file)
        for stage_bytes in (WINDOW, None):  # it fails while the call waits, and after that
            with pytest.raises(OSError) as caught:
                checkpoint.save(tensors(100), file, wait=False, stage_bytes=stage_bytes).wait()
            assert caught.value.errno == errno.ENOSPC
            assert names_in(point) == ["a.pt"]
            assert torch.equal(checkpoint.load(file), torch.ones(3))
            assert stage_stats()["used_bytes"] == 0
        checkpoint.save(tensors(40), file, wait=False).wait()
        assert torch.equal(checkpoint.load(file)["second"], tensors(40)["second"])


KILLER = """
import os, random, signal, sys, time, torch
from tensorferry import checkpoint
torch.set_num_threads(1)  # OpenMP does not survive a fork
file, rounds, rng = sys.argv[1], int(sys.argv[2]), random.Random(11)
step, seen = 0, set()
for _ in range(rounds):
    inner, outer = os.pipe()
    child = os.fork()
    if child == 0:
        values = torch.empty(5 << 20, dtype=torch.int64)
        while True:
            step += 1
            values.fill_(step)
            saving = checkpoint.save(values, file, wait=False, stage_bytes=32 << 20)
            values.zero_()
            saving.wait()
            os.write(outer, b"%d\\n" % step)
    os.close(outer)
    time.sleep(rng.uniform(0, 0.25))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    told = os.read(inner, 1 << 16).split()
    os.close(inner)
    acknowledged = int(told[-1]) if told else step
    if not os.path.exists(file):
        assert not told
        continue
    values = checkpoint.load(file)
    step = int(values[0])
    assert step in (acknowledged, acknowledged + 1), (step, acknowledged)
    assert (values == step).all() and len(values) == 5 << 20
    seen.add(sum(name.startswith(".") for name in os.listdir(os.path.dirname(file))))
assert step > 0, "no save ended before the kill"
assert max(seen) == 1, "no save was killed"
"""


def test_a_kill_at_any_moment_leaves_the_old_file_or_the_new_one(tmp_path):
    file = tmp_path / "out" / "model.pt"
    file.parent.mkdir()
    (tmp_path / "scratch").mkdir()
    scratch = str(tmp_path / "scratch")
    check_python(KILLER, file, runs(12), python=WARM_PYTHON, TMPDIR=scratch)
    checkpoint.save(torch.ones(3), file, wait=False).wait()
    assert names_in(file.parent) == ["model.pt"]


# A save of 40 MiB that stays in the background, and is slow there; `slow` ends after two windows.
BEGIN = """
    import os, signal, sys, threading, time, torch, tensorferry
    from tensorferry import checkpoint
    file = sys.argv[1]
    state = {"a": torch.full((10 << 20,), 3)}
    tensorferry.set_rate("background", 100 << 20)
"""


def check_saved(folder):
    assert names_in(folder) == ["model.pt"]
    assert (checkpoint.load(folder / "model.pt")["a"] == 3).all()


@pytest.mark.parametrize("ending", ["", "sys.exit()", "del state, checkpoint, tensorferry"])
def test_the_end_of_python_finishes_a_save(tmp_path, ending):
    program = (
        BEGIN
        + f"""
    checkpoint.save(state, file, wait=False)
    {ending}
    """
    )
    check_python(program, tmp_path / "model.pt", python=WARM_PYTHON)
    check_saved(tmp_path)


def test_the_end_of_a_process_of_multiprocessing_finishes_a_save(tmp_path):
    program = (
        BEGIN
        + """
    import multiprocessing
    torch.set_num_threads(1)
    def train():
        checkpoint.save(state, file, wait=False)
    process = multiprocessing.get_context("fork").Process(target=train)
    process.start()
    process.join()
    assert process.exitcode == 0
    """
    )
    check_python(program, tmp_path / "model.pt", python=WARM_PYTHON)
    check_saved(tmp_path)


def test_an_exception_of_the_program_finishes_a_save(tmp_path):
    program = (
        BEGIN
        + """
    checkpoint.save(state, file, wait=False)
    raise RuntimeError("of the program")
    """
    )
    done = run_python(program, tmp_path / "model.pt", python=WARM_PYTHON)
    assert done.returncode == 1 and "of the program" in done.stderr
    check_saved(tmp_path)


def test_the_end_of_python_tells_what_failed(tmp_path):
    program = (
        BEGIN
        + """
    def fail(done, total):
        raise OSError(5, "the drive is gone")
    checkpoint.save(state, file, wait=False, progress=fail)
    """
    )
    done = run_python(program, tmp_path / "model.pt", python=WARM_PYTHON)
    assert "the drive is gone" in done.stderr
    assert names_in(tmp_path) == []


def test_the_end_of_python_gives_up_what_does_not_move(tmp_path):
    program = (
        BEGIN
        + """
    from tensorferry._saving import line
    line._EXIT_LIMIT_SECONDS = 0.5
    checkpoint.save(state, file, wait=False, progress=lambda *_: time.sleep(1000))
    """
    )
    begin = time.monotonic()
    run_python(program, tmp_path / "model.pt", python=WARM_PYTHON)
    assert time.monotonic() - begin < 30
    checkpoint.save(torch.ones(3), tmp_path / "model.pt")
    assert names_in(tmp_path) == ["model.pt"]  # and nothing that was left behind


def test_ctrl_c_in_the_call_leaves_the_old_file_and_in_wait_the_save_goes_on(tmp_path):
    program = (
        BEGIN
        + """
    def interrupt():
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)
    opened = threading.Event()
    checkpoint.save(torch.ones(3), file)
    other = checkpoint.save(1, file + "1", wait=False, progress=lambda *_: opened.wait())
    threading.Thread(target=interrupt).start()
    try:
        checkpoint.save(state, file, wait=False, stage_bytes=16 << 20)
    except KeyboardInterrupt:
        print("in the call")
    opened.set()
    other.wait()
    assert sorted(os.listdir(os.path.dirname(file))) == ["model.pt", "model.pt1"]
    assert len(checkpoint.load(file)) == 3
    os.unlink(file + "1")
    opened.clear()
    saving = checkpoint.save(state, file, wait=False, progress=lambda *_: opened.wait())
    threading.Thread(target=interrupt).start()
    try:
        saving.wait()
    except KeyboardInterrupt:
        print("in wait")
    opened.set()
    saving.wait()
    """
    )
    assert check_python(program, tmp_path / "model.pt", python=WARM_PYTHON) == (
        "in the call\nin wait\n"
    )
    check_saved(tmp_path)


def test_a_forked_child_leaves_the_save_to_its_parent_and_can_save_itself(tmp_path):
    program = (
        BEGIN
        + """
    torch.set_num_threads(1)
    opened = threading.Event()
    saving = checkpoint.save(state, file, wait=False, progress=lambda *_: opened.wait())
    child = os.fork()
    if child == 0:
        try:
            saving.wait()
        except ChildProcessError:
            checkpoint.save(torch.ones(3), file + "1", wait=False)  # its exit finishes that
            sys.exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert len(checkpoint.load(file + "1")) == 3
    os.unlink(file + "1")
    opened.set()
    saving.wait()
    """
    )
    check_python(program, tmp_path / "model.pt", python=WARM_PYTHON)
    check_saved(tmp_path)


def test_saves_of_random_sizes_and_moments_are_whole(tmp_path):
    """A training loop that changes its tensors all the time, and saves whenever it likes."""
    rng = random.Random(3)
    state = {f"t{i}": torch.zeros(rng.randrange(1, 1 << 21)) for i in range(12)}
    file, savings = tmp_path / "a.pt", []
    for step in range(runs(25)):
        for tensor in state.values():
            tensor.fill_(step)
        way = rng.choice([dict(), dict(stage_bytes=WINDOW), dict(when_busy="refuse")])
        try:
            savings.append((step, checkpoint.save(state | {"n": step}, file, wait=False, **way)))
        except OSError as error:
            assert error.errno == errno.EBUSY
        if rng.random() < 0.3:
            savings[-1][1].wait()
            found = checkpoint.load(file)
            assert found.pop("n") == savings[-1][0]
            assert all((tensor == savings[-1][0]).all() for tensor in found.values())
    savings[-1][1].wait()
    assert all(saving.exception() is None for _, saving in savings)
