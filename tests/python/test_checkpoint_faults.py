"""Damaged files, full drives, kills, Ctrl-C and failing syncs under tensorferry.checkpoint."""

import errno
import os
import pickle
import random
import shutil
import struct
import subprocess
import sys
import zipfile

import pytest

torch = pytest.importorskip("torch")

from drives import loop_mount, memory_mount
from programs import check_python, run_python, runs
from tensorferry import checkpoint

OLD = torch.arange(100_000)


def names_in(folder):
    return sorted(name for name in os.listdir(folder) if name != "lost+found")


def assert_only_the_old_one(file):
    assert names_in(file.parent) == [file.name]
    assert torch.equal(checkpoint.load(file), OLD)


# Damaged files


@pytest.fixture
def saved(tmp_path):
    """A file, its bytes, and (record, offset, size) of each storage."""
    file = tmp_path / "model.pt"
    torch.manual_seed(3)
    tensors = {str(i): torch.randn(count) for i, count in enumerate([1, 70, 5000, 5 << 20, 9])}
    checkpoint.save(tensors, file)
    data = file.read_bytes()
    with zipfile.ZipFile(file) as archive:
        storages = []
        for info in archive.infolist():
            name_bytes, extra_bytes = struct.unpack_from("<HH", data, info.header_offset + 26)
            begin = info.header_offset + 30 + name_bytes + extra_bytes
            if "/data/" in info.filename:
                storages.append((info.filename, begin, info.file_size))
    return file, data, storages


def flip(file, data, offset, bit=0):
    changed = bytearray(data[offset : offset + 1])
    changed[0] ^= 1 << bit
    with open(file, "r+b") as out:
        out.seek(offset)
        out.write(changed)


def test_a_flipped_bit_in_a_storage_is_reported_with_its_record(saved):
    file, data, storages = saved
    rng = random.Random(5)
    for name, begin, size in storages:
        for offset in [
            begin,
            begin + size - 1,
            *(rng.randrange(begin, begin + size) for _ in "ab"),
        ]:
            flip(file, data, offset, rng.randrange(8))
            with pytest.raises(OSError, match=name) as caught:
                checkpoint.load(file)
            assert caught.value.errno == errno.EBADMSG
            assert caught.value.filename == str(file)
            assert (caught.value.offset, caught.value.length) == (begin, size)
            assert "checksum" in caught.value.hint and caught.value.operation == "load"
            checkpoint.load(file, verify=False)
            file.write_bytes(data)


def test_any_flipped_bit_raises_or_changes_nothing(saved):
    file, data, storages = saved
    before = checkpoint.load(file)
    ends = [begin + size for _, begin, size in storages]
    # Of the bytes outside storages: those in front of, between and behind them.
    outside = [
        *range(storages[0][1]),
        *(at for end in ends for at in range(end, min(end + 64, len(data)))),
        *range(ends[-1], len(data)),
    ]
    rng = random.Random(7)
    for offset in rng.sample(outside, runs(300)) if len(outside) > runs(300) else outside:
        flip(file, data, offset, rng.randrange(8))
        try:
            after = checkpoint.load(file)
        except Exception as error:
            assert not isinstance(error, (MemoryError, AssertionError)), offset
        else:
            assert after.keys() == before.keys(), offset
            assert all(torch.equal(after[key], before[key]) for key in before), offset
        with open(file, "r+b") as out:
            out.seek(offset)
            out.write(data[offset : offset + 1])


def test_a_file_that_is_cut_off_is_an_error(saved):
    file, data, storages = saved
    for size in [0, 3, 4, 30, 1000, storages[3][1] + 5, len(data) - 70, len(data) - 1]:
        file.write_bytes(data[:size])
        with pytest.raises((OSError, EOFError, RuntimeError, pickle.UnpicklingError)):
            checkpoint.load(file)


@pytest.mark.parametrize("field", ["size", "offset", "count", "directory"])
def test_a_directory_that_lies_is_an_error(saved, field):
    file, data, _ = saved
    changed = bytearray(data)
    end = data.rfind(b"PK\6\6")
    (directory,) = struct.unpack_from("<Q", data, end + 48)
    entry = data.find(b"model/data/3", directory) - 46
    if field == "size":
        struct.pack_into("<II", changed, entry + 20, 0xFFFFFFF0, 0xFFFFFFF0)
    elif field == "offset":
        struct.pack_into("<I", changed, entry + 42, 0xFFFFFFF0)
    elif field == "count":
        struct.pack_into("<QQ", changed, end + 24, 1 << 60, 1 << 60)
    else:
        struct.pack_into("<QQ", changed, end + 40, 1 << 62, 1 << 62)
    file.write_bytes(changed)
    with pytest.raises(OSError) as caught:
        checkpoint.load(file)
    assert caught.value.errno == errno.EBADMSG


def test_records_that_overlap_never_pass_for_each_other(saved):
    """The directory says that one storage is where another is."""
    file, data, _ = saved
    changed = bytearray(data)
    (directory,) = struct.unpack_from("<Q", data, data.rfind(b"PK\6\6") + 48)
    entries = [data.find(b"model/data/%d" % i, directory) - 46 for i in (1, 2)]
    changed[entries[0] + 42 : entries[0] + 46] = data[entries[1] + 42 : entries[1] + 46]
    file.write_bytes(changed)
    with pytest.raises(OSError, match="model/data/1"):
        checkpoint.load(file)


# Saves that do not end


class CannotBePickled:
    def __reduce__(self):
        raise ValueError("no")


