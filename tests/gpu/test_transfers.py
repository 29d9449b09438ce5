"""Tensors of a GPU through Handle: bytes, order, errors, memory."""

import errno
import gc
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorferry
import torch
from any_tensor import any_tensor, write_and_read
from gpu_tensors import MiB, busy, bytes_of, random_bytes
from in_threads import in_threads
from only_dlpack import OnlyDlpack
from tensorferry import Handle, PinnedBuffer


@pytest.mark.parametrize("size", [0, 1, 511, 4096, 4097, MiB, 5 * MiB + 3, 200 * MiB + 1])
@pytest.mark.parametrize("offset", [0, 1, 4095, 8192])
def test_what_is_written_is_read(handle, path, size, offset):
    source = random_bytes(size)
    assert handle.write(source, path, offset).wait() == size
    target = torch.zeros_like(source)
    assert handle.read(target, path, offset).wait() == size
    assert torch.equal(target, source)
    handle.write_now(source, path, offset + 5)
    target.zero_()
    handle.read_now(target, path, offset + 5)
    assert torch.equal(target, source)
    if size <= 5 * MiB + 3:
        with open(path, "rb") as file:
            file.seek(offset + 5)
            assert file.read() == bytes_of(source)


@any_tensor(100)
def test_any_tensor_at_any_offset(tmp_path, dtype, shape, skip, offset, engine, now):
    path = tmp_path / "data.bin"
    path.unlink(missing_ok=True)
    count = int(np.prod(shape, dtype=int))
    size = dtype.itemsize
    source = random_bytes((skip + count) * size, 1).view(dtype)[skip:].view(shape)
    whole = random_bytes((skip + count + 1) * size, 2)
    before = bytes_of(whole)
    target = whole.view(dtype)[skip : skip + count].view(shape)
    write_and_read(engine, now, source, target, path, offset)
    raw = bytes_of(source)
    begin = skip * size
    assert bytes_of(whole) == before[:begin] + raw + before[begin + len(raw) :]
    on_disk = np.fromfile(path, dtype=np.uint8, offset=offset).tobytes() if count else b""
    assert on_disk == raw


def test_many_tensors_of_cpu_and_gpu_are_one_operation(handle, path):
    sizes = list(range(0, 40_000, 997)) + [3 * MiB + 1, 7]
    parts = [random_bytes(s, s, "cuda" if i % 3 else "cpu") for i, s in enumerate(sizes)]
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    handle.write_many(list(zip(parts, [path] * len(parts), offsets))).wait()
    back = [torch.zeros_like(p, device="cpu" if i % 2 else "cuda") for i, p in enumerate(parts)]
    handle.read_many(list(zip(back, [path] * len(back), offsets))).wait()
    for part, got in zip(parts, back):
        assert torch.equal(part.cpu(), got.cpu())


def test_a_write_takes_what_the_current_stream_will_have_made(handle, path):
    tensor = torch.zeros(16 * MiB, dtype=torch.uint8, device="cuda")
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        for value, start in ((3, handle.write), (4, handle.write_now)):
            part = tensor if start == handle.write else tensor[:MiB]
            with torch.cuda.stream(stream):
                busy(60)
                part.fill_(value)
                operation = start(part, path)
            if operation is not None:
                operation.wait()
            with open(path, "rb") as file:
                assert set(file.read(part.nbytes)) == {value}
        torch.cuda.synchronize()


def test_a_read_comes_after_what_the_current_stream_still_does_with_the_memory(handle, path):
    wanted = random_bytes(8 * MiB)
    handle.write_now(wanted, path)
    for start in (handle.read, handle.read_now):
        size = 8 * MiB if start == handle.read else MiB
        target = torch.zeros(size, dtype=torch.uint8, device="cuda")
        copy = torch.empty_like(target)
        busy(60)
        copy.copy_(target)  # before the read, though it is queued only now
        target.fill_(9)
        operation = start(target, path)
        if operation is not None:
            operation.wait()
        assert torch.equal(target, wanted[:size])
        assert int(copy.max()) == 0


