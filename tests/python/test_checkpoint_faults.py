"""Damage, full drives, power cuts, kills, Ctrl-C and failing syncs under tensorferry.checkpoint."""

import contextlib
import errno
import os
import pickle
import random
import shutil
import struct
import subprocess
import sys
import textwrap
import threading
import time
import zipfile

import pytest

torch = pytest.importorskip("torch")

from drives import loop_mount, memory_mount, power_cut_drive
from programs import check_python, run_python, runs
from tensorferry import checkpoint
from warm_python import WARM_PYTHON

OLD = torch.arange(100_000)


def names_in(folder):
    return sorted(name for name in os.listdir(folder) if name != "lost+found")


def assert_only_the_old_one(file):
    assert names_in(file.parent) == [file.name]
    assert torch.equal(checkpoint.load(file), OLD)


# Damaged files


def storages_in(file):
    """(record, offset, size) of each storage."""
    data = file.read_bytes()
    storages = []
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            name_bytes, extra_bytes = struct.unpack_from("<HH", data, info.header_offset + 26)
            begin = info.header_offset + 30 + name_bytes + extra_bytes
            if "/data/" in info.filename:
                storages.append((info.filename, begin, info.file_size))
    return storages


@pytest.fixture
def saved(tmp_path):
    """A file, its bytes, and (record, offset, size) of each storage."""
    file = tmp_path / "model.pt"
    torch.manual_seed(3)
    tensors = {str(i): torch.randn(count) for i, count in enumerate([1, 70, 5000, 5 << 20, 9])}
    checkpoint.save(tensors, file)
    return file, file.read_bytes(), storages_in(file)


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


@pytest.fixture
def saved_small(tmp_path):
    """The same of a file that loads in no time."""
    file = tmp_path / "model.pt"
    tensors = {str(i): torch.randn(count) for i, count in enumerate((1, 70, 5000, 12_345, 9, 300))}
    checkpoint.save(tensors, file)
    return file, file.read_bytes(), storages_in(file)


def test_every_one_of_many_flipped_bits_in_tensors_is_reported_with_its_record(saved_small):
    file, data, storages = saved_small
    rng = random.Random(13)
    for _ in range(runs(500)):
        name, begin, size = rng.choice(storages)
        offset = rng.randrange(begin, begin + size)
        flip(file, data, offset, rng.randrange(8))
        with pytest.raises(OSError, match=f"{name} ") as caught:
            checkpoint.load(file)
        assert caught.value.errno == errno.EBADMSG
        assert (caught.value.offset, caught.value.length) == (begin, size)
        with open(file, "r+b") as out:
            out.seek(offset)
            out.write(data[offset : offset + 1])


def test_any_flipped_bit_raises_or_changes_nothing(saved_small):
    file, data, storages = saved_small
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


def test_a_drive_full_at_every_4_kib_of_a_save_leaves_the_old_file_alone(tmp_path):
    with memory_mount(tmp_path, size="10M") as point:
        file, filler = point / "model.pt", point / "filler"
        old = [torch.full((1 << 19,), 1), torch.ones(77)]
        new = [torch.full(((1 << 19) - 10_000,), 2), torch.ones(77)]
        checkpoint.save(old, file)
        before = file.stat()
        full = 0
        with open(filler, "wb") as taken:
            space = os.statvfs(point).f_bfree * os.statvfs(point).f_frsize
            os.posix_fallocate(taken.fileno(), 0, space)
            for free in range(0, (4 << 20) + 1, 4096):
                taken.truncate(space - free)
                try:
                    checkpoint.save(new, file)
                except OSError as error:
                    assert error.errno == errno.ENOSPC, free
                else:
                    break  # from here on there is space enough
                full += 1
                assert names_in(point) == ["filler", "model.pt"], free
                now = file.stat()
                assert (now.st_ino, now.st_mtime_ns) == (before.st_ino, before.st_mtime_ns), free
                if full % 100 == 0:
                    assert torch.equal(checkpoint.load(file)[0], old[0])
        assert full > 900
        filler.unlink()
        checkpoint.save(new, file)
        assert torch.equal(checkpoint.load(file)[0], new[0])
        assert names_in(point) == ["model.pt"]


