"""Classes and rates: priority=, rate=, PriorityScope and set_rate()."""

import asyncio
import contextlib
import threading
import time

import pytest
import tensorferry

KIB = 1 << 10
CLASSES = ("urgent", "normal", "background")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * KIB)
    return path


@contextlib.contextmanager
def background_rate(rate):
    tensorferry.set_rate("background", rate)
    try:
        yield
    finally:
        tensorferry.set_rate("background", None)


def held_back(handle, file):
    """A read in the background of more blocks than the rate lets start."""
    return handle.read(bytearray(256 * KIB), file, priority="background")


@pytest.fixture
def handle():
    with tensorferry.Handle(block_bytes=4 * KIB) as opened:
        yield opened


@pytest.mark.parametrize("priority", [*CLASSES, None])
def test_every_call_takes_a_priority(tmp_path, handle, priority):
    data = bytes(range(256)) * 64
    path = tmp_path / "data"
    other = tmp_path / "other"
    handle.write(data, path, priority=priority).wait()
    handle.write_now(data, path, len(data), priority=priority)
    handle.write_many([(data, other)], priority=priority).wait()
    handle.sync(other, priority=priority).wait()
    read = [bytearray(len(data)) for _ in range(3)]
    handle.read(read[0], path, len(data), priority=priority).wait()
    handle.read_now(read[1], path, priority=priority)
    handle.read_many([(read[2], other)], priority=priority).wait()
    assert read == [data] * 3


def test_a_handle_has_a_priority_and_a_rate(file):
    with tensorferry.Handle(priority="background", rate=1 << 30) as handle:
        part = bytearray(10)
        handle.read(part, file).wait()
        assert bytes(part) == bytes(range(10))
        assert handle.stats()["lane_operations"] == 0  # it could have to wait


def test_what_is_no_priority_or_no_rate_is_refused(file, handle):
    with pytest.raises(ValueError, match="urgent, normal or background"):
        tensorferry.Handle(priority="high")
    with pytest.raises(ValueError, match="urgent, normal or background"):
        handle.read(bytearray(1), file, priority="low")
    with pytest.raises(TypeError, match="priority must be"):
        handle.read(bytearray(1), file, priority=1)
    with pytest.raises(ValueError, match="urgent, normal or background"):
        tensorferry.PriorityScope("idle")
    with pytest.raises(ValueError, match="at least 1 byte per second"):
        tensorferry.Handle(rate=0)
    with pytest.raises(ValueError, match="must be from 0"):
        tensorferry.set_rate("background", -1)


def test_the_rate_of_a_class_is_that_of_all_handles(file):
    rate = 4 << 20
    with background_rate(rate), tensorferry.Handle() as one, tensorferry.Handle() as other:
        assert tensorferry.rate("background") == rate
        begin = time.monotonic()
        for handle in [one, other] * 4:
            handle.read_now(bytearray(256 * KIB), file, priority="background")
        # The last one owes its time.
        assert time.monotonic() - begin >= 7 * 256 * KIB / rate - 0.03
    assert tensorferry.rate("background") is None


def test_who_waits_raises_the_operation(file, handle):
    with background_rate(1):
        held_back(handle, file).wait()  # to normal, which has no rate
        held_back(handle, file).result()
        operation = held_back(handle, file)
        with tensorferry.PriorityScope("background"), pytest.raises(TimeoutError):
            operation.wait(timeout=0.05)
        with tensorferry.PriorityScope("urgent"):
            assert operation.wait() == 256 * KIB


def test_who_awaits_raises_the_operation_and_a_callback_does_not(file, handle):
    async def wait_for(operation):
        return await operation

    with background_rate(1):
        assert asyncio.run(wait_for(held_back(handle, file))) == 256 * KIB
        operation = held_back(handle, file)
        called = threading.Event()
        operation.add_done_callback(lambda _: called.set())
        assert not called.wait(0.05)
        operation.wait()
        assert called.wait(60)


def test_a_scope_is_over_after_an_exception(file, handle):
    with background_rate(1):
        scope = tensorferry.PriorityScope("background")
        with contextlib.suppress(ZeroDivisionError), scope:
            with pytest.raises(ValueError, match="entered already"):
                scope.__enter__()
            raise ZeroDivisionError
        handle.read_now(bytearray(256 * KIB), file)  # normal again


def test_what_is_held_back_can_be_cancelled(file, handle):
    with background_rate(1):
        operation = held_back(handle, file)
        assert not operation.done()
        operation.cancel()
        with pytest.raises(OSError, match="cancelled by the caller"):
            operation.wait(timeout=60)


def test_a_handle_that_closes_finishes_its_writes_whatever_the_rate(tmp_path):
    path = tmp_path / "written"
    with tensorferry.Handle(rate=1, block_bytes=4 * KIB) as handle:
        handle.write(bytes(256 * KIB), path)
    assert path.stat().st_size == 256 * KIB


def test_a_swap_space_takes_the_priority_of_the_scope(tmp_path):
    with (
        background_rate(1),
        tensorferry.SwapSpace(tmp_path, buffer_bytes=4 << 20, block_bytes=4 * KIB) as space,
    ):
        data = bytes(256 * KIB)
        with tensorferry.PriorityScope("background"):
            put = space.put("t", data)
            with pytest.raises(TimeoutError):
                put.wait(timeout=0.05)
        buffer = bytearray(len(data))
        space.get("t", buffer).wait()  # from the memory that is being written
        assert put.wait() == len(data)


def test_weights_that_a_module_waits_for_are_urgent(tmp_path):
    torch = pytest.importorskip("torch")
    import tensorferry.offload

    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)))
    given = torch.ones(1, 512)
    with torch.no_grad():
        wanted = model(given)
        # Blocks are small, so that a rate holds back most of a weight.
        settings = {"keep_bytes": 0, "block_bytes": 4 * KIB}
        with tensorferry.offload.parameters(model, tmp_path, 3 << 20, **settings) as weights:
            model(given)
            tensorferry.set_rate("normal", 1)
            try:
                for _ in range(2):  # what was read ahead is raised when its module waits for it
                    assert torch.equal(model(given), wanted)
            finally:
                tensorferry.set_rate("normal", None)
            assert weights.stats()["read_bytes"] > 0
