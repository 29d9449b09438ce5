"""gds_handle and the engine gds. cuFile works in compat mode at least, or its tests are skipped."""

import errno
import os
import subprocess
import sys

import pytest
import tensorferry
import torch
from gpu_tensors import MiB, bytes_of, random_bytes
from tensorferry import _core

U8 = torch.empty(0, dtype=torch.uint8)


@pytest.fixture
def cufile(tmp_path):
    """A Handle by cuFile, if that knows the drive: it asks udev."""
    try:
        handle = tensorferry.Handle("gds", queue_depth=8, workers=2)
    except OSError as refused:
        pytest.skip(str(refused))
    with handle:
        try:
            handle.write_now(random_bytes(4096), tmp_path / "trial")
        except OSError as refused:
            pytest.skip(str(refused))
        yield handle


def test_a_gds_handle_moves_tensors_and_says_by_what(path):
    handle = tensorferry.gds_handle(intra_op_parallelism=2)
    mode, reason = _core.gds_support()
    assert reason in handle.engine_reason
    if mode != "direct":
        assert handle.engine in ("io_uring", "libaio", "threads")
        with open("/proc/modules") as modules:
            assert "nvidia_fs" not in modules.read()
    assert handle.get_alignment() == 512
    source = handle.new_pinned_device_tensor(3 * MiB + 5, U8).copy_(random_bytes(3 * MiB + 5))
    assert source.is_cuda and source.dim() == 1 and source.numel() == 3 * MiB + 5
    assert handle.async_pwrite(source, path) == 0
    assert handle.wait() == 1
    target = torch.zeros_like(source)
    assert handle.pin_device_tensor(target)
    assert handle.sync_pread(target, path) == 1
    assert torch.equal(source, target)
    assert handle.pread(target, path, True, False) == 1
    assert handle.unpin_device_tensor(target)
    assert handle.free_pinned_device_tensor(source)
    on_cpu = handle.new_cpu_locked_tensor(3 * MiB + 5, U8)
    assert handle.read(on_cpu, path, True) == 0
    assert torch.equal(on_cpu, target.cpu())
    with pytest.raises(ValueError, match="on cpu"):
        handle.pin_device_tensor(on_cpu)
    assert handle.new_pinned_device_tensor(0, U8).numel() == 0


@pytest.mark.parametrize("size", [1, 511, 4096, 4097, MiB, 5 * MiB + 3, 100 * MiB + 1])
@pytest.mark.parametrize("offset", [0, 1, 4095, 8192])
def test_cufile_moves_any_size_at_any_offset(cufile, path, size, offset):
    source = random_bytes(size)
    cufile.write(source, path, offset).wait()
    with open(path, "rb") as file:
        file.seek(offset)
        assert file.read() == bytes_of(source)
    whole = random_bytes(size + 7, 1)
    before = bytes_of(whole)
    cufile.read_now(whole[3 : size + 3], path, offset)
    assert bytes_of(whole) == before[:3] + bytes_of(source) + before[size + 3 :]


def test_cufile_has_the_configured_parallelism_in_flight(cufile, path):
    tensor = random_bytes(200 * MiB)
    cufile.write_now(tensor, path)
    _core.register_gpu_memory(tensor)
    before = _core.gds_counts()
    operation = cufile.read(tensor, path)
    operation.wait()
    after = _core.gds_counts()
    assert _core.unregister_gpu_memory(tensor)
    assert not _core.unregister_gpu_memory(tensor)
    assert operation.engine == "gds"
    assert after["requests"] - before["requests"] >= 200
    assert after["registered_requests"] > before["registered_requests"]
    assert after["in_flight_max"] >= 2 * 8  # workers x depth
    mode, reason = _core.gds_support()
    assert reason in operation.engine_reason
    assert mode == "direct" or "compat" in operation.engine_reason


def test_neighbours_in_one_page_do_not_undo_each_other(cufile, path):
    size = MiB + 100
    tensors = [random_bytes(size, seed) for seed in range(20)]
    for _ in range(5):
        cufile.write_many([(t, path, i * size) for i, t in enumerate(tensors)]).wait()
        with open(path, "rb") as file:
            assert file.read() == b"".join(map(bytes_of, tensors))


def test_errors_of_cufile_are_ours(cufile, path, tmp_path):
    tensor = random_bytes(MiB)
    cufile.write_now(tensor, path)
    with pytest.raises(OSError) as caught:
        cufile.read(torch.empty(2 * MiB, dtype=torch.uint8, device="cuda"), path).wait()
    assert caught.value.errno == errno.ENODATA and caught.value.filename == path
    with pytest.raises(OSError) as caught:
        cufile.read_now(tensor, str(tmp_path / "none"))
    assert caught.value.errno == errno.ENOENT
    with pytest.raises(OSError, match="not on a GPU|EFAULT|on cpu"):
        _core.register_gpu_memory(torch.empty(100))
    _core.register_gpu_memory(tensor)
    with pytest.raises(OSError, match="CU_FILE_MEMORY_ALREADY_REGISTERED") as caught:
        _core.register_gpu_memory(tensor)
    assert caught.value.errno == errno.EEXIST
    assert _core.unregister_gpu_memory(tensor)


def test_a_file_that_cufile_cannot_reach_is_an_error_that_says_so(cufile):
    with pytest.raises(OSError, match="engine auto") as caught:
        cufile.write_now(random_bytes(MiB), f"/dev/shm/tensorferry-{os.getpid()}")
    os.unlink(f"/dev/shm/tensorferry-{os.getpid()}")
    assert caught.value.filename.startswith("/dev/shm")


WITHOUT_LIBRARY = """
import tensorferry
try:
    tensorferry.Handle("gds")
except OSError as refused:
    print(refused.errno, refused)
handle = tensorferry.gds_handle()
print(handle.engine_reason)
"""


def test_without_the_library_the_reason_is_told():
    """No torch in this process, so nothing shows where pip has put the library."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_LIBRARY], capture_output=True, text=True)
    if "libcufile" not in done.stdout:
        pytest.skip("the library is on the system's path")
    first, second = done.stdout.splitlines()
    assert first.startswith(f"{errno.EOPNOTSUPP} ") and "libcufile.so.0" in first
    assert "libcufile.so.0" in second
