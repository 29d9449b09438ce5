"""The DeepSpeed-shaped API: every line of its contract."""

import errno
import inspect
import os
import re
import time

import pytest
import tensorferry
import torch
from in_threads import in_threads
from tensorferry import aio_handle, aio_read, aio_write, deepspeed_memcpy, gds_handle, pin_handle

MiB = 1 << 20


def tensor(size, seed=1):
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.manual_seed(seed))


@pytest.fixture
def handle():
    return aio_handle()


def test_validation_wants_a_name_before_anything_moves(handle, tmp_path):
    path = tmp_path / "data"
    path.write_bytes(b"before")
    with open(path, "r+b") as file:
        for call in (handle.write, handle.read):
            with pytest.raises(TypeError, match="give its name"):
                call(bytearray(b"after!"), file.fileno(), True)
    assert path.read_bytes() == b"before"


# ---- one-off functions ---------------------------------------------------------------------------


def test_signatures():
    for function in (aio_read, aio_write):
        parameters = inspect.signature(function).parameters
        assert {name: p.default for name, p in parameters.items()} == {
            "buffer": inspect.Parameter.empty,
            "filename": inspect.Parameter.empty,
            "block_size": 1048576,
            "queue_depth": 128,
            "single_submit": False,
            "overlap_events": True,
            "validate": False,
            "verbose": False,
        }
        assert parameters["verbose"].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize("size", [0, 1, 4097, 3 * MiB + 1])
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_one_off(path, size, single, overlap):
    source, target = tensor(size), tensor(size, 2)
    assert aio_write(source, path, 128 * 1024, 32, single, overlap, True) == 0
    assert os.path.getsize(path) == size
    assert aio_read(target, path, 128 * 1024, 32, single, overlap, True) == 0
    assert torch.equal(source, target)


def test_aio_write_owns_the_whole_file(path):
    aio_write(tensor(2 * MiB), path)
    aio_write(tensor(1000), path)
    assert os.path.getsize(path) == 1000


@pytest.mark.parametrize("size", [99, 101, 0])
def test_aio_read_names_both_sizes(path, size):
    aio_write(tensor(100), path)
    with pytest.raises(OSError, match=rf"100 bytes.*{size}") as caught:
        aio_read(tensor(size), path)
    assert caught.value.filename == path
    assert (caught.value.offset, caught.value.length) == (0, size)


def test_verbose_prints_the_timing_line(path, capfd):
    aio_write(tensor(1000), path, verbose=True)
    aio_read(tensor(1000), path, verbose=True)
    aio_read(tensor(1000), path)
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 2
    for line in lines:
        found = re.fullmatch(r"Elapsed time\(usec\): aio = (\S+) call = (\S+)", line)
        assert 0 < float(found[1]) <= float(found[2])


# ---- validation ----------------------------------------------------------------------------------


def test_validation_finds_the_first_difference(path, handle):
    source = tensor(10_000)
    aio_write(source, path)
    tensorferry.validate(source, path)
    source[7001] ^= 1
    with pytest.raises(OSError, match="differ") as caught:
        tensorferry.validate(source, path)
    assert (caught.value.errno, caught.value.offset) == (errno.EBADMSG, 7001)
    with pytest.raises(OSError, match="ends here") as caught:
        tensorferry.validate(torch.cat([tensor(10_000)[6:], tensor(1)]), path, 6)
    assert caught.value.offset == 10_000


def test_a_file_changed_before_the_wait_fails_its_validation(path, handle):
    source = tensor(100_000)
    handle.sync_pwrite(source, path)
    target = torch.empty_like(source)
    handle.pread(target, path, True, True)
    # Until the read is done; then the file is changed, and the wait that validates comes last.
    while not torch.equal(source, target):
        time.sleep(0.01)
    with open(path, "r+b") as file:
        file.seek(99_999)
        file.write(bytes([int(source[-1]) ^ 1]))
    with pytest.raises(OSError) as caught:
        handle.wait()
    assert (caught.value.errno, caught.value.offset) == (errno.EBADMSG, 99_999)
    assert handle.wait() == 0
    assert handle.sync_pread(target, path) == 1


# ---- aio_handle ----------------------------------------------------------------------------------


def test_defaults_and_getters():
    handle = aio_handle()
    assert handle.get_block_size() == 1048576
    assert handle.get_queue_depth() == 128
    assert handle.get_single_submit() is False
    assert handle.get_overlap_events() is False
    assert handle.get_intra_op_parallelism() == 1
    assert handle.get_alignment() == 512
    handle = aio_handle(4096, 4, True, True, 3)
    assert handle.get_block_size() == 4096
    assert handle.get_queue_depth() == 4
    assert handle.get_single_submit() is True
    assert handle.get_overlap_events() is True
    assert handle.get_intra_op_parallelism() == 3
    assert handle.get_alignment() == 3 * 512
    assert gds_handle(intra_op_parallelism=3).get_alignment() == 512
    assert "queue_depth=4" in repr(handle)
    keywords = dict(
        block_size=8192,
        queue_depth=2,
        single_submit=True,
        overlap_events=True,
        intra_op_parallelism=2,
    )
    assert aio_handle(**keywords).get_block_size() == 8192


