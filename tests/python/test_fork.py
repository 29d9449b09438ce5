"""What a child of fork() gets: no page-locked memory, answers or errors, and never a hang."""

import pytest
from programs import check_python, run_python, runs
from warm_python import WARM_PYTHON

# In the child: what it has copied by now, in bytes.
PRIVATE = """
def private_bytes():
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if "Private_Dirty:" in line)
"""

# Calls child() in a child, which must end by itself, and soon, and returns how it ended.
IN_CHILD = """
import os, signal, sys, warnings
warnings.simplefilter("ignore")
def in_child(child):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        try:
            child()
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


@pytest.mark.parametrize("engine", ["io_uring", "libaio", "threads"])
def test_workers_of_a_data_loader_get_no_copy_of_locked_memory(tmp_path, engine):
    """1 GiB that was used and is idle: two workers, two epochs, transfers before and between."""
    check_python(
        PRIVATE
        + """
import os, sys, torch, tensorferry
class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.tensor([index, private_bytes()])
locked = tensorferry.aio_handle().new_cpu_locked_tensor(1 << 30, torch.empty(0, dtype=torch.uint8))
expected = torch.arange(8 << 20, dtype=torch.int32).view(torch.uint8)[: 8 << 20]
path, engine = sys.argv[1:]
handle = tensorferry.Handle(engine)
handle.write(expected, path).wait()
loader = torch.utils.data.DataLoader(Samples(), num_workers=2, multiprocessing_context="fork")
for epoch in range(2):
    part = locked[epoch << 20 :][: 8 << 20]
    handle.read(part, path).wait()
    seen = []
    for batch in loader:
        index, copied = batch[0].tolist()
        assert copied < 512 << 20, f"{copied} bytes were copied for a worker"
        seen.append(index)
        part.zero_()
        handle.read(part, path).wait()  # beside living workers
        assert part.equal(expected)
    assert sorted(seen) == list(range(8))
""",
        tmp_path / "file",
        engine,
        timeout=300,
        python=WARM_PYTHON,
    )


def test_a_child_that_touches_locked_memory_ends_with_a_fault_and_the_parent_goes_on():
    done = run_python(
        IN_CHILD
        + """
import faulthandler, torch, tensorferry
faulthandler.disable()
buffer = tensorferry.PinnedBuffer(1 << 20)
tensors = [torch.frombuffer(buffer, dtype=torch.uint8),
           tensorferry.pin_handle().new_cpu_locked_tensor(100, torch.empty(0))]
for tensor in tensors:
    tensor.fill_(7)
    print(in_child(lambda: tensor[-1].item()) == -signal.SIGSEGV)
    print(in_child(lambda: tensor[:1].fill_(1)) == -signal.SIGSEGV)
    assert tensor.eq(7).all()
""",
        python=WARM_PYTHON,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n" * 4, "")


def test_what_a_child_does_with_locked_memory_of_the_parent_is_an_error(tmp_path):
    check_python(
        IN_CHILD
        + """
import errno, torch, tensorferry
from tensorferry import Handle, PinnedBuffer, SwapSpace, is_pinned
path = sys.argv[1] + "/file"
handle = Handle()
buffer = PinnedBuffer(1 << 20)
tensor = torch.frombuffer(buffer, dtype=torch.uint8)
handle.write_now(tensor, path)
space = SwapSpace(sys.argv[1], buffer_bytes=1 << 20)
taken = space.take(4096)
swapped = torch.frombuffer(taken, dtype=torch.uint8)
space.put("key", taken).wait()
view = space.view([("key", 0, 4096)])

def refused(kind, call):
    try:
        call()
    except kind as error:
        assert "fork()" in str(error), error
        return error
    raise AssertionError("it went through")

def child():
    for one in (buffer, taken):
        refused(BufferError, lambda: memoryview(one))
    with Handle() as own:
        for one in (tensor, swapped):
            for call in (own.read, own.write, own.read_now, own.write_now):
                assert refused(OSError, lambda: call(one, path)).errno == errno.EFAULT
            assert not is_pinned(one)
        refused(BufferError, lambda: own.read(buffer, path))
        assert "fork()" in repr(buffer), repr(buffer)
        assert tensorferry.aio_handle().stats()["pinned_bytes"] == 0
        mine = PinnedBuffer(1 << 20)
        own.read(mine, path).wait()
        assert is_pinned(mine)
        assert bytes(mine) == bytes(1 << 20) and bytes(view) == bytes(4096)
    assert "parent" in repr(space), repr(space)
    for call in (space.stats, lambda: space.size("key"), lambda: "key" in space):
        try:
            call()
        except ChildProcessError:
            continue
        raise AssertionError("it went through")
    del mine

def child_that_ends_everything():
    global buffer, tensor, swapped, taken, view, space, handle
    del tensor, swapped
    buffer.free()
    del buffer, taken, view
    space.close()
    handle.close()
    assert "closed" in repr(space) and "closed" in repr(handle)
    del space, handle

assert in_child(child) == 0
assert in_child(child_that_ends_everything) == 0
handle.read(buffer, path).wait()
back = bytearray(4096)
space.get("key", back).wait()
assert back == bytes(4096) == bytes(taken) and is_pinned(buffer)
""",
        tmp_path,
        python=WARM_PYTHON,
    )


def test_children_never_hang_whatever_threads_of_the_parent_do(tmp_path):
    check_python(
        IN_CHILD
        + f"""
import threading
from tensorferry import Handle, SwapSpace
path = sys.argv[1] + "/file"
handle, space = Handle(), SwapSpace(sys.argv[1], buffer_bytes=64 << 10)
handle.write_now(bytes(1 << 20), path)
done = handle.read(bytearray(1 << 20), path)
done.wait()
failed = handle.read(bytearray(2 << 20), path)
over = threading.Event()

def ask():
    while not over.is_set():
        repr(done), repr(failed), done.seconds, failed.exception(), handle.stats(), repr(space)

def swap():
    while not over.is_set():
        buffer = space.take(32 << 10)
        space.put("key", buffer).wait()
        del buffer  # the next one waits for its room
        space.get("key", bytearray(100)).wait()

def move():
    while not over.is_set():
        handle.read(bytearray(1 << 20), path).wait()

threads = [threading.Thread(target=work) for work in (ask, swap, swap, swap, move)]
for thread in threads:
    thread.start()
complaint = None

def child():
    global handle, space, done, failed
    assert "done in" in repr(done) and "failed" in repr(failed), (repr(done), repr(failed))
    assert done.wait() == 1 << 20 and done.seconds >= 0 and done.done()
    assert failed.exception() is not None
    assert handle.stats()["operations"] > 0
    assert "fork" in repr(handle) and "parent" in repr(space)
    del done, failed
    for one in (handle, space):
        try:
            one.close()
        except ChildProcessError:
            pass  # some of its operations were in flight
    del handle, space

for round in range({runs(30)}):
    import logging
    logging.disable()
    status = in_child(child)
    if status != 0:
        complaint = f"round {{round}}: the child ended with {{status}}"
        break
over.set()
for thread in threads:
    thread.join()
assert complaint is None, complaint
""",
        tmp_path,
        timeout=300,
    )
