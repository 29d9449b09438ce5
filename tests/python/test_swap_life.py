"""A SwapSpace that is short of room, on drives that are full or fail, beside other runs, and at its
end."""

import errno
import gc
import logging
import os
import random
import subprocess
import sys
import threading
import time

import pytest
from drives import failing_drive, loop_mount, memory_mount, overbooked_drive
from in_threads import in_threads
from programs import check_python, runs
from swapping import SLOW, MiB, got
from tensorferry import SwapSpace

# --- waiting ---


def test_take_waits_for_others_to_let_go(tmp_path):
    with SwapSpace(tmp_path, buffer_bytes=MiB) as space:
        held = [space.take(MiB)]
        taken = []
        thread = threading.Thread(target=lambda: taken.append(space.take(MiB)))
        thread.start()
        while space.stats()["waits"] == 0:
            time.sleep(0.001)
        assert not taken
        held.clear()
        thread.join()
        assert taken
        with pytest.raises(TimeoutError):
            space.take(1, timeout=0.01)


def test_take_gives_up_when_an_operation_is_done(tmp_path):
    with SwapSpace(tmp_path, buffer_bytes=MiB, **SLOW) as space:
        held = space.take(MiB)
        put = space.put("key", bytes(4 * MiB))
        with pytest.raises(TimeoutError, match="buffers"):
            space.take(1, timeout=60, until=put)
        assert put.done()
        with pytest.raises(TimeoutError):
            space.take(1, until=put)
        del held
        assert len(space.take(MiB, until=put)) == MiB
        with pytest.raises(TypeError):
            space.take(1, until="key")


def test_take_waits_for_writes(tmp_path):
    with SwapSpace(tmp_path, buffer_bytes=MiB, **SLOW) as space:
        for i in range(20):
            buffer = space.take(MiB)
            memoryview(buffer)[:] = bytes([i]) * MiB
            space.put(str(i), buffer)
            del buffer
        for i in range(20):
            buffer, operation = space.fetch(str(i))
            operation.wait()
            assert bytes(buffer) == bytes([i]) * MiB
            del buffer, operation


@pytest.mark.parametrize("call", ["take(1)", "fetch('key')", "take(1, timeout=1000)"])
def test_ctrl_c_ends_a_wait_for_room(tmp_path, call):
    check_python(
        f"""
        import os, signal, sys, threading, time
        from tensorferry import SwapSpace
        space = SwapSpace(sys.argv[1], buffer_bytes=1 << 20)
        space.put("key", b"data").wait()
        held = space.take(1 << 20)
        def press():
            while space.stats()["waits"] == 0:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=press).start()
        try:
            space.{call}
        except KeyboardInterrupt:
            pass
        else:
            raise SystemExit("no KeyboardInterrupt")
        del held
        assert len(space.take(1 << 20)) == 1 << 20
        """,
        tmp_path,
    )


def test_close_ends_those_who_wait_for_room(tmp_path):
    space = SwapSpace(tmp_path, buffer_bytes=MiB)
    held = space.take(MiB)
    errors = []

    def wait():
        try:
            space.take(1)
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    while space.stats()["waits"] < 3:
        time.sleep(0.001)
    space.close()
    for thread in threads:
        thread.join()
    assert len(errors) == 3 and len(held) == MiB


def test_many_threads_share_a_space(space):
    def work(number):
        for i in range(30):
            data = bytes([number * 30 + i]) * (40_000 + i)
            buffer = space.take(len(data))
            memoryview(buffer)[:] = data
            space.put(f"{number}", buffer)
            space.put("shared", buffer)
            del buffer
            back, operation = space.fetch(f"{number}")
            operation.wait()
            assert bytes(back) == data
            del back, operation
            shared = got(space, "shared", 0, 40_000)
            assert len(set(shared)) == 1

    in_threads(6, work)


# --- the drive ---