def test_every_transfer_and_what_it_returns(path, handle):
    source, target = tensor(3 * MiB), torch.empty(3 * MiB, dtype=torch.uint8)

    def check():
        assert torch.equal(source, target)
        target.zero_()

    assert handle.write(source, path, False) == 0
    assert handle.read(target, path, True) == 0
    check()
    assert handle.write(source, path, True, 1000) == 0
    assert handle.read(buffer=target, filename=path, validate=False, file_offset=1000) == 0
    check()
    assert handle.pwrite(source, path, False, False) == 1
    assert handle.pread(target, path, True, False) == 1
    check()
    assert handle.pwrite(source, path, False, True, 512) == 0
    assert handle.wait() == 1
    assert handle.pread(target, path, True, **{"async": True}, file_offset=512) == 0
    assert handle.wait() == 1
    check()
    assert handle.sync_pwrite(source, path) == 1
    assert handle.sync_pread(target, path) == 1
    check()
    assert handle.sync_pwrite(buffer=source, filename=path, file_offset=77) == 1
    assert handle.sync_pread(buffer=target, filename=path, file_offset=77) == 1
    check()
    assert handle.async_pwrite(source, path) == 0
    assert handle.wait() == 1
    assert handle.async_pread(target, path) == 0
    assert handle.wait() == 1
    check()
    assert handle.wait() == 0
    for wrong in ((), (True, 0, 0)):
        with pytest.raises(TypeError, match="async"):
            handle.pread(target, path, False, *wrong)


def test_a_transfer_never_cuts_the_file(path, handle):
    handle.sync_pwrite(tensor(10_000), path)
    handle.sync_pwrite(tensor(100), path)
    handle.write(tensor(100), path, False)
    assert os.path.getsize(path) == 10_000


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_WRONLY | os.O_DIRECT, os.O_RDWR])
@pytest.mark.parametrize("size", [8192, 5001])
def test_descriptors(path, handle, flags, size):
    source, target = tensor(size), torch.empty(size, dtype=torch.uint8)
    descriptor = os.open(path, flags | os.O_CREAT)
    assert handle.async_pwrite(source, descriptor) == 0
    assert handle.wait() == 1
    assert handle.async_pwrite(source, descriptor, size) == 0
    assert handle.async_pwrite(buffer=source, fd=descriptor, file_offset=2 * size) == 0
    assert handle.wait() == 2
    os.close(descriptor)  # it was ours all the time
    reading = os.open(path, os.O_RDONLY)
    assert handle.async_pread(buffer=target, fd=reading, file_offset=size) == 0
    assert handle.wait() == 1
    assert torch.equal(source, target)
    os.close(reading)
    assert os.path.getsize(path) == 3 * size
    with pytest.raises(OSError) as caught:
        handle.async_pread(target, reading)
    assert caught.value.errno == errno.EBADF
    with pytest.raises(TypeError, match="fd"):
        handle.async_pread(target)
    appending = os.open(path, os.O_WRONLY | os.O_APPEND)
    with pytest.raises(OSError, match="O_APPEND"):
        handle.async_pwrite(source, appending)
    os.close(appending)


def test_wait_counts_asynchronous_operations_only(path, handle):
    source = tensor(MiB)
    for _ in range(5):
        handle.async_pwrite(source, path)
    handle.sync_pwrite(source, path)
    handle.write(source, path, False)
    assert handle.wait() == 5
    assert handle.wait() == 0


def test_failures_are_raised_together_and_nothing_stays_pending(path, handle):
    handle.sync_pwrite(tensor(1000), path)
    good = torch.empty(1000, dtype=torch.uint8)
    handle.async_pread(torch.empty(2000, dtype=torch.uint8), path)
    handle.async_pread(good, path)
    handle.async_pread(torch.empty(1000, dtype=torch.uint8), path, 500)
    with pytest.raises(OSError, match="ends at offset 1000") as caught:
        handle.wait()
    assert len(caught.value.others) == 1
    assert caught.value.others[0].errno == errno.ENODATA
    assert torch.equal(good, tensor(1000))
    assert handle.wait() == 0
    assert handle.sync_pread(good, path) == 1


def test_synchronous_calls_from_many_threads_complete_their_own_operation(tmp_path, handle):
    def work(number):
        mine, path = tensor(2 * MiB, number), str(tmp_path / f"{number}.bin")
        back = torch.empty_like(mine)
        for _ in range(5):
            assert handle.sync_pwrite(mine, path) == 1
            assert handle.sync_pread(back, path) == 1
            assert torch.equal(mine, back)

    in_threads(6, work)
    assert handle.wait() == 0


# ---- page-locked tensors -------------------------------------------------------------------------


@pytest.fixture(params=[aio_handle, gds_handle, pin_handle])
def pins(request):
    return request.param()


DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.bool,
    torch.complex64,
    torch.int64,
    torch.uint8,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 1000, 3 * MiB])