def test_bytes_are_there_for_any_stream_after_wait(handle, path):
    wanted = random_bytes(64 * MiB)
    handle.write_now(wanted, path)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for stream in streams:
        target = torch.zeros_like(wanted)
        handle.read(target, path).wait()
        with torch.cuda.stream(stream):
            same = torch.equal(target, wanted)
        assert same


def test_a_kernel_on_another_stream_runs_on(handle, path):
    """Nothing waits for the whole device."""
    tensor = random_bytes(4 * MiB)
    handle.write_now(tensor, path)
    torch.cuda.synchronize()
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        busy(3000)
        done = torch.cuda.Event()
        done.record()
    begin = time.monotonic()
    handle.write(tensor, path).wait()
    handle.read(tensor, path).wait()
    handle.read_now(tensor[:4096], path)
    still_runs = not done.query()
    took = time.monotonic() - begin
    torch.cuda.synchronize()
    assert still_runs and took < 2.5


def test_others_go_on_while_one_waits_for_its_stream(handle, tmp_path):
    slow, quick = random_bytes(MiB, 1), random_bytes(64 * MiB, 2)
    torch.cuda.synchronize()
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        busy(2000)
        waits = handle.write(slow, tmp_path / "slow")
    handle.write(quick, tmp_path / "quick").wait(timeout=60)
    assert not waits.done()
    waits.wait()
    assert (tmp_path / "slow").read_bytes() == bytes_of(slow)


def test_a_transfer_that_waits_for_its_stream_can_be_cancelled(handle, path):
    tensor = random_bytes(MiB)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        busy(1000)
        operation = handle.write(tensor, path)
    operation.cancel()
    with pytest.raises(OSError) as caught:
        operation.wait(timeout=0.5)
    assert caught.value.errno == errno.ECANCELED
    torch.cuda.synchronize()


def test_memory_is_bounded_by_the_slots_whatever_the_size(path):
    size = 2 << 30
    with Handle(slot_bytes=32 * MiB) as handle:
        tensor = torch.empty(size, dtype=torch.uint8, device="cuda").random_(0, 256)
        handle.write_now(tensor[: 64 * MiB], path)
        torch.cuda.synchronize()

        def resident():
            with open("/proc/self/status") as status:
                return next(int(line.split()[1]) for line in status if "VmHWM" in line) << 10

        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        before = resident()
        handle.write(tensor, path).wait()
        back = torch.zeros_like(tensor)
        handle.read(back, path).wait()
        assert torch.equal(back, tensor)
        assert resident() - before < 64 * MiB


def test_locked_tensors_are_known_to_cuda(tmp_path):
    handle = tensorferry.aio_handle()
    locked = handle.new_cpu_locked_tensor(32 * MiB, torch.empty(0, dtype=torch.uint8))
    assert locked.is_pinned() and handle.is_pinned(locked)
    gpu = random_bytes(32 * MiB)
    torch.cuda.synchronize()
    busy(300)
    begin = time.monotonic()
    locked.copy_(gpu, non_blocking=True)
    assert time.monotonic() - begin < 0.1
    torch.cuda.synchronize()
    assert torch.equal(locked, gpu.cpu())
    assert handle.free_cpu_locked_tensor(locked)
    kept = tensorferry.pin_handle().new_cpu_locked_tensor(MiB, torch.empty(0, dtype=torch.uint8))
    assert not kept.is_pinned()  # DeepSpeed registers those itself
    torch.cuda.cudart().cudaHostRegister(kept.data_ptr(), kept.nbytes, 0)
    assert kept.is_pinned()
    torch.cuda.cudart().cudaHostUnregister(kept.data_ptr())


def test_torchs_pinned_tensors_are_used_in_place(handle, path):
    pinned = torch.empty(8 * MiB, dtype=torch.uint8).random_(0, 256).pin_memory()
    assert tensorferry.aio_handle().is_pinned(pinned)
    before = handle.stats()["bounced_bytes"]
    handle.write(pinned, path).wait()
    back = torch.zeros_like(pinned).pin_memory()
    handle.read(back, path).wait()
    assert torch.equal(back, pinned)
    assert handle.stats()["bounced_bytes"] == before