def test_after_a_power_cut_the_old_file_or_the_new_one_is_whole(tmp_path):
    def tensors(version):
        return [torch.full((100_000,), version), torch.arange(version)]

    def usual_seconds(file):
        begin = time.monotonic()
        checkpoint.save(tensors(1), file)
        return time.monotonic() - begin

    def version_in(file):
        values, count = checkpoint.load(file)
        version = int(values[0])
        assert all(torch.equal(a, b) for a, b in zip((values, count), tensors(version)))
        return version

    rng = random.Random(17)
    version = 1
    known_ones = cut_ones = 0
    with power_cut_drive(tmp_path) as drive:
        file = drive.point / "model.pt"
        usual = max(0.001, min(usual_seconds(file) for _ in range(5)))
        for round_number in range(runs(100)):
            saved = []

            def save(version=version, saved=saved):
                with contextlib.suppress(OSError):
                    checkpoint.save(tensors(version + 1), file)
                    saved.append(version + 1)

            saver = threading.Thread(target=save)
            saver.start()
            time.sleep(rng.uniform(0, 2 * usual))
            known = bool(saved)
            drive.cut("flushed" if round_number % 3 == 0 else "lost")
            saver.join()
            drive.again()
            found = version_in(file)
            assert found in (version, version + 1), round_number
            assert not known or found == version + 1, f"{round_number}: a save was lost"
            known_ones += known
            cut_ones += found == version
            version = found
        assert known_ones > 0, "no save ended before the cut"
        assert cut_ones > 0, "no save was cut"
        checkpoint.save(tensors(version + 1), file)
        assert names_in(drive.point) == ["model.pt"]


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
    time.sleep(rng.uniform(0, 0.15))
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
    seen.add(sum(name.startswith(".") for name in os.listdir(os.path.dirname(file))))
assert step > 0, "no save ended before the kill"
assert max(seen) == 1, "no save was killed"
"""


def test_a_kill_at_any_moment_leaves_the_old_file_or_the_new_one(tmp_path):
    file = tmp_path / "model.pt"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    check_python(KILLER, file, runs(70), python=WARM_PYTHON, TMPDIR=str(scratch))
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
        python=WARM_PYTHON,
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
            python=WARM_PYTHON,
        )
        assert done.stdout == "interrupted\n", done.stderr
        assert_only_the_old_one(file)


def test_every_sync_that_fails_fails_the_save(tmp_path):
    """A save syncs the file and then its directory. The first sync fails, and the third: that of
    the file in the first save, that of the directory in the second."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    folder = tmp_path / "folder"
    folder.mkdir()
    file = folder / "model.pt"
    checkpoint.save(OLD, file)
    program = """
        import os, sys, torch, tensorferry.checkpoint as checkpoint
        for number in (1, 2, 3):
            try:
                checkpoint.save(torch.full((100_000,), number), sys.argv[1])
                print("saved", end=" ")
            except OSError as error:
                print(error.errno, end=" ")
            print(int(checkpoint.load(sys.argv[1])[7]), *os.listdir(os.path.dirname(sys.argv[1])))
    """
    calls = tmp_path / "calls"
    strace = ["strace", "-f", "-qq", "-o", calls, "-e", "trace=fsync,fdatasync"]
    inject = ["-e", "inject=fsync,fdatasync:error=EIO:when=1..3+2"]
    done = subprocess.run(
        [*strace, *inject, sys.executable, "-c", textwrap.dedent(program), file],
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "PTRACE" in done.stderr:
        pytest.skip("strace is not allowed here")
    assert done.stdout.splitlines() == [
        f"{errno.EIO} {int(OLD[7])} model.pt",  # the old file, and nothing else
        f"{errno.EIO} 2 model.pt",  # it has its name already; a power cut may take that back
        "saved 3 model.pt",
    ], done.stderr
    assert len(calls.read_text().splitlines()) == 5, "a failed sync is not repeated"
