"""Kills, power cuts, full drives, failing syncs: the old checkpoint or the new one is whole."""

import errno
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp
from drives import loop_mount, memory_mount
from programs import FOLDERS, runs
from tensorferry.dcp import Reader, Writer
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from warm_python import WARM_PYTHON

JOB = os.path.join(os.path.dirname(__file__), "dcp_faults_job.py")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def save(value, folder, count=100_000, **options):
    state = {"x": torch.full((count,), float(value)), "step": torch.tensor(value)}
    dcp.save(state, storage_writer=Writer(folder, **options))


def saved_in(folder, count=100_000):
    """The value of the checkpoint, which is whole."""
    state = {"x": torch.zeros(count), "step": torch.tensor(0)}
    dcp.load(state, storage_reader=Reader(folder))
    value = int(state["step"])
    assert torch.equal(state["x"], torch.full((count,), float(value)))
    return value


def names_in(folder):
    return sorted(os.listdir(folder))


def run_job(*arguments):
    """Runs dcp_faults_job.py and returns the numbers that it prints."""
    done = subprocess.run(
        [*WARM_PYTHON, JOB, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=1000,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0 and done.stderr == "", f"{done.stdout}\n{done.stderr}"
    return {kind: int(count) for kind, count in re.findall(r"(old|new|before) (\d+)", done.stdout)}


@pytest.mark.parametrize("layout, rounds", [("torch", 50), ("huggingface", 20)])
def test_a_kill_of_a_rank_leaves_the_old_checkpoint_or_the_new_one(tmp_path, layout, rounds):
    found = run_job("kills", tmp_path, layout, runs(rounds))
    assert found["old"] > 0
    save(1, tmp_path, layout=layout)
    assert len(names_in(tmp_path)) == 2  # what those that were killed have left is gone
    assert saved_in(tmp_path) == 1


@pytest.mark.parametrize("layout, rounds", [("torch", 70), ("huggingface", 30)])
def test_a_power_cut_leaves_the_old_checkpoint_or_the_new_one(tmp_path, layout, rounds):
    with loop_mount(tmp_path, size="64M") as point:
        save(1, point / "checkpoint", layout=layout)  # mounts work here
    found = run_job("power_cuts", tmp_path / "ext4.img", point, layout, runs(rounds))
    assert found["old"] > 0, "no save was cut"
    assert found["before"] > 0, "no save returned before the cut"


@pytest.mark.parametrize("layout", ["torch", "huggingface"])
def test_a_drive_full_at_every_4_kib_of_a_save_leaves_the_old_checkpoint(tmp_path, layout):
    count = 1 << 20  # 4 MiB
    with memory_mount(tmp_path, size="12M") as point:
        folder = point / "checkpoint"
        save(1, folder, count, layout=layout)
        old = {name: os.stat(folder / name) for name in names_in(folder)}
        state = {"x": torch.full((count,), 2.0), "step": torch.tensor(2)}
        full = 0
        with open(point / "filler", "wb") as filler:
            space = os.statvfs(point).f_bfree * os.statvfs(point).f_frsize
            os.posix_fallocate(filler.fileno(), 0, space)
            for free in range(0, 5 << 20, 4096):
                filler.truncate(space - free)
                try:
                    dcp.save(state, storage_writer=Writer(folder, layout=layout))
                    break
                except CheckpointException as error:
                    assert os.strerror(errno.ENOSPC) in str(error)
                full += 1
                now = {name: os.stat(folder / name) for name in names_in(folder)}
                assert now.keys() == old.keys(), f"free {free}: something is left behind"
                for name, facts in now.items():
                    assert facts.st_ino == old[name].st_ino, f"free {free}"
                    assert facts.st_mtime_ns == old[name].st_mtime_ns, f"free {free}"
                if full % 100 == 0:
                    assert saved_in(folder, count) == 1
        assert full > 1000
        assert saved_in(folder, count) == 2  # it works again with space
        assert len(names_in(folder)) == 2


@pytest.mark.parametrize("layout", ["torch", "huggingface"])
@pytest.mark.parametrize("mount", [memory_mount, loop_mount])
def test_a_full_drive_leaves_the_old_checkpoint_and_works_again(tmp_path, mount, layout):
    with mount(tmp_path, size="48M") as point:
        folder = point / "checkpoint"
        save(1, folder, layout=layout)
        old = names_in(folder)
        filler = point / "filler"
        with open(filler, "wb") as out:
            free = os.statvfs(point).f_bfree * os.statvfs(point).f_frsize
            out.write(bytes(max(0, free - (5 << 20))))
        for size in range(5 << 20, (6 << 20) + 1, 256 << 10):
            with pytest.raises(CheckpointException, match=os.strerror(errno.ENOSPC)):
                save(2, folder, size // 4, layout=layout)
            assert names_in(folder) == old
            assert saved_in(folder) == 1
        filler.unlink()
        save(3, folder, 6 << 18, layout=layout)
        assert saved_in(folder, 6 << 18) == 3
        assert len(names_in(folder)) == 2


@pytest.fixture
def hears_ctrl_c():
    """Python ignores it if a shell has started it in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("layout", ["torch", "huggingface"])
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("when", ["first", "last"])
def test_ctrl_c_leaves_the_old_checkpoint_and_nothing_else(
    tmp_path, hears_ctrl_c, layout, single, when
):
    save(1, tmp_path, layout=layout)
    old = names_in(tmp_path)

    def press(done, total):
        if when == "first" or done == total:
            signal.raise_signal(signal.SIGINT)

    monitor = dict(layout=layout, single_file_per_rank=single, progress=press)
    with pytest.raises(CheckpointException, match="KeyboardInterrupt"):
        save(2, tmp_path, 10 << 20, **monitor)
    assert names_in(tmp_path) == old
    assert saved_in(tmp_path) == 1


def test_a_plan_of_an_earlier_save_does_not_remove_its_files(tmp_path):
    for expected in (None, "No such file"):
        writer = Writer(tmp_path, layout="huggingface")
        planner = DefaultSavePlanner(enable_plan_caching=True)
        state = {"x": torch.full((100_000,), 1.0), "step": torch.tensor(1)}
        if expected is None:
            dcp.save(state, storage_writer=writer, planner=planner)
            continue
        with pytest.raises(CheckpointException, match=expected):
            dcp.save(state, storage_writer=writer, planner=planner)
    assert saved_in(tmp_path) == 1


@pytest.mark.parametrize("layout", ["torch", "huggingface"])
@pytest.mark.parametrize("text", ["", "{no", "[]", '{"weight_map": {"x": []}}', "[" * 100_000])
def test_a_damaged_head_of_a_checkpoint_is_replaced(tmp_path, caplog, layout, text):
    save(1, tmp_path, layout=layout)
    head = tmp_path / (".metadata" if layout == "torch" else "model.safetensors.index.json")
    head.write_text(text)
    old = names_in(tmp_path)
    save(2, tmp_path, layout=layout)
    assert "old " in caplog.text and " stay in " in caplog.text
    assert saved_in(tmp_path) == 2
    save(3, tmp_path, layout=layout)
    assert len(names_in(tmp_path)) == 2 and len(set(old) & set(names_in(tmp_path))) == 1


@pytest.mark.parametrize(
    "layout, moment",
    [("torch", "writer.save_metadata"), ("huggingface", "safetensors_set.sync_folder")],
)
def test_a_save_that_begins_while_another_ends_takes_nothing_from_it(
    tmp_path, monkeypatch, layout, moment
):
    module, name = moment.split(".")
    module = importlib.import_module(f"tensorferry.dcp.{module}")
    original, begun = getattr(module, name), []

    def begin_another(*arguments):
        other = Writer(tmp_path, layout=layout)
        begun.append(threading.Thread(target=other.prepare_global_plan, args=([],)))
        begun[-1].start()
        begun[-1].join(0.3)  # it has removed what no metadata name, or waits for its turn
        return original(*arguments)

    save(1, tmp_path, layout=layout)
    monkeypatch.setattr(module, name, begin_another)
    save(2, tmp_path, layout=layout)
    for thread in begun:
        thread.join()
    assert begun and saved_in(tmp_path) == 2


# Forks a child for each sync. strace fails the fifth one of each process: those before the save
# are of no use.
SYNCS = """
import os, sys, warnings
sys.path += sys.argv[4].split(os.pathsep)
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
from test_dcp_faults import save
for which in range(1, int(sys.argv[3]) + 1):
    child = os.fork()
    if child == 0:
        directory = os.open(sys.argv[1], os.O_RDONLY)
        for _ in range(5 - which):
            os.fsync(directory)
        try:
            save(2, os.path.join(sys.argv[1], str(which)), layout=sys.argv[2])
        except BaseException as error:  # torch's is no Exception
            print(which, "Input/output error" in str(error), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.parametrize("layout, syncs", [("torch", 4), ("huggingface", 5)])
def test_every_sync_that_fails_fails_the_save(tmp_path, layout, syncs):
    """Those of the data, the header (of safetensors), the folder, the metadata or the index, and of
    the folder again."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    folders = [tmp_path / str(which + 1) for which in range(syncs)]
    for folder in folders:
        save(1, folder, layout=layout)
    strace = ["strace", "-f", "-qq", "-o", os.devnull, "-e", "trace=fsync,fdatasync"]
    inject = ["-e", "inject=fsync,fdatasync:error=EIO:when=5"]
    done = subprocess.run(
        [*strace, *inject, sys.executable, "-c", SYNCS, tmp_path, layout, str(syncs), FOLDERS],
        capture_output=True,
        text=True,
        timeout=200,
    )
    if "PTRACE" in done.stderr:
        pytest.skip("strace is not allowed here")
    expected = "".join(f"{which + 1} True\n" for which in range(syncs))
    assert done.stdout == expected, done.stderr
    assert [saved_in(folder) for folder in folders[:-1]] == [1] * (syncs - 1)
    # The new metadata have their name; whether they keep it is up to the drive.
    assert saved_in(folders[-1]) == 2
    assert len(names_in(folders[-1])) == 3  # so the data of both are there
    for folder in folders:
        save(3, folder, layout=layout)
        assert saved_in(folder) == 3
        assert len(names_in(folder)) == 2