IN_A_NEW_PROCESS = """
import os, sys, torch, tensorferry
before = tensorferry.PinnedBuffer(1 << 20)
with tensorferry.Handle() as handle:
    handle.write_now(bytes(4096), sys.argv[1])
    handle.read(bytearray(4096), sys.argv[1]).wait()
assert not torch.cuda.is_initialized()
pid = os.fork()
if pid == 0:
    tensor = torch.ones(1000, device="cuda")  # fails where the parent has started CUDA
    with tensorferry.Handle() as handle:
        handle.write_now(tensor, sys.argv[1])
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
tensor = torch.zeros(1000, device="cuda")
with tensorferry.Handle() as handle:
    handle.read_now(tensor, sys.argv[1])
assert float(tensor.sum()) == 1000
assert torch.frombuffer(before, dtype=torch.uint8).is_pinned()  # once CUDA has started
print("fine")
"""


def test_cuda_is_not_started_and_forks_stay_safe(path):
    done = subprocess.run(
        [sys.executable, "-c", IN_A_NEW_PROCESS, path], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "fine", done.stderr


def test_a_handle_ends_while_gpu_work_is_under_way(engine, tmp_path):
    for round_ in range(20):
        handle = Handle(engine)
        tensor = random_bytes(64 * MiB, round_)
        busy(5)
        handle.write(tensor, tmp_path / f"{round_}")
        handle.write(tensor, tmp_path / f"{round_}b")
        del tensor, handle
        gc.collect()
    torch.cuda.synchronize()


def test_many_threads_use_one_handle(handle, tmp_path):
    def work(number):
        with torch.cuda.stream(torch.cuda.Stream()):
            for round_ in range(10):
                tensor = random_bytes(MiB + number, round_ * 10 + number)
                back = torch.empty_like(tensor)
                path = tmp_path / f"{number}"
                handle.write(tensor, path).wait()
                handle.read(back, path).wait()
                assert torch.equal(back, tensor)
                handle.write_now(back[:5000], path)
                handle.read_now(tensor[:5000], path)
                assert torch.equal(back, tensor)

    in_threads(8, work)


def test_a_tensor_may_go_while_its_transfer_is_under_way(handle, path):
    source = random_bytes(100 * MiB)
    handle.write_now(source, path)
    expected = bytes_of(source[:MiB])
    for _ in range(20):
        operation = handle.read(torch.empty_like(source), path)
        torch.cuda.empty_cache()
        others = [random_bytes(100 * MiB, s) for s in range(3)]
        operation.wait()
        assert all(torch.equal(o, random_bytes(100 * MiB, s)) for s, o in enumerate(others))
        del others
    with open(path, "rb") as file:
        assert file.read(MiB) == expected


@pytest.mark.parametrize("start", ["read", "write", "read_now", "write_now"])
def test_what_cannot_be_transferred_is_an_error(handle, path, start):
    handle.write_now(bytes(4096), path)
    call = getattr(handle, start)
    square = torch.ones(32, 32, device="cuda")
    with pytest.raises(ValueError, match="not contiguous"):
        call(square.t(), path)
    with pytest.raises(TypeError, match="layout"):
        call(square.to_sparse(), path)
    with pytest.raises(TypeError, match="meta"):
        call(square.to("meta"), path)
    with pytest.raises(OSError) as caught:
        call(square, path + ".no/where")
    assert caught.value.errno == errno.ENOENT


def test_a_read_past_the_end_of_the_file_is_an_error(handle, path):
    handle.write_now(bytes(10_000), path)
    target = torch.zeros(20_000, dtype=torch.uint8, device="cuda")
    for start in (handle.read_now, lambda *a: handle.read(*a).wait()):
        with pytest.raises(OSError) as caught:
            start(target, path)
        assert caught.value.errno == errno.ENODATA


def test_a_transfer_is_no_part_of_a_graph(handle, path):
    tensor = random_bytes(MiB)
    handle.write_now(tensor, path)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        tensor.add_(1)
        for start in (handle.write, handle.write_now):
            with pytest.raises(OSError, match="graph") as caught:
                start(tensor, path)
            assert caught.value.errno == errno.EBUSY
    before = tensor.clone()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(tensor, before + 1)


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_transfers_go_on_while_another_thread_captures_a_graph(handle, path, tmp_path, mode):
    tensor = random_bytes(256 * MiB)
    handle.write_now(tensor, path)
    late = torch.zeros(8 * MiB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    back = torch.zeros_like(tensor)
    other = torch.ones(1000, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        busy(300)
        late.fill_(7)
        fenced = handle.write(late, tmp_path / "late")
    operation = handle.read(back, path)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode=mode):
        other.mul_(2)
        operation.wait()
        other.mul_(2)
    fenced.wait()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(back, tensor) and float(other[0]) == 4
    assert set((tmp_path / "late").read_bytes()) == {7}


def test_dlpack_of_a_gpu_will_do(handle, path):
    tensor = random_bytes(MiB + 5)
    handle.write_now(OnlyDlpack(tensor), path)
    back = torch.zeros_like(tensor)
    handle.read(OnlyDlpack(back), path).wait()
    assert torch.equal(back, tensor)
    with pytest.raises(ValueError, match="contiguous"):
        handle.write_now(OnlyDlpack(tensor[::2]), path)


def test_a_gpu_tensor_is_validated(path):
    handle = tensorferry.aio_handle()
    tensor = random_bytes(3 * MiB + 7)
    handle.write(tensor, path, True)
    handle.read(tensor, path, True)
    tensorferry.aio_write(tensor, path, validate=True)
    tensorferry.aio_read(tensor, path, validate=True)
    assert os.path.getsize(path) == tensor.nbytes
    with open(path, "r+b") as file:
        file.seek(2 * MiB + 11)
        byte = file.read(1)[0]
        file.seek(2 * MiB + 11)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(OSError, match=str(2 * MiB + 11)) as caught:
        tensorferry._core.validate(tensor, path)
    assert caught.value.errno == errno.EBADMSG


def test_a_swap_space_takes_tensors_of_a_gpu(tmp_path):
    with tensorferry.SwapSpace(tmp_path, buffer_bytes=16 * MiB) as space:
        tensor = random_bytes(40 * MiB + 3)
        torch.cuda.synchronize()
        busy(20)
        tensor.add_(1)
        operation = space.put("a", tensor)
        early = torch.zeros_like(tensor)
        space.get("a", early).wait()  # from the memory of the write, if that is under way
        on_cpu = torch.zeros(tensor.shape, dtype=tensor.dtype)
        space.get("a", on_cpu).wait()
        operation.wait()
        late = torch.zeros_like(tensor)
        space.get("a", late).wait()
        assert torch.equal(early, tensor) and torch.equal(late, tensor)
        assert torch.equal(on_cpu, tensor.cpu())
        small = random_bytes(MiB)
        space.put("b", small).wait()
        assert space.prefetch("b")
        back = torch.zeros_like(small)
        space.get("b", back).wait()
        assert torch.equal(back, small)


def test_a_gpu_out_of_memory_is_an_error_of_torch_and_harms_nothing(path):
    handle = tensorferry.gds_handle()
    with pytest.raises(torch.OutOfMemoryError):
        handle.new_pinned_device_tensor(1 << 40, torch.empty(0, dtype=torch.uint8))
    tensor = handle.new_pinned_device_tensor(MiB, torch.empty(0, dtype=torch.uint8)).fill_(7)
    assert handle.sync_pwrite(tensor, path) == 1


def test_a_pinned_buffer_lives_as_long_as_its_views():
    for _ in range(50):
        view = torch.frombuffer(PinnedBuffer(4 * MiB), dtype=torch.uint8)
        assert view.is_pinned()
        del view
        gc.collect()
