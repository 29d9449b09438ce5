"""SwapSpace, SwapBuffer and SwapView, as a Python user sees them."""

import gc
import mmap
import os
import random
import stat

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from programs import check_python, let_others_in, runs
from swapping import SLOW, KiB, MiB, got
from tensorferry import InvalidArgument, SwapSpace


def test_tensors_of_any_kind_come_back(space):
    sources = {
        "bool": torch.rand(77) > 0.5,
        "bfloat16": torch.randn(1000, 33).bfloat16(),
        "complex": torch.randn(17, dtype=torch.complex64),
        "scalar": torch.tensor(3.25, dtype=torch.float64),
        "empty": torch.empty(0, 5),
        "odd": torch.arange(4 * MiB, dtype=torch.uint8)[3 : 2 * MiB + 8],
        "parameter": torch.nn.Parameter(torch.randn(513)),
        "large": torch.randn(3 * MiB),
    }
    for key, source in sources.items():
        space.put(key, source)
    for _ in range(2):  # while it is written, and from the drive
        for key, source in sources.items():
            target = torch.empty_like(source, requires_grad=False)
            space.get(key, target).wait()
            assert torch.equal(target, source), key
            assert space.size(key) == source.nbytes
            space.put(key, source).wait()
    array = np.arange(10_000, dtype="f2").reshape(100, 100)
    back = np.empty_like(array)
    space.put("array", array).wait()
    space.get("array", back).wait()
    np.testing.assert_array_equal(back, array)


def test_memory_that_is_not_one_stretch_is_refused(space):
    space.put("key", bytes(100)).wait()
    for wrong in (torch.zeros(10, 10)[:, ::2], None, 5, "text", torch.zeros(5, device="meta")):
        with pytest.raises((ValueError, TypeError)):
            space.put("key", wrong)
        with pytest.raises((ValueError, TypeError)):
            space.get("key", wrong)
    with pytest.raises((ValueError, TypeError, BufferError)):
        space.get("key", bytes(100))
    assert got(space, "key") == bytes(100)


@pytest.mark.parametrize("key", ["", "a/b", "../../x", "\0", "\n" * 3, "ключ", "x" * 100_000])
def test_any_text_is_a_key(space, key):
    space.put(key, b"one").wait()
    space.put(key + "!", b"two").wait()
    assert got(space, key) == b"one"
    assert key in space and key + "?" not in space
    assert len(os.listdir(space.directories[0])) == 2
    assert space.drop(key) and not space.drop(key)


KEYS = st.sampled_from("abc")
SIZES = st.one_of(
    st.integers(0, 9000),
    st.sampled_from([0, 1, 4095, 4096, 4097, 65536, 300_001, MiB]),
)
DEEDS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["put", "put slowly", "put a buffer"]), KEYS, SIZES),
        st.tuples(
            st.sampled_from(["get", "get a part", "fetch", "prefetch", "drop", "view"]),
            KEYS,
            st.integers(0, 2 * MiB),
        ),
    ),
    max_size=30,
)


