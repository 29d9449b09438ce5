"""A handle that ends finishes its writes, however it ends; Ctrl-C and cancel_all() give them up."""

import errno
import logging
import os

import pytest
from programs import check_python, run_python
from tensorferry import Handle

MiB = 1 << 20

# One request of 4 KiB after the other: tens of thousands of them, a second or more.
SLOWLY = "engine='threads', workers=1, queue_depth=1, block_bytes=4096"

BEGIN = f"""
import os, signal, sys, threading, time, tensorferry
data = os.urandom(1 << 20) * 32
path = sys.argv[1]
handle = tensorferry.Handle({SLOWLY})
def press(after):
    timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT))
    timer.daemon = True                # the end of the interpreter waits for others
    timer.start()
def is_whole():
    with open(path, "rb") as file:
        return file.read() == data
"""

WAYS = {
    "close": "handle.write(data, path); handle.close(); assert is_whole()",
    "with": """
with handle:
    handle.write(data, path)
assert is_whole()
""",
    "an exception leaves with": """
try:
    with handle:
        handle.write(data, path)
        raise KeyError
except KeyError:
    assert is_whole()
else:
    raise SystemExit("the exception is gone")
""",
    "del": "handle.write(data, path); del handle; assert is_whole()",
    "in a cycle": """
import gc
cycle = [handle]; cycle.append(cycle)
handle.write(data, path); del handle, cycle; gc.collect(); assert is_whole()
""",
    "a function returns": """
def save():
    tensorferry.Handle().write(data, path, durability="data")
save()
assert is_whole()
""",
    "another thread ends it": """
handle.write(data, path)
thread = threading.Thread(target=handle.close)
thread.start(); thread.join()
assert is_whole()
""",
    "aio_handle": """
from tensorferry.aio import aio_handle
import numpy
handle = aio_handle(4096, 1)
handle.async_pwrite(numpy.frombuffer(data, dtype="uint8"), path)
del handle
assert is_whole()
""",
}


@pytest.mark.parametrize("way", WAYS)
def test_writes_are_finished(tmp_path, way):
    check_python(BEGIN + WAYS[way], tmp_path / "data")


EXITS = {
    "return": "",
    "sys.exit": "sys.exit(0)",
    "an exception": "raise KeyError",
    "in a global": "import builtins; builtins.kept = handle",
    "after Ctrl-C": "press(0); time.sleep(60)",
}


@pytest.mark.parametrize("way", EXITS)
def test_the_interpreter_ends_after_the_writes(tmp_path, way):
    path = tmp_path / "data"
    program = BEGIN.replace("os.urandom(1 << 20) * 32", "b'tensorferry' * (3 << 20)")
    run_python(program + "handle.write(data, path)\n" + EXITS[way], path)
    assert path.read_bytes() == b"tensorferry" * (3 << 20)


def test_reads_are_finished_by_close_and_cancelled_by_an_exception(tmp_path, caplog):
    path = tmp_path / "data"
    path.write_bytes(b"a" * 64 * MiB)
    buffer = bytearray(64 * MiB)
    with Handle(queue_depth=1, block_bytes=4096, workers=1) as handle:
        handle.read(buffer, path)
    assert buffer == b"a" * len(buffer)
    with caplog.at_level(logging.WARNING, "tensorferry"), pytest.raises(KeyError):
        with Handle(queue_depth=1, block_bytes=4096, workers=1) as handle:
            operation = handle.read(buffer, path)
            raise KeyError
    assert operation.done() and operation.exception().errno == errno.ECANCELED
    assert "1 read was cancelled because its handle was ended" in caplog.text
    with caplog.at_level(logging.WARNING, "tensorferry"), pytest.raises(KeyError):
        with Handle(queue_depth=1, block_bytes=4096, workers=1) as handle:
            reads = [handle.read(bytearray(64 * MiB), path) for _ in range(2)]
            raise KeyError
    assert all(read.done() for read in reads)
    assert "2 reads were cancelled because their handle was ended" in caplog.text


def test_a_write_that_fails_while_the_handle_ends_is_logged(tmp_path, caplog):
    path = tmp_path / "data"
    path.write_bytes(b"")
    with caplog.at_level(logging.WARNING, "tensorferry"):
        handle = Handle()
        handle.write(bytearray(MiB), path, offset=(1 << 63) - 2 * MiB)  # EFBIG
        del handle
    assert str(path) in caplog.text and "failed" in caplog.text


SECOND_CTRL_C = {
    "leaving with": """
try:
    with handle:
        operation = handle.write(data, path)
        press(0.2)
        raise KeyboardInterrupt       # the first one
except KeyboardInterrupt:
    pass
assert operation.exception().errno == 125, operation   # ECANCELED
""",
    "after close was interrupted": """
operation = handle.write(data, path)
press(0.2)
try:
    handle.close()
except KeyboardInterrupt:
    pass
assert not operation.done()
press(0.2)
try:
    del handle
    while True:
        time.sleep(0.01)
except KeyboardInterrupt:
    pass
assert operation.exception().errno == 125, operation
""",
}


@pytest.mark.parametrize("way", SECOND_CTRL_C)
def test_a_second_ctrl_c_gives_writes_up_and_leaves_no_zeros(tmp_path, way):
    path = tmp_path / "data"
    check_python(BEGIN.replace("* 32", "* 512") + SECOND_CTRL_C[way], path)
    assert path.stat().st_size == 0


def test_a_second_ctrl_c_ends_the_interpreter(tmp_path):
    path = tmp_path / "data"
    done = run_python(
        BEGIN.replace("* 32", "* 512")
        + "handle.write(data, path)\npress(1.0)\nraise KeyboardInterrupt",
        path,
    )
    assert "KeyboardInterrupt" in done.stderr
    assert path.stat().st_size == 0


def test_close_that_was_interrupted_is_called_again(tmp_path):
    check_python(
        BEGIN
        + """
operation = handle.write(data, path)
press(0.1)
try:
    handle.close()
except KeyboardInterrupt:
    pass
else:
    assert operation.done()           # it was quicker
try:
    handle.write(data, path)
except OSError as error:
    assert "closed" in str(error)
handle.close()
assert operation.done() and operation.exception() is None and handle.closed
assert is_whole()
""",
        os.fspath(tmp_path / "data"),
    )


def test_cancel_all_gives_up_and_the_handle_stays_open(tmp_path):
    handle = Handle("threads", queue_depth=1, block_bytes=4096, workers=1)
    operations = [handle.write(bytearray(256 * MiB), tmp_path / str(i)) for i in range(2)]
    handle.cancel_all()
    for i, operation in enumerate(operations):
        with pytest.raises(OSError) as caught:
            operation.wait()
        assert caught.value.errno == errno.ECANCELED
        assert (tmp_path / str(i)).stat().st_size == 0
    handle.write_now(b"after", tmp_path / "after")
    handle.close()
    assert (tmp_path / "after").read_bytes() == b"after"


def test_a_limit_that_is_none_is_refused():
    for limit in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="close_limit_seconds"):
            Handle(close_limit_seconds=limit)
