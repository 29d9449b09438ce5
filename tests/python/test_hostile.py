"""What nobody should do, and somebody will. Most of these once crashed the interpreter."""

import asyncio
import errno
import gc
import importlib.util
import logging
import os
import sys
import threading
import time

import numpy as np
import pytest
import tensorferry
import torch
from programs import check_python
from tensorferry import Handle, InvalidArgument, aio_handle

MiB = 1 << 20


@pytest.fixture
def big(tmp_path):
    path = tmp_path / "big.bin"
    path.write_bytes(os.urandom(64 * MiB))
    return str(path)


@pytest.fixture
def empty(tmp_path):
    path = tmp_path / "empty.bin"
    path.write_bytes(b"")
    return str(path)


def test_a_handle_that_ends_under_other_threads_leaves_no_memory_in_use(big):
    for _ in range(5):
        handle, stop = Handle(), threading.Event()

        def work(read, size):
            try:
                while not stop.is_set():
                    read(np.empty(size, "u1"), big)
            except OSError:
                pass

        threads = [threading.Thread(target=work, args=(handle.read_now, MiB)) for _ in range(3)]
        threads.append(threading.Thread(target=work, args=(handle.read, 4 * MiB)))
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        handle.__exit__(KeyError, None, None)
        stop.set()
        for thread in threads:
            thread.join()


def test_close_has_an_end_while_others_submit(big):
    handle = Handle()

    def work():
        with pytest.raises(InvalidArgument, match="closed"):
            while True:
                handle.read(bytearray(MiB), big)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    handle.close()
    for thread in threads:
        thread.join()


def test_finalizers_may_call_the_handle_again(big, empty):
    handle = Handle()

    class Chatty(bytearray):
        def __del__(self):
            handle.read(bytearray(10), empty)

    for _ in range(200):
        handle.read(Chatty(4096), big)
    while handle.stats()["operations"] < 200:
        time.sleep(0.01)
    for _ in range(200):
        handle.read(bytearray(10), big)
    with pytest.raises(OSError, match="ends at offset 0"):
        handle.close()