@pytest.mark.parametrize("kind", ["ext4", "tmpfs"])
def test_a_full_drive_says_how_much_and_loses_nothing(tmp_path, kind):
    mounted = loop_mount(tmp_path, size="64M") if kind == "ext4" else memory_mount(tmp_path, "48M")
    with mounted as point, SwapSpace(point, buffer_bytes=MiB) as space:
        stored = {}
        with pytest.raises(OSError, match=rf"needed {3 * MiB} bytes, free \d+") as caught:
            for i in range(100):
                data = random.Random(i).randbytes(3 * MiB)
                space.put(str(i), data)
                stored[str(i)] = data
        assert caught.value.errno == errno.ENOSPC
        assert len(stored) >= 8
        with pytest.raises(OSError, match="needed"):
            space.put("0", bytes(3 * MiB))
        with pytest.raises(OSError, match="needed"):
            space.reserve(100 * MiB)
        for key, data in stored.items():
            assert got(space, key) == data
        space.drop("0")
        space.put("1", b"\7" * (3 * MiB)).wait()  # the room of the one that went
        assert got(space, "1") == b"\7" * (3 * MiB)
        assert got(space, "2") == stored["2"]


def test_a_drive_that_fails_says_so_and_is_used_again(tmp_path):
    with failing_drive(tmp_path) as drive, SwapSpace(drive.point, buffer_bytes=40 * MiB) as space:
        space.reserve(64 * MiB)
        space.put("key", b"\1" * (32 * MiB)).wait()
        drive.lose()
        with pytest.raises(OSError) as caught:
            got(space, "key")
        assert caught.value.errno == errno.EIO
        assert space.prefetch("key")
        with pytest.raises(OSError):
            space.fetch("key")[1].wait()
        space.put("key", b"\3" * (32 * MiB)).wait()
        assert got(space, "key") == b"\3" * (32 * MiB)


def test_a_drive_that_ends_leaves_the_process_alive(tmp_path):
    with failing_drive(tmp_path) as drive:
        space = SwapSpace(drive.point, buffer_bytes=MiB)
        space.put("key", b"\1" * (8 * MiB)).wait()
        drive.end()
        operation = space.put("key", b"\2" * (8 * MiB))
        with pytest.raises(OSError) as caught:
            operation.wait()
        assert caught.value.errno == errno.EIO
        assert space.size("key") == 8 * MiB  # it is what it was
        with pytest.raises(OSError):
            got(space, "key")
        space.close()


def test_a_failed_write_that_nobody_asked_about_is_raised_by_close(tmp_path):
    with failing_drive(tmp_path) as drive:
        space = SwapSpace(drive.point, buffer_bytes=MiB)
        space.reserve(64 * MiB)
        drive.end()
        space.put("key", bytes(32 * MiB))
        with pytest.raises(OSError) as caught:
            space.close()
        assert caught.value.errno == errno.EIO
        assert space.closed


# --- other runs ---

HOLDING = """
import sys, time
from tensorferry import SwapSpace
space = SwapSpace(sys.argv[1], buffer_bytes=1 << 20, run=sys.argv[2])
space.put("key", bytes(8 << 20)).wait()
print(*space.directories, flush=True)
time.sleep(1000)
"""


def hold(directory, run=""):
    """Another process that swaps there, and its own directory."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDING, str(directory), run], stdout=subprocess.PIPE, text=True
    )
    return process, process.stdout.readline().strip()


def end(process):
    process.kill()
    process.wait()
    process.stdout.close()


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path, caplog):
    process, left = hold(tmp_path)
    end(process)
    assert os.path.exists(f"{left}/tensors")
    with caplog.at_level(logging.WARNING, "tensorferry"), SwapSpace(tmp_path) as space:
        assert not os.path.exists(left)
        assert any("ended runs" in note for note in space.notes)
        assert "removed the files of 1 ended runs" in caplog.text


def test_another_live_run_is_noted_and_left_alone(tmp_path, caplog):
    process, own = hold(tmp_path, "their")
    try:
        with caplog.at_level(logging.WARNING, "tensorferry"):
            with SwapSpace(tmp_path, buffer_bytes=MiB) as space:
                assert f"process {process.pid} run their" in caplog.text
                assert any("another live run" in note for note in space.notes)
            caplog.clear()
            with SwapSpace(tmp_path, buffer_bytes=MiB, run="their", rank=1) as space:
                assert space.notes == [] and caplog.text == ""  # ranks of one run are no strangers
            with SwapSpace(tmp_path, buffer_bytes=MiB) as one, SwapSpace(tmp_path) as two:
                assert one.directories != two.directories
                assert str(os.getpid()) not in str(two.notes)
        assert os.path.exists(f"{own}/tensors")
    finally:
        end(process)


def test_a_directory_in_memory_is_noted(tmp_path, caplog):
    with memory_mount(tmp_path, "48M") as point:
        with caplog.at_level(logging.WARNING, "tensorferry"):
            with SwapSpace(point, buffer_bytes=MiB) as space:
                assert "in memory" in caplog.text and "in memory" in space.notes[0]
                space.put("key", b"data").wait()
                assert got(space, "key") == b"data"


# --- the end ---

LEAVING = {
    "return": "pass",
    "sys.exit": "sys.exit(0)",
    "in a global": "import builtins; builtins.kept = (space, held)",
    "in a cycle": "cycle = [space, held]; cycle.append(cycle)",
    "threads that wait for room": """