class Model:
    """A swap space and a dict that must hold the same."""

    def __init__(self, space, seed):
        self.space = space
        self.dict = {}
        self.random = random.Random(seed)
        self.views = []

    def do(self, deed, key, number):
        if deed.startswith("put"):
            self.put(deed, key, number)
        elif key not in self.dict:
            assert key not in self.space and self.space.size(key) is None
            assert deed == "drop" or self.refused(deed, key)
            assert deed != "drop" or not self.space.drop(key)
        elif deed == "drop":
            assert self.space.drop(key)
            del self.dict[key]
        else:
            getattr(self, deed.replace(" ", "_"))(key, number)

    def refused(self, deed, key):
        call = {
            "get": lambda: self.space.get(key, bytearray()),
            "get a part": lambda: self.space.get(key, bytearray(), 4),
            "fetch": lambda: self.space.fetch(key),
            "prefetch": lambda: self.space.prefetch(key),
            "view": lambda: self.space.view([(key, 0, 0)]),
        }[deed]
        with pytest.raises(FileNotFoundError, match=key):
            call()
        return True

    def put(self, deed, key, size):
        data = self.random.randbytes(size)
        if deed == "put a buffer":
            buffer = self.space.take(size)
            memoryview(buffer)[:] = data
            self.space.put(key, buffer)
        else:
            operation = self.space.put(key, data)
            if deed == "put":
                assert operation.wait() == size
        self.dict[key] = data

    def get(self, key, _):
        assert got(self.space, key) == self.dict[key]

    def get_a_part(self, key, number):
        data = self.dict[key]
        offset = number % (len(data) + 1)
        size = min(number // 3, len(data) - offset)
        assert got(self.space, key, offset, size) == data[offset : offset + size]
        with pytest.raises(InvalidArgument, match=str(len(data))):
            self.space.get(key, bytearray(size + 1), len(data) - size)

    def fetch(self, key, _):
        buffer, operation = self.space.fetch(key)
        operation.wait()
        assert bytes(buffer) == self.dict[key]
        memoryview(buffer)[:] = bytes(len(buffer))  # it is ours: the tensor stays as it is

    def prefetch(self, key, _):
        self.space.prefetch(key)

    def view(self, key, _):
        view = self.space.view([(key, 0, len(self.dict[key]))])
        self.views.append((view, self.dict[key]))
        if len(self.views) > 3:
            self.views.pop(0)

    def check(self):
        for key, data in self.dict.items():
            assert got(self.space, key) == data
        for view, data in self.views:
            assert bytes(view) == data
        stats = self.space.stats()
        assert stats["tensors"] == len(self.dict)
        assert stats["tensor_bytes"] == sum(map(len, self.dict.values()))


@hypothesis.settings(
    max_examples=runs(60),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(deeds=DEEDS, seed=st.integers(0, 1000), folders=st.integers(1, 3))
def test_it_behaves_as_a_dict(tmp_path, deeds, seed, folders):
    directories = [tmp_path / str(i) for i in range(folders)]
    for directory in directories:
        directory.mkdir(exist_ok=True)
    with SwapSpace(directories, buffer_bytes=2 * MiB) as space:
        model = Model(space, seed)
        for deed, key, number in deeds:
            model.do(deed, key, number)
        model.check()


def test_a_part_at_any_offset(space):
    data = random.Random(1).randbytes(MiB + 77)
    for settle in (False, True):
        operation = space.put("key", data)
        if settle:
            operation.wait()
        for offset, size in [(0, 1), (1, 4096), (4095, 2), (4096, MiB - 4096), (MiB, 77)]:
            assert got(space, "key", offset, size) == data[offset : offset + size]
            fetched = space.take(size)
            space.get("key", fetched, offset).wait()
            assert bytes(fetched) == data[offset : offset + size]


def test_reading_into_a_part_of_a_buffer_leaves_the_rest_alone(space):
    """Reads of whole pages must not spill over what somebody else has in the same buffer."""
    space.put("key", b"\1" * 5000).wait()
    buffer = torch.frombuffer(space.take(12288), dtype=torch.uint8)
    buffer.fill_(7)
    space.get("key", buffer[:5000]).wait()
    assert bool((buffer[:5000] == 1).all()) and bool((buffer[5000:] == 7).all())
    buffer.fill_(7)
    space.get("key", buffer[4096 : 4096 + 5000]).wait()
    assert bool((buffer[:4096] == 7).all()) and bool((buffer[9096:] == 7).all())
    space.get("key", buffer[8192:], 100).wait()
    assert bool((buffer[4096:9096] != 9).all()) and bool((buffer[8192:] == 1).all())


def test_a_tensor_may_go_as_soon_as_it_is_put(tmp_path):
    with SwapSpace(tmp_path, buffer_bytes=MiB, **SLOW) as space:
        for i in range(50):
            tensor = torch.full((256 * KiB,), i, dtype=torch.uint8)
            space.put(str(i), tensor)
            del tensor
            torch.full((256 * KiB,), 255, dtype=torch.uint8)
        for i in range(50):
            assert got(space, str(i)) == bytes([i]) * (256 * KiB)


def test_views_of_a_buffer_keep_its_room(space):
    buffer = space.take(4 * MiB)
    tensor = torch.frombuffer(buffer, dtype=torch.float32)[5:]
    del buffer
    gc.collect()
    with pytest.raises(TimeoutError, match="buffer"):
        space.take(1, timeout=0)
    del tensor
    gc.collect()
    assert len(space.take(4 * MiB, timeout=0)) == 4 * MiB
    array = np.asarray(space.take(MiB))
    assert space.stats()["buffer_bytes_used"] == MiB
    del array
    assert space.stats()["buffer_bytes_used"] == 0


def test_buffers_and_views_may_outlive_their_space(tmp_path):
    space = SwapSpace(tmp_path, buffer_bytes=MiB)
    buffer = space.take(MiB)
    memoryview(buffer)[:] = b"\5" * MiB
    space.put("key", buffer)
    view = torch.frombuffer(space.view([("key", 4096, 8192), ("key", 0, 100)]), dtype=torch.uint8)
    tensor = torch.frombuffer(buffer, dtype=torch.uint8)
    space.close()
    del space, buffer
    gc.collect()
    assert bool((tensor == 5).all()) and bool((view == 5).all())
    view.fill_(3)
    tensor.fill_(4)
    assert view.sum() == 3 * 8292
    assert os.listdir(next(tmp_path.iterdir())) == []


def test_a_view_stays_as_it_was(space):
    space.put("key", b"\1" * 10_000)
    view = space.view([("key", 0, 10_000)])
    for i in range(2, 10):
        space.put("key", bytes([i]) * 10_000).wait()
        space.put("other", bytes([i]) * 10_000).wait()
    space.drop("key")
    space.put("other", b"\0" * 10_000).wait()
    assert bytes(view) == b"\1" * 10_000
    memoryview(view)[:5] = b"mine!"
    assert bytes(view)[:5] == b"mine!"
    for parts in [
        [("key", 0, 1)],
        [("other", 0, 10_001)],
        [("other", 1, 5)],
        [("other", 0, 5), ("other", 0, 5)],
        [("other", 0)],
        [5],
    ]:
        with pytest.raises((OSError, TypeError)):
            space.view(parts)


def test_prefetched_tensors_are_not_read_twice_and_give_way(tmp_path):
    with SwapSpace(tmp_path, buffer_bytes=4 * MiB) as space:
        for i in range(6):
            space.put(str(i), bytes([i]) * MiB).wait()
        assert all(space.prefetch(str(i)) for i in range(4))
        assert not space.prefetch("4")
        before = space.stats()["read_bytes"]
        buffer, operation = space.fetch("3")
        operation.wait()
        assert bytes(buffer) == b"\3" * MiB
        assert space.stats()["read_bytes"] <= before + 4 * MiB
        assert space.stats()["prefetched"] == 1
        room = space.take(3 * MiB)
        assert space.stats()["prefetches_in_vain"] == 3
        del room, buffer
        assert got(space, "0") == b"\0" * MiB


def test_prefetching_for_a_long_time_takes_no_memory(tmp_path):
    """Long keys make it plain if any of them are kept."""
    with SwapSpace(tmp_path, buffer_bytes=MiB) as space:
        key = "k" * 100_000
        space.put(key, bytes(4096)).wait()

        def work(count):
            for _ in range(count):
                assert space.prefetch(key)
                space.fetch(key)[1].wait()

        work(200)
        before = resident()
        work(2000)
        assert resident() < before + 50 * MiB


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_errors_name_the_key_and_the_numbers(space):
    space.put("small", bytes(10)).wait()
    with pytest.raises(FileNotFoundError, match="'missing'"):
        space.get("missing", bytearray(1))
    with pytest.raises(InvalidArgument, match="'small'.*11 bytes at offset 0.*10 bytes"):
        space.get("small", bytearray(11))
    with pytest.raises(InvalidArgument, match=f"{4 * MiB}"):
        space.take(4 * MiB + 1)
    space.put("large", torch.zeros(5 * MiB, dtype=torch.uint8)).wait()
    with pytest.raises(InvalidArgument, match=f"{4 * MiB}"):
        space.fetch("large")
    assert not space.prefetch("large")
    for wrong in (-1, 1.5, "1", None):
        with pytest.raises((InvalidArgument, TypeError, ValueError, OverflowError)):
            space.take(wrong)
        with pytest.raises((InvalidArgument, TypeError, ValueError, OverflowError)):
            space.get("small", bytearray(1), wrong)
    for timeout in (float("nan"), "soon"):
        with pytest.raises((InvalidArgument, TypeError)):
            space.take(1, timeout=timeout)
    assert len(space.take(0)) == 0
    assert len(space.take(4 * MiB, timeout=-1)) == 4 * MiB


def test_a_closed_space_says_so(tmp_path):
    space = SwapSpace(tmp_path, buffer_bytes=MiB)
    space.put("key", b"data")
    assert not space.closed and "1 tensors, 4 bytes" in repr(space)
    space.close()
    space.close()
    assert space.closed and "closed" in repr(space)
    for call in [
        lambda: space.put("key", b""),
        lambda: space.get("key", bytearray()),
        lambda: space.fetch("key"),
        lambda: space.prefetch("key"),
        lambda: space.take(1),
        lambda: space.drop("key"),
        lambda: space.view([("key", 0, 1)]),
        lambda: space.size("key"),
        lambda: "key" in space,
        lambda: space.reserve(1),
        space.stats,
    ]:
        with pytest.raises(InvalidArgument, match="closed"):
            call()


def test_directories_that_will_not_do_are_named(tmp_path):
    missing, file = tmp_path / "missing", tmp_path / "file"
    file.write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="make it.*missing"):
        SwapSpace(missing)
    with pytest.raises(NotADirectoryError, match="not a directory.*file"):
        SwapSpace(file)
    for wrong in ([], "", "\0", [tmp_path, missing]):
        with pytest.raises((OSError, ValueError)):
            SwapSpace(wrong, buffer_bytes=MiB)
    for wrong in (5, None, [5]):
        with pytest.raises(TypeError):
            SwapSpace(wrong)
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / f"tensorferry-swap-{os.geteuid()}").symlink_to(tmp_path)
    with pytest.raises(OSError, match="link"):
        SwapSpace(linked)
    gc.collect()
    for shared in tmp_path.glob("tensorferry-swap-*"):
        assert os.listdir(shared) == []  # also of those that failed half way


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_a_directory_of_somebody_else_is_refused(tmp_path):
    let_others_in(tmp_path)
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "tensorferry-swap-65534").mkdir(mode=0o777)
    taken.chmod(0o777)
    out = check_python(
        """
        import logging, os, sys
        from tensorferry import SwapSpace
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
        for directory in sys.argv[1:]:
            try:
                SwapSpace(directory, buffer_bytes=1 << 20)
            except PermissionError as error:
                print(error)
        """,
        tmp_path,
        taken,
    )
    assert "no permission to write" in out and "belongs to user 0" in out