def test_locked_tensors(pins, dtype, count):
    example = torch.empty(7, 3, dtype=dtype, device="meta")
    locked = pins.new_cpu_locked_tensor(count, example)
    assert locked.shape == (count,) and locked.dtype == dtype and locked.device.type == "cpu"
    assert locked._base is None and not locked.requires_grad
    assert pins.is_pinned(locked) is (count > 0)
    if count:
        assert locked.data_ptr() % 4096 == 0
        assert pins.is_pinned(locked[count // 2 :]) is True
    assert pins.free_cpu_locked_tensor(locked) is True
    assert pins.free_cpu_locked_tensor(locked) is False
    assert pins.is_pinned(locked) is False
    locked.zero_()  # still ours to use


def test_locked_tensors_are_named_by_position_keyword_and_misspelling(pins):
    example = torch.empty(0)
    assert pins.new_cpu_locked_tensor(3, example).numel() == 3
    assert pins.new_cpu_locked_tensor(num_elem=3, example_tensor=example).numel() == 3
    assert pins.new_cpu_locked_tensor(3, example_tenosr=example).numel() == 3
    with pytest.raises(TypeError):
        pins.new_cpu_locked_tensor(3)
    with pytest.raises(TypeError, match="other"):
        pins.new_cpu_locked_tensor(3, example, other=1)
    with pytest.raises(ValueError, match="negative"):
        pins.new_cpu_locked_tensor(-1, example)


def test_pinnedness_is_of_the_process(pins):
    locked = pin_handle().new_cpu_locked_tensor(1000, torch.empty(0))
    assert pins.is_pinned(locked[10:20]) is True
    assert pins.is_pinned(torch.empty(10)) is False
    assert pins.is_pinned(torch.empty(0)) is False
    assert pins.is_pinned(torch.ones(3, requires_grad=True)) is False
    # ZeRO-Infinity asks about parameters that it has put into page-locked memory.
    assert pins.is_pinned(torch.nn.Parameter(locked[10:20])) is True
    assert pins.is_pinned(torch.empty(3, device="meta")) is False
    assert pins.is_pinned(locked.numpy()) is True
    assert pins.free_cpu_locked_tensor(torch.empty(10)) is False
    assert pins.free_cpu_locked_tensor(torch.empty(0)) is False
    assert pins.free_cpu_locked_tensor(torch.empty(3, device="meta")) is False
    assert pins.free_cpu_locked_tensor(locked[10:]) is False
    assert pins.free_cpu_locked_tensor(locked) is True


def test_by_address():
    pins = pin_handle()
    locked = pins.new_cpu_locked_tensor(1000, torch.empty(0))
    assert pins.free_cpu_locked_tensor_by_ptr(locked.data_ptr() + 4) is False
    assert pins.free_cpu_locked_tensor_by_ptr(locked.data_ptr()) is True
    assert pins.free_cpu_locked_tensor_by_ptr(address=locked.data_ptr()) is False


def test_locked_memory_goes_with_its_last_view(handle, path):
    before = handle.stats()["pinned_bytes"]
    locked = handle.new_cpu_locked_tensor(MiB, torch.empty(0, dtype=torch.uint8))
    assert handle.stats()["pinned_bytes"] == before + MiB
    assert handle.stats()["locked_bytes"] + 0 <= handle.stats()["pinned_bytes"]
    locked.copy_(tensor(MiB))
    view = locked[5:]
    address = locked.data_ptr()
    handle.async_pwrite(locked, path)
    handle.free_cpu_locked_tensor(locked)
    del locked
    other = handle.new_cpu_locked_tensor(MiB, torch.empty(0, dtype=torch.uint8))
    assert other.data_ptr() != address  # not used again while a view lives
    assert handle.wait() == 1
    assert torch.equal(view, tensor(MiB)[5:])
    del view, other
    assert handle.stats()["pinned_bytes"] == before


# ---- the rest ------------------------------------------------------------------------------------


def test_memcpy():
    source, target = torch.randn(1000), torch.empty(1000)
    assert deepspeed_memcpy(target, source) == 0
    assert torch.equal(source, target)
    assert deepspeed_memcpy(dest=target, src=source) == 0
    with pytest.raises(OSError, match="4000 bytes and the source 3996"):
        deepspeed_memcpy(target, source[1:])


def test_gpu_calls_say_that_there_is_no_gpu():
    with pytest.raises(OSError) as caught:
        gds_handle().new_pinned_device_tensor(10, torch.empty(0))
    assert caught.value.errno == errno.ENODEV
    for call in (gds_handle().pin_device_tensor, gds_handle().unpin_device_tensor):
        with pytest.raises(ValueError, match="on cpu"):
            call(torch.empty(10))


def test_a_gds_handle_says_why_it_does_without_gds(path):
    handle = gds_handle()
    assert "no NVIDIA driver" in handle.engine_reason
    assert handle.sync_pwrite(torch.ones(1000), path) == 1
    with pytest.raises(OSError, match="no NVIDIA driver") as caught:
        tensorferry.Handle("gds")
    assert caught.value.errno == errno.EOPNOTSUPP