def quietly():
    try:
        space.take(1 << 20)
    except OSError:
        pass
rest = []
try:
    while True:
        rest.append(space.take(1 << 20, 0))
except TimeoutError:
    pass
for _ in range(3):
    threading.Thread(target=quietly, daemon=True).start()
while space.stats()["waits"] < 3:
    time.sleep(0)
""",
}


@pytest.mark.parametrize("way", LEAVING)
def test_the_interpreter_ends_with_writes_in_flight(tmp_path, way):
    for _ in range(runs(4)):
        check_python(
            f"""
import sys, threading, time
from tensorferry import SwapSpace
space = SwapSpace(sys.argv[1], buffer_bytes=8 << 20, queue_depth=1, block_bytes=4096, workers=1)
held = space.take(4 << 20)
space.put("buffer", held)
space.put("bytes", bytearray(64 << 20))
space.put("bytes", bytearray(64 << 20))
{LEAVING[way]}
""",
            tmp_path,
            timeout=60,
        )
        if "threads" not in way:  # those may be inside for a moment longer than the process lives
            assert os.listdir(next(tmp_path.iterdir())) == []


def test_fork_leaves_the_space_to_the_parent(tmp_path):
    check_python(
        """
        import os, sys, warnings
        warnings.simplefilter("ignore")
        from tensorferry import SwapSpace
        space = SwapSpace(sys.argv[1], buffer_bytes=1 << 20, block_bytes=65536)
        for i in range(10):
            data = os.urandom(8 << 20)
            operation = space.put("key", data)
            child = os.fork()
            if child == 0:
                for call in (lambda: space.put("key", b""), lambda: space.fetch("key"),
                             lambda: space.drop("key"), lambda: space.take(1)):
                    try:
                        call()
                    except OSError as error:
                        assert "parent" in str(error), error
                    else:
                        os._exit(2)
                with SwapSpace(sys.argv[1], buffer_bytes=1 << 20) as own:
                    own.put("key", b"child").wait()
                    back = bytearray(5)
                    own.get("key", back).wait()
                    assert back == b"child"
                del space, operation
                sys.exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            operation.wait()
            back = bytearray(len(data))
            space.get("key", back).wait()
            assert back == data
        """,
        tmp_path,
    )


def test_a_view_never_has_what_could_not_be_written(tmp_path):
    """It shows the old bytes only once the failure is known."""
    old, new = b"1" * (16 * MiB), b"2" * (16 * MiB)
    with overbooked_drive(tmp_path) as (drive, fill), SwapSpace(drive, buffer_bytes=MiB) as space:
        space.put("key", old).wait()
        fill()
        for _ in range(5):
            operation = space.put("key", new)
            try:
                seen = bytes(space.view([("key", 0, len(new))]))
            except OSError as error:
                assert error.errno == errno.EIO
            else:
                assert operation.done() and seen == old
            with pytest.raises(OSError):
                operation.wait()


def test_a_space_is_collected_with_its_files(tmp_path):
    space = SwapSpace(tmp_path, buffer_bytes=MiB)
    directory = space.directories[0]
    space.put("key", bytes(4 * MiB))
    del space
    gc.collect()
    assert not os.path.exists(directory)


def test_an_exception_in_a_with_block_ends_it_at_once(tmp_path):
    with pytest.raises(KeyError), SwapSpace(tmp_path, buffer_bytes=MiB, **SLOW) as space:
        operation = space.put("key", bytes(64 * MiB))
        raise KeyError
    assert space.closed and operation.done()
    assert os.listdir(next(tmp_path.iterdir())) == []