def test_files_are_only_for_their_owner(tmp_path):
    os.umask(os.umask(0o777) & 0)
    with SwapSpace(tmp_path, buffer_bytes=MiB, run="../job 7", rank=3) as space:
        space.put("key", b"secret").wait()
        own = space.directories[0]
        assert os.path.basename(own).startswith("___job_7.3.")
        assert stat.S_IMODE(os.stat(own).st_mode) == 0o700
        assert stat.S_IMODE(os.stat(os.path.dirname(own)).st_mode) == 0o700
        for name in os.listdir(own):
            assert stat.S_IMODE(os.stat(f"{own}/{name}").st_mode) == 0o600
    assert not os.path.exists(own)


def test_tensors_are_spread_over_all_directories(tmp_path):
    directories = [tmp_path / name for name in "abc"]
    for directory in directories:
        directory.mkdir()
    with SwapSpace(directories, buffer_bytes=MiB) as space:
        data = random.Random(5).randbytes(12 * MiB + 5)
        space.put("key", data).wait()
        assert len(space.directories) == 3
        for directory, own in zip(directories, space.directories):
            assert own.startswith(str(directory))
            used = os.stat(f"{own}/tensors").st_blocks * 512
            assert used >= 4 * MiB
        drives = space.stats()["drives"]
        assert [drive["directory"] for drive in drives] == space.directories
        pages = -(-len(data) // mmap.PAGESIZE) * mmap.PAGESIZE
        assert sum(drive["stored_bytes"] for drive in drives) == pages
        for drive in drives:  # one device under all three
            assert abs(drive["share"] - 1 / 3) < 1e-6 and drive["stored_bytes"] >= 4 * MiB
            assert drive["bytes_per_second"] >= 0
        assert got(space, "key") == data
        assert got(space, "key", 4 * MiB - 3, 5 * MiB) == data[4 * MiB - 3 : 9 * MiB - 3]
        assert bytes(space.view([("key", 0, len(data))])) == data


def test_sizes_that_no_drive_and_no_memory_has_are_refused(tmp_path):
    # In a process of its own: a view whose sizes wrap was once mapped over whatever was there.
    out = check_python(
        """
        import sys
        import tensorferry

        MiB, quarter = 1 << 20, 1 << 62
        space = tensorferry.SwapSpace(sys.argv[1], buffer_bytes=MiB)
        space.put("key", bytes(2 * MiB)).wait()
        sizes = [2 * MiB, quarter, quarter, quarter, quarter - 2 * MiB + 4096]
        calls = {
            "view": lambda: space.view([("key", 0, size) for size in sizes]),
            "reserve": lambda: space.reserve((1 << 63) - 1),
            "take": lambda: space.take((1 << 63) - 1),
            "open": lambda: tensorferry.SwapSpace(sys.argv[1], buffer_bytes=(1 << 63) - 1),
            "lock": lambda: tensorferry.PinnedBuffer((1 << 63) - 1),
        }
        for name, call in calls.items():
            try:
                call()
            except (OSError, MemoryError, ValueError) as error:
                print(name, "refused")
        """,
        tmp_path,
    )
    assert out.split("\n")[:-1] == [
        f"{name} refused" for name in ("view", "reserve", "take", "open", "lock")
    ]


def test_clean_tensors_are_not_written_again(space):
    space.put("key", bytes(MiB)).wait()
    for _ in range(5):
        buffer, operation = space.fetch("key")
        operation.wait()
        del buffer, operation
    assert space.stats()["written_bytes"] == MiB