def test_an_object_that_cannot_be_pickled_leaves_the_old_file(tmp_path):
    file = tmp_path / "model.pt"
    checkpoint.save(OLD, file)
    with pytest.raises(ValueError, match="no"):
        checkpoint.save([torch.ones(5), CannotBePickled()], file)
    assert_only_the_old_one(file)
    checkpoint.save(OLD, file)  # torch writes data again


def test_progress_that_raises_ends_the_save(tmp_path):
    file = tmp_path / "model.pt"
    checkpoint.save(OLD, file)

    def stop(done, total):
        raise InterruptedError("enough")

    with pytest.raises(InterruptedError):
        checkpoint.save(torch.ones(10 << 20), file, progress=stop)
    assert_only_the_old_one(file)


@pytest.mark.parametrize("mount", [memory_mount, loop_mount])
def test_a_full_drive_leaves_the_old_file_and_works_again(tmp_path, mount):
    with mount(tmp_path, size="48M") as point:
        file = point / "model.pt"
        checkpoint.save(OLD, file)
        filler = point / "filler"
        with open(filler, "wb") as out:
            free = os.statvfs(point).f_bfree * os.statvfs(point).f_frsize
            out.write(bytes(max(0, free - (5 << 20))))
        for size in range(5 << 20, (6 << 20) + 1, 256 << 10):
            with pytest.raises(OSError) as caught:
                checkpoint.save(torch.ones(size, dtype=torch.uint8), file)
            assert caught.value.errno == errno.ENOSPC
            assert names_in(point) == ["filler", "model.pt"]
            assert torch.equal(checkpoint.load(file), OLD)
        filler.unlink()
        checkpoint.save(torch.ones(6 << 20, dtype=torch.uint8), file)
        assert checkpoint.load(file).sum() == 6 << 20


# Forks children that save for ever and kills each at some moment: Python starts once.
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
        while True:
            step += 1
            checkpoint.save([torch.full((1 << 20,), step), torch.arange(step)], file)
            os.write(outer, b"%d\\n" % step)
    os.close(outer)
    time.sleep(rng.uniform(0, 0.3))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    told = os.read(inner, 1 << 16).split()
    os.close(inner)
    acknowledged = int(told[-1]) if told else step
    if not os.path.exists(file):
        assert not told
        continue
    values, count = checkpoint.load(file)
    step = int(values[0])
    assert step in (acknowledged, acknowledged + 1), (step, acknowledged)
    assert torch.equal(values, torch.full((1 << 20,), step)) and len(count) == step
    seen.add(len(os.listdir(os.path.dirname(file))))
assert step > 0
print(max(seen))
"""


def test_a_kill_at_any_moment_leaves_the_old_file_or_the_new_one(tmp_path):
    file = tmp_path / "model.pt"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    check_python(KILLER, file, runs(20), TMPDIR=str(scratch))
    shutil.rmtree(scratch)  # a kill in the first moment of a save leaves an empty folder here
    checkpoint.save(OLD, file)
    assert_only_the_old_one(file)  # the hidden files of those that were killed are gone


def test_processes_that_save_to_one_name_do_not_disturb_each_other(tmp_path):
    file = tmp_path / "model.pt"
    check_python(
        """
        import os, sys, torch
        from tensorferry import checkpoint
        torch.set_num_threads(1)  # OpenMP does not survive a fork
        children = []
        for number in range(3):
            child = os.fork()
            if child == 0:
                for _ in range(40):
                    checkpoint.save(torch.full((1000,), number), sys.argv[1])
                os._exit(0)
            children.append(child)
        for child in children:
            assert os.waitpid(child, 0)[1] == 0
        values = checkpoint.load(sys.argv[1])
        assert (values == values[0]).all()
        """,
        file,
    )
    assert names_in(tmp_path) == ["model.pt"]


def test_ctrl_c_leaves_the_old_file(tmp_path):
    file = tmp_path / "model.pt"
    checkpoint.save(OLD, file)
    for windows in (1, 3):
        done = run_python(
            """
            import os, signal, sys, torch, tensorferry.checkpoint as checkpoint
            reports = []
            def report(done, total):
                reports.append(done)
                if len(reports) == int(sys.argv[2]):
                    os.kill(os.getpid(), signal.SIGINT)
            import tensorferry._progress as progress
            progress._INTERVAL_SECONDS = 0
            try:
                checkpoint.save(torch.ones(40 << 20), sys.argv[1], progress=report)
            except KeyboardInterrupt:
                print("interrupted")
            """,
            file,
            windows,
        )
        assert done.stdout == "interrupted\n", done.stderr
        assert_only_the_old_one(file)


@pytest.mark.parametrize("which", [1, 2])
def test_a_sync_that_fails_fails_the_save(tmp_path, which):
    """The first sync is that of the file, the second that of its directory."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    folder = tmp_path / "folder"
    folder.mkdir()
    file = folder / "model.pt"
    checkpoint.save(OLD, file)
    program = (
        "import sys, torch, tensorferry.checkpoint as checkpoint\n"
        "try:\n    checkpoint.save(torch.ones(1 << 20), sys.argv[1])\n"
        "except OSError as error:\n    print(error.errno)\n"
    )
    inject = f"inject=fsync,fdatasync:error=EIO:when={which}"
    strace = ["strace", "-f", "-qq", "-o", tmp_path / "calls", "-e", "trace=fsync,fdatasync"]
    done = subprocess.run(
        [*strace, "-e", inject, sys.executable, "-c", program, file],
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "PTRACE" in done.stderr:
        pytest.skip("strace is not allowed here")
    assert done.stdout == f"{errno.EIO}\n", done.stderr
    if which == 1:
        assert_only_the_old_one(file)
    else:
        assert names_in(folder) == [file.name]
        assert torch.equal(checkpoint.load(file), torch.ones(1 << 20))
