"""Handle, File, PinnedBuffer and Operation, as a Python user sees them."""

import asyncio
import errno
import logging
import os
import resource
import threading
import time
from pathlib import Path

import pytest
import tensorferry
from in_threads import in_threads
from tensorferry import File, Handle, InvalidArgument, PinnedBuffer

MiB = 1 << 20


def pattern(size, seed=0):
    return bytes((i * 7 + (i >> 8) * 13 + seed) & 0xFF for i in range(min(size, 65536))) * (
        size // 65536 + 1
    )


def data(size, seed=0):
    return pattern(size, seed)[:size]


@pytest.mark.parametrize("size", [0, 1, 511, 4096, 4097, MiB, 5 * MiB + 3])
@pytest.mark.parametrize("offset", [0, 1, 4095, 8192])
def test_what_is_written_is_read(handle, path, size, offset):
    source = data(size)
    assert handle.write(source, path, offset).wait() == size
    target = bytearray(size)
    assert handle.read(target, path, offset).wait() == size
    assert target == source
    handle.write_now(source, path, offset + 5)
    handle.read_now(target, path, offset + 5)
    assert target == source
    with open(path, "rb") as file:
        file.seek(offset + 5)
        assert file.read() == source


def test_a_file_is_named_by_path_bytes_pathlike_file_and_descriptor(handle, tmp_path):
    place = tmp_path / "data.bin"
    handle.write_now(b"0123456789", place)
    part = bytearray(4)
    with File(place) as file, open(place, "rb") as plain:
        for name in (str(place), os.fsencode(place), place, file, plain.fileno()):
            part[:] = b"    "
            handle.read(part, name, 3).wait()
            assert part == b"3456"
    with pytest.raises(InvalidArgument, match="closed"):
        handle.read(part, file)
    with pytest.raises(TypeError):
        handle.read(part, 3.5)


def test_many_transfers_are_one_operation(handle, path):
    parts = [data(size, size) for size in range(0, 40_000, 997)]
    offsets = [sum(map(len, parts[:i])) for i in range(len(parts))]
    written = handle.write_many([(p, path, o) for p, o in zip(parts, offsets)])
    assert written.wait() == sum(map(len, parts))
    back = [bytearray(len(p)) for p in parts]
    with File(path) as file:
        handle.read_many((b, file, o) for b, o in zip(back, offsets)).wait()
    assert back == parts
    assert handle.read_many([]).wait() == 0
    with pytest.raises(InvalidArgument, match=r"\(buffer, file"):
        handle.read_many([(bytearray(1),)])