def test_finalizers_may_wait_for_the_same_operation(big):
    handle = Handle()
    for _ in range(50):

        class Waiting(bytearray):
            def __del__(self):
                operation.wait()
                time.sleep(0.001)

        buffer = Waiting(4096)
        operation = handle.read(buffer, big)
        del buffer
        threads = [threading.Thread(target=operation.wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        operation.wait()
        for thread in threads:
            thread.join()


def test_a_log_that_raises_loses_no_operation(big, empty):
    class Broken(logging.Handler):
        def handle(self, record):
            raise RuntimeError("broken")

    broken = Broken()
    logging.getLogger("tensorferry").addHandler(broken)
    try:
        handle = Handle()
        for _ in range(64):
            handle.read(bytearray(10), empty)
        time.sleep(0.2)
        for _ in range(64):
            assert handle.read(np.ones(MiB, "u1"), big).wait() == MiB
        with pytest.raises(OSError, match="ends at offset 0"):
            handle.close()
    finally:
        logging.getLogger("tensorferry").removeHandler(broken)


def test_what_dlpack_gives_is_kept(tmp_path):
    class Temporary:
        def __dlpack__(self, **options):
            return torch.full((1 << 22,), 7, dtype=torch.uint8).__dlpack__()

        def __dlpack_device__(self):
            return (1, 0)

    path = tmp_path / "data.bin"
    with Handle() as handle:
        for _ in range(10):
            handle.write(Temporary(), path).wait()
            assert set(path.read_bytes()) == {7}


def test_a_storage_that_was_resized_is_refused(tmp_path):
    with Handle() as handle:
        for left in (0, 16):
            tensor = torch.zeros(100_000)[10:]
            tensor.untyped_storage().resize_(left)
            for call in (handle.write, handle.read, handle.write_now):
                with pytest.raises(ValueError, match="resized"):
                    call(tensor, tmp_path / "data.bin")


def test_addresses_are_refused(tmp_path):
    import ctypes

    with Handle() as handle:
        for value in (
            np.array([object()] * 8, dtype=object),
            np.zeros(3, dtype=[("O", "f8"), ("b", "O")]),
            (ctypes.py_object * 3)(),
            (ctypes.c_char_p * 3)(),
        ):
            for call in (handle.write, handle.read):
                with pytest.raises(TypeError, match="addresses"):
                    call(value, tmp_path / "data.bin")
        handle.write_now(np.zeros(3, dtype=[("O", "f8"), ("P", "i4")]), tmp_path / "data.bin")


def test_a_callback_that_exits_does_not_end_the_others(big):
    told = threading.Event()
    with Handle() as handle:
        handle.read(bytearray(8 * MiB), big).add_done_callback(lambda _: sys.exit())
        handle.read(bytearray(8 * MiB), big).add_done_callback(lambda _: told.set())
        assert told.wait(60)

        async def main():
            return await handle.read(bytearray(8 * MiB), big)

        assert asyncio.run(main()) == 8 * MiB


def test_an_operation_that_was_cancelled_is_no_failure_of_the_handle(big):
    with Handle(queue_depth=1, block_bytes=4096, workers=1) as handle:
        handle.read(bytearray(64 * MiB), big).cancel()


def test_what_is_done_holds_no_memory(big):
    with Handle() as handle:
        buffer = bytearray(MiB)
        operation = handle.read(buffer, big)
        while not operation.done():
            time.sleep(0.001)
        buffer.extend(b"it may be resized")


def test_failures_survive_an_interrupted_wait(big, empty):
    class Interrupt(BaseException):
        pass

    class Bad:
        def wait(self):
            raise Interrupt

    handle = aio_handle()
    handle.async_pread(bytearray(10), empty)
    handle._pending.append((Bad(), None))
    with pytest.raises(Interrupt):
        handle.wait()
    handle._pending.pop()
    with pytest.raises(OSError) as caught:
        handle.wait()
    assert caught.value.errno == errno.ENODATA
    assert handle.wait() == 0
    with pytest.raises(TypeError, match="descriptor"):
        handle.pread(bytearray(10), 0, True, True)
    assert handle.wait() == 0


def test_after_a_signals_handler_has_raised_the_next_wait_is_for_all(big):
    class Alarm(Exception):
        pass

    class Interrupted:
        waits = 0

        def wait(self):
            self.waits += 1
            if self.waits == 1:
                raise Alarm

        def done(self):
            return self.waits > 1

    handle = aio_handle()
    handle.async_pread(bytearray(10), big)
    handle._pending.append((Interrupted(), None))
    handle.async_pread(bytearray(10), big)
    with pytest.raises(Alarm):
        handle.wait()
    assert handle.wait() == 3
    assert handle.wait() == 0


def test_paths_need_not_be_text(tmp_path):
    path = os.fsencode(tmp_path) + b"/e\xff\xfe"
    with tensorferry.File(path, "read_write") as file, Handle() as handle:
        assert os.fsencode(file.path) == path
        assert "\\xff" in repr(file)
        operation = handle.read(bytearray(10), path)
        with pytest.raises(OSError) as caught:
            operation.wait()
        assert os.fsencode(caught.value.filename) == path
        assert "failed" in repr(operation)


def test_locked_tensors_do_not_depend_on_torchs_defaults(monkeypatch):
    example = torch.empty(0)
    with torch.device("meta"):
        assert aio_handle().new_cpu_locked_tensor(10, example).device.type == "cpu"
    monkeypatch.setattr(torch, "empty", None)
    assert aio_handle().new_cpu_locked_tensor(10, example).dtype == torch.float32


@pytest.mark.parametrize("package", ["deepspeed", "safetensors"])
def test_looking_for_a_package_does_not_disarm_the_variable(package):
    pytest.importorskip(package)
    check = """
        import importlib.util, sys, tensorferry._at_start
        assert importlib.util.find_spec(sys.argv[1]) is not None
        assert any(type(finder).__name__ == "ImportWatch" for finder in sys.meta_path)
        """
    variable = {f"TENSORFERRY_{package.upper()}": "1"}
    check_python(check, package, DS_ACCELERATOR="cpu", **variable)
    assert importlib.util.find_spec(package) is not None


def test_an_exit_handler_may_join_a_thread_that_waits(big):
    check_python(
        """
        import atexit, sys, threading
        def wait():
            try:
                operation.wait()
            except OSError:
                pass
        thread = threading.Thread(target=wait, daemon=True)
        atexit.register(lambda: thread.join())      # before the import: it runs last
        import tensorferry
        handle = tensorferry.Handle(queue_depth=1, block_bytes=4096, workers=1)
        operation = handle.read(bytearray(64 << 20), sys.argv[1])
        thread.start()
        """,
        big,
        timeout=60,
    )


def test_awaiting_the_parents_operation_in_a_child_is_an_error(big):
    check_python(
        """
        import asyncio, os, sys, warnings, tensorferry
        warnings.simplefilter("ignore")
        handle = tensorferry.Handle(queue_depth=1, block_bytes=4096, workers=1)
        operation = handle.read(bytearray(64 << 20), sys.argv[1])
        child = os.fork()
        if child == 0:
            async def main():
                await operation
            try:
                asyncio.run(main())
            except ChildProcessError:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """,
        big,
        timeout=60,
    )


def test_a_subinterpreter_is_refused_and_harms_nobody():
    out = check_python(
        """
        import sys, tensorferry
        try:
            import _interpreters as interpreters
        except ImportError:
            import _xxsubinterpreters as interpreters
        code = f"import sys; sys.path[:] = {sys.path}\\n"
        code += "try: import tensorferry\\n"
        code += "except ImportError as error: print(error, flush=True)"
        other = interpreters.create()
        interpreters.run_string(other, code)
        interpreters.destroy(other)
        repr(tensorferry.Handle())
        """
    )
    assert "subinterpreter" in out


def test_ending_early_is_said_in_the_log(big, caplog):
    with caplog.at_level(logging.WARNING, "tensorferry"):
        handle = Handle(queue_depth=1, block_bytes=4096, workers=1)
        handle.read(bytearray(64 * MiB), big)
        del handle
        gc.collect()
    assert "1 read was cancelled" in caplog.text
