"""What a call by path has opened it closes, also when it fails and its exception is kept."""

import contextlib
import errno
import os

import pytest
import tensorferry
from drives import memory_mount

LARGE = bytearray(3 << 20)  # more than the drive has, and more than goes inline
SMALL = bytearray(5000)
FAR = 1 << 62


def wait(operation):
    operation.wait()


def wait_for_all(handle, started):
    assert started == 0
    handle.wait()


# Each call with a path, on a handle of DeepSpeed's shape (d) or of ours (h).
WRITES = {
    "Handle.write": lambda h, d, data, path: wait(h.write(data, path)),
    "Handle.write full": lambda h, d, data, path: wait(h.write(data, path, 0, "full")),
    "Handle.write_now": lambda h, d, data, path: h.write_now(data, path),
    "Handle.write_many": lambda h, d, data, path: wait(
        h.write_many([(SMALL, path), (data, path, len(SMALL))])
    ),
    "aio_handle.write": lambda h, d, data, path: d.write(data, path, False),
    "aio_handle.sync_pwrite": lambda h, d, data, path: d.sync_pwrite(data, path),
    "aio_handle.pwrite": lambda h, d, data, path: d.pwrite(data, path, False, False),
    "aio_handle.pwrite async": lambda h, d, data, path: wait_for_all(
        d, d.pwrite(data, path, False, True)
    ),
    "aio_handle.async_pwrite": lambda h, d, data, path: wait_for_all(d, d.async_pwrite(data, path)),
    "aio_write": lambda h, d, data, path: tensorferry.aio_write(data, path),
}
READS = {
    "Handle.read": lambda h, d, data, path: wait(h.read(data, path)),
    "Handle.read_now": lambda h, d, data, path: h.read_now(data, path),
    "Handle.read_many": lambda h, d, data, path: wait(h.read_many([(SMALL, path), (data, path)])),
    "aio_handle.read": lambda h, d, data, path: d.read(data, path, False),
    "aio_handle.sync_pread": lambda h, d, data, path: d.sync_pread(data, path),
    "aio_handle.pread": lambda h, d, data, path: d.pread(data, path, False, False),
    "aio_handle.pread async": lambda h, d, data, path: wait_for_all(
        d, d.pread(data, path, False, True)
    ),
    "aio_handle.async_pread": lambda h, d, data, path: wait_for_all(d, d.async_pread(data, path)),
    "aio_read": lambda h, d, data, path: tensorferry.aio_read(data, path),
}
# What is refused when the file is open and nothing has begun.
REFUSED = {
    "Handle.read": lambda h, d, path: h.read(SMALL, path, FAR * 2 - 1),
    "Handle.write": lambda h, d, path: h.write(SMALL, path, FAR * 2 - 1),
    "Handle.read_now": lambda h, d, path: h.read_now(SMALL, path, FAR * 2 - 1),
    "Handle.write_now": lambda h, d, path: h.write_now(SMALL, path, FAR * 2 - 1),
    "Handle.write_many": lambda h, d, path: h.write_many([(SMALL, path), (SMALL, path, 1)]),
    "Handle.read_many": lambda h, d, path: h.read_many([(SMALL, path, FAR * 2 - 1)]),
    "aio_handle.write": lambda h, d, path: d.write(SMALL, path, False, FAR * 2 - 1),
    "aio_handle.async_pwrite": lambda h, d, path: d.async_pwrite(SMALL, path, FAR * 2 - 1),
    "aio_handle.async_pread": lambda h, d, path: d.async_pread(SMALL, path, FAR * 2 - 1),
    "aio_write": lambda h, d, path: tensorferry.aio_write(SMALL, path, block_size=1 << 40),
}


def open_names():
    """What the process has open."""
    names = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.append(os.readlink(f"/proc/self/fd/{number}"))
    return names


@pytest.fixture
def handle():
    with tensorferry.Handle() as handle:
        yield handle


@pytest.fixture(params=["aio_handle", "gds_handle"])
def dropin(request):
    return getattr(tensorferry, request.param)()


@pytest.mark.parametrize("data", [LARGE, LARGE[: 1 << 20]], ids=["queued", "inline"])
@pytest.mark.parametrize("call", WRITES)
def test_a_write_that_fails_gives_the_space_of_its_file_back(tmp_path, handle, dropin, call, data):
    with memory_mount(tmp_path, "1m") as drive:
        (drive / "filler").write_bytes(bytes(64 << 10))
        free = os.statvfs(drive).f_bfree
        path = str(drive / "data")
        with pytest.raises(OSError) as failed:
            WRITES[call](handle, dropin, data, path)
        assert failed.value.errno == errno.ENOSPC
        assert path not in open_names()
        os.remove(path)
        assert os.statvfs(drive).f_bfree == free, "the exception keeps the file open"


@pytest.mark.parametrize("size", [2 << 20, 5000], ids=["queued", "inline"])
@pytest.mark.parametrize("call", READS)
def test_a_read_that_fails_leaves_no_file_open(path, handle, dropin, call, size):
    with open(path, "wb") as file:
        file.write(bytes(100))
    with pytest.raises(OSError) as failed:
        READS[call](handle, dropin, bytearray(size), path)
    assert failed.value.filename == path
    assert path not in open_names()


@pytest.mark.parametrize("call", REFUSED)
def test_a_call_that_is_refused_leaves_no_file_open(path, handle, dropin, call):
    with open(path, "wb") as file:
        file.write(bytes(100))
    with pytest.raises(OSError) as refused:
        REFUSED[call](handle, dropin, path)
    assert refused.value.errno == errno.EINVAL
    assert path not in open_names()


def test_a_sync_by_path_leaves_no_file_open(path, handle):
    with open(path, "wb") as file:
        file.write(bytes(100))
    for durability in ("data", "full"):
        operation = handle.sync(path, durability)
        operation.wait()
        assert path not in open_names()
    with pytest.raises(OSError) as refused:
        handle.sync(path, "some")
    assert refused.value.errno == errno.EINVAL
    assert path not in open_names()
    with pytest.raises(OSError) as failed:
        handle.sync(path + ".missing")
    assert failed.value.errno == errno.ENOENT


def test_a_write_that_was_started_by_path_needs_no_one_to_keep_its_file(path, dropin):
    for _ in range(20):
        assert dropin.async_pwrite(LARGE, path) == 0
    assert dropin.wait() == 20
    assert os.path.getsize(path) == len(LARGE)
    assert path not in open_names()