@pytest.mark.parametrize("kind", [str, os.fsencode, Path, "descriptor"])
def test_a_file_that_comes_often_is_opened_once(handle, path, kind):
    """However it is named: 500 descriptors would be too many, and overlaps are seen."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    file = descriptor if kind == "descriptor" else kind(path)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[0]), before[1]))
    try:
        handle.write_many([(data(100, i), file, 100 * i) for i in range(500)]).wait()
        back = [bytearray(100) for _ in range(500)]
        handle.read_many([(part, file, 100 * i) for i, part in enumerate(back)]).wait()
        assert back == [data(100, i) for i in range(500)]
        with pytest.raises(InvalidArgument, match="overlap"):
            handle.write_many([(b"one", file, 0), (b"two", file, 1)])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        os.close(descriptor)


def test_an_operation_tells_about_itself(handle, path):
    operation = handle.write(data(8 * MiB), path)
    assert operation.wait(timeout=60) == operation.result() == 8 * MiB
    assert operation.done()
    assert operation.exception() is None
    assert operation.bytes == 8 * MiB
    assert operation.seconds > 0
    assert operation.engine == handle.engine
    assert operation.engine_reason
    assert "done in" in repr(operation) and handle.engine in repr(operation)


def test_a_wait_that_takes_too_long_is_a_timeout_and_the_operation_goes_on(path):
    with Handle(queue_depth=1, block_bytes=4096, workers=1) as handle:
        operation = handle.write(bytes(64 * MiB), path)
        with pytest.raises(TimeoutError, match="goes on"):
            operation.wait(timeout=0)
        assert operation.wait(timeout=None) == 64 * MiB


def test_a_cancelled_operation_says_so(path):
    with Handle(queue_depth=1, block_bytes=4096, workers=1) as handle:
        operation = handle.write(bytes(256 * MiB), path)
        operation.cancel()
        with pytest.raises(OSError) as caught:
            operation.wait(timeout=60)
        assert caught.value.errno == errno.ECANCELED
        assert caught.value.filename == path
        assert operation.exception().errno == errno.ECANCELED
        assert handle.stats()["cancelled_operations"] == 1


def test_await(handle, path):
    async def main():
        assert await handle.write(data(3 * MiB), path) == 3 * MiB
        parts = [bytearray(MiB) for _ in range(3)]
        reads = [handle.read(part, path, i * MiB) for i, part in enumerate(parts)]
        assert await asyncio.gather(*map(asyncio.ensure_future, map(finish, reads))) == [MiB] * 3
        assert b"".join(parts) == data(3 * MiB)
        with pytest.raises(OSError) as caught:
            await handle.read(bytearray(2), path, 3 * MiB - 1)
        assert caught.value.errno == errno.ENODATA

    async def finish(operation):
        return await operation

    asyncio.run(main())


def test_a_task_that_is_cancelled_cancels_its_operation(path):
    async def main():
        with Handle(queue_depth=1, block_bytes=4096, workers=1) as handle:
            operation = handle.write(bytes(256 * MiB), path)

            async def work():
                await operation

            task = asyncio.ensure_future(work())
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(OSError) as caught:
                await operation
            assert caught.value.errno == errno.ECANCELED

    asyncio.run(main())


def test_callbacks_come_once_each_and_errors_in_them_are_logged(handle, path, caplog):
    called = []
    every = threading.Semaphore(0)

    def note(operation):
        assert operation.done()
        called.append(operation)
        every.release()

    operations = [handle.write(data(2 * MiB, i), path, i * 2 * MiB) for i in range(20)]
    for operation in operations:
        operation.add_done_callback(note)
    for _ in operations:
        assert every.acquire(timeout=60)
    assert sorted(map(id, called)) == sorted(map(id, operations))
    with caplog.at_level(logging.ERROR, "tensorferry"):
        operations[0].add_done_callback(lambda _: 1 / 0)  # done: at once, on this thread
    assert "ZeroDivisionError" in caplog.text


def test_leaving_the_with_block_waits_and_raises_what_nobody_saw(path):
    with Handle() as handle:
        handle.write(data(8 * MiB), path)
    with open(path, "rb") as file:
        assert file.read() == data(8 * MiB)
    assert handle.closed and "closed" in repr(handle)
    with pytest.raises(InvalidArgument, match="closed"):
        handle.read(bytearray(1), path)

    with pytest.raises(OSError, match="the file ends at offset"), Handle() as handle:
        handle.read(bytearray(2 * MiB), path, 7 * MiB)
    with Handle() as handle:  # seen, so not raised again
        operation = handle.read(bytearray(2 * MiB), path, 7 * MiB)
        with pytest.raises(OSError):
            operation.wait()
    with pytest.raises(KeyError):  # an exception on its way is not replaced
        with Handle() as handle:
            handle.read(bytearray(2 * MiB), path, 7 * MiB)
            raise KeyError


def test_a_failure_that_nobody_asked_about_is_logged(path, caplog):
    with open(path, "wb") as file:
        file.write(b"short")
    handle = Handle()
    with caplog.at_level(logging.WARNING, "tensorferry"):
        limit = time.monotonic() + 60
        while "nobody waited for" not in caplog.text and time.monotonic() < limit:
            handle.read(bytearray(10), path)
    assert "nobody waited for" in caplog.text
    with pytest.raises(OSError, match="ends at offset 5"):
        handle.close()


def test_durability_and_sync(handle, path):
    for durability in ("none", "data", "full"):
        handle.write(b"x" * 5000, path, 0, durability).wait()
        handle.write_now(b"x" * 5000, path, durability=durability)
    handle.sync(path).wait()
    handle.sync(path, "full").wait()
    with pytest.raises(FileNotFoundError):
        handle.sync(path + ".misspelt")
    assert not os.path.exists(path + ".misspelt")
    with pytest.raises(InvalidArgument, match="'none', 'data' or 'full'"):
        handle.write(b"x", path, durability="very")


def test_stats_count(handle, path):
    handle.write_now(data(3 * MiB), path)
    handle.read_now(bytearray(4096), path)
    stats = handle.stats()
    assert stats["written_bytes"] == 3 * MiB
    assert stats["read_bytes"] == 4096
    assert stats["operations"] == 2
    assert stats["inline_operations"] == 1
    assert "3145728 written" in repr(handle)


def test_engines_are_chosen_or_refused(path):
    with Handle() as handle:
        assert handle.engine in ("io_uring", "libaio", "threads")
        assert handle.engine_reason
    with pytest.raises(InvalidArgument, match="auto, io_uring, libaio, threads or gds"):
        Handle("floppy")


@pytest.mark.parametrize(
    "settings",
    [
        {"block_bytes": 0},
        {"block_bytes": -1},
        {"queue_depth": 0},
        {"queue_depth": 10**9},
        {"queue_depth": 10**30},
        {"workers": 0},
        {"workers": 10**6},
        {"submit": "often"},
        {"polling": "always"},
        {"engine": "threads", "polling": "submission"},
        {"slot_bytes": -5},
    ],
)
def test_settings_out_of_range_are_named(settings):
    with pytest.raises(InvalidArgument) as caught:
        Handle(**settings)
    assert next(iter(settings)) in str(caught.value)
    assert caught.value.errno == errno.EINVAL


def test_file_facts(path):
    with File(path, "read_write") as file, Handle() as handle:
        assert file.size == 0
        handle.write_now(data(10_000), file)
        assert file.size == 10_000
        assert file.path == path
        assert file.block_bytes >= 4096
        assert file.direct or file.direct_reason
        assert file.memory_alignment >= 1 and file.offset_alignment >= 1
        file.resize(100)
        assert os.path.getsize(path) == 100
        assert path in repr(file)
    assert file.closed and "closed" in repr(file)
    with pytest.raises(InvalidArgument):
        _ = file.size
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
    with pytest.raises(InvalidArgument, match="O_APPEND"):
        File.borrow(descriptor)
    os.close(descriptor)


def test_pinned_memory(handle, path):
    buffer = PinnedBuffer(MiB)
    assert len(buffer) == MiB and buffer.address % 4096 == 0
    assert buffer.locked or buffer.lock_reason
    assert tensorferry.is_pinned(buffer)
    view = memoryview(buffer)
    assert tensorferry.is_pinned(view[5:10])
    view[:] = data(MiB)
    handle.write(buffer, path).wait()
    view[:] = bytes(MiB)
    handle.read(view, path).wait()
    assert view == data(MiB)
    with pytest.raises(BufferError, match="views"):
        buffer.free()
    view.release()
    buffer.free()
    with pytest.raises(InvalidArgument, match="freed"):
        buffer.free()
    with pytest.raises(BufferError, match="freed"):
        memoryview(buffer)
    assert "freed" in repr(buffer)
    assert not tensorferry.is_pinned(bytearray(10))
    assert not tensorferry.is_pinned("text")


def test_pinned_memory_takes_a_numa_node(handle, path):
    nodes = [int(folder.name[4:]) for folder in Path("/sys/devices/system/node").glob("node*")]
    buffer = PinnedBuffer(MiB, numa_node=min(nodes, default=0))
    memoryview(buffer)[:] = data(MiB)
    handle.write(buffer, path).wait()
    assert Path(path).read_bytes() == data(MiB)
    assert "SYS_NICE" in buffer.numa_reason or not buffer.numa_reason
    for missing in (max(nodes, default=0) + 1, 1 << 40):
        with pytest.raises(InvalidArgument, match="no NUMA node"):
            PinnedBuffer(MiB, numa_node=missing)
    with pytest.raises(InvalidArgument, match="numa_node is -1"):
        PinnedBuffer(MiB, numa_node=-1)
    with pytest.raises(TypeError):
        PinnedBuffer(MiB, numa_node="0")


def test_pinned_memory_outlives_its_names(handle, path):
    operation = handle.write(PinnedBuffer(8 * MiB), path)
    assert operation.wait() == 8 * MiB
    view = memoryview(PinnedBuffer(100))
    view[:] = bytes(range(100))
    assert view.tolist() == list(range(100))


def test_copy():
    target = bytearray(5)
    tensorferry.copy(target, b"hello")
    assert target == b"hello"
    with pytest.raises(InvalidArgument, match="5 bytes and the source 4"):
        tensorferry.copy(target, b"four")


def test_many_threads_share_a_handle(handle, path):
    def work(number):
        mine = data(MiB + number, number)
        back = bytearray(len(mine))
        for _ in range(5):
            handle.write(mine, path, number * 2 * MiB).wait()
            handle.read_now(back, path, number * 2 * MiB)
            assert back == mine

    in_threads(8, work)
