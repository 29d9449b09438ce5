"""safe_open reads ahead for a program that asks in the order of the file; parts of a file in one
read."""

import gc
import mmap
import os
import random
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from tensorferry import _core  # noqa: E402
from tensorferry.safetensors import SafetensorError, frameworks, safe_open  # noqa: E402
from tensorferry.safetensors.numpy import load_file as load_arrays  # noqa: E402
from tensorferry.safetensors.opened import OpenFile  # noqa: E402
from tensorferry.safetensors.read_ahead import ReadAhead  # noqa: E402
from tensorferry.safetensors.torch import save_file  # noqa: E402

MIB = 1 << 20
WINDOW = 16 * MIB


@pytest.fixture
def reads(monkeypatch):
    """The names of each read of a file."""
    seen = []
    start = OpenFile._start

    def watched(self, tensors):
        seen.append([name for name, *_ in tensors])
        return start(self, tensors)

    monkeypatch.setattr(OpenFile, "_start", watched)
    return seen


def made(path, count=300, longest=MIB, **options):
    """A file whose tensors hold their numbers."""
    dice = random.Random(count)
    tensors = {
        f"{index:04}": torch.full((dice.randrange(1, longest),), index % 251, dtype=torch.uint8)
        for index in range(count)
    }
    save_file(tensors, path, **options)
    return tensors


def test_tensors_in_the_order_of_the_file_are_read_together(tmp_path, reads):
    path = tmp_path / "model.safetensors"
    tensors = made(path)
    with safe_open(path, "pt") as file:
        for name in file.offset_keys():
            assert torch.equal(file.get_tensor(name), tensors[name])
    windows = sum(tensor.nbytes for tensor in tensors.values()) / WINDOW
    assert len(reads) <= 2 + 1.1 * windows + 1
    assert sorted(name for names in reads for name in names) == sorted(tensors), "each once"


def test_whole_slices_are_read_ahead_too(tmp_path, reads):
    path = tmp_path / "model.safetensors"
    tensors = made(path, 100, 10_000)
    with safe_open(path, "pt") as file:
        for name in file.offset_keys():
            assert torch.equal(file.get_slice(name)[:], tensors[name])
    assert len(reads) < 10


@pytest.mark.parametrize("step", [-1, 2, 7])
def test_other_orders_read_what_is_asked_for_and_nothing_else(tmp_path, reads, step):
    path = tmp_path / "model.safetensors"
    made(path, 60, 10_000)
    with safe_open(path, "pt") as file:
        names = file.offset_keys()[::step]
        for name in names:
            file.get_tensor(name)
    assert reads == [[name] for name in names]


def test_a_program_that_stops_has_read_little_ahead(tmp_path, reads):
    path = tmp_path / "model.safetensors"
    tensors = made(path, 100, 2 * MIB)
    with safe_open(path, "pt") as file:
        for name in file.offset_keys()[:5]:
            file.get_tensor(name)
    ahead = sum(tensors[name].nbytes for names in reads for name in names)
    assert ahead <= 2 * WINDOW + 4 * MIB


def test_tensors_outlive_the_file_and_what_was_read_with_them(tmp_path):
    path = tmp_path / "model.safetensors"
    tensors = made(path)
    with safe_open(path, "pt") as file:
        kept = {name: file.get_tensor(name) for name in file.offset_keys() if int(name) < 200}
    for name, tensor in kept.items():
        assert torch.equal(tensor, tensors[name])


def test_a_file_closes_with_its_last_user(tmp_path):
    path = tmp_path / "model.safetensors"
    made(path, 20, 10_000)
    gc.disable()
    try:
        file = safe_open(path, "pt")
        kept = [file.get_tensor(name) for name in file.offset_keys()]
        assert str(path) in open_files()
        del file
        assert str(path) not in open_files()
    finally:
        gc.enable()
    assert len(kept) == 20


def open_files():
    folder = "/proc/self/fd"
    links = [os.path.join(folder, name) for name in os.listdir(folder)]
    return [os.readlink(link) for link in links if os.path.lexists(link)]


def test_a_short_tensor_keeps_no_other_alive(tmp_path, monkeypatch):
    maps = []

    class Seen(frameworks.Arena):
        def __init__(self, *args):
            super().__init__(*args)
            maps.append(weakref.ref(self._map))

    monkeypatch.setattr(frameworks, "Arena", Seen)
    path = tmp_path / "model.safetensors"
    made(path)
    with safe_open(path, "pt") as file:
        found = [file.get_tensor(name) for name in file.offset_keys()]
    assert sum(one() is not None for one in maps) > 5
    short = [tensor for tensor in found if tensor.nbytes < 256 << 10]
    assert len(short) > 50
    del found, file
    assert all(one() is None for one in maps)


def test_drives_read_straight_into_the_memory_of_parts(tmp_path):
    path = tmp_path / "model.safetensors"
    made(path, 50, 300_000)
    rows = _core.SafetensorsFile(path).tensors
    with safe_open(path, "pt") as file:
        found = file.get_tensors([row[0] for row in rows[::3]])
    for name, _, _, _, offset, _ in rows[::3]:
        assert (found[name].data_ptr() - offset) % mmap.PAGESIZE == 0


def test_damage_is_told_of_the_tensor_that_has_it(tmp_path):
    path = tmp_path / "model.safetensors"
    tensors = made(path, 40, 10_000, checksums=True)
    with safe_open(path, "pt") as file:
        names = file.offset_keys()
    with open(path, "r+b") as raw:
        raw.seek(-1, os.SEEK_END)
        raw.write(b"\xff")
    with safe_open(path, "pt", verify=True) as file:
        for name in names[:-1]:
            assert torch.equal(file.get_tensor(name), tensors[name])
        with pytest.raises(SafetensorError, match=names[-1]):
            file.get_tensor(names[-1])


def test_threads_share_what_is_read_ahead(tmp_path, reads):
    path = tmp_path / "model.safetensors"
    tensors = made(path, 400, 200_000)
    with safe_open(path, "pt") as file, ThreadPoolExecutor(4) as pool:
        names = file.offset_keys()
        for name, tensor in zip(names, pool.map(file.get_tensor, names)):
            assert torch.equal(tensor, tensors[name])
    assert len(reads) < 200


def test_a_forked_child_reads_for_itself(tmp_path):
    path = tmp_path / "model.safetensors"
    tensors = made(path, 100, 100_000)
    with safe_open(path, "pt") as file:
        names = file.offset_keys()
        for name in names[:10]:
            file.get_tensor(name)
        child = os.fork()
        if child == 0:
            try:
                for name in names[10:20]:
                    assert bytes(file.get_tensor(name).numpy()) == bytes(tensors[name].numpy())
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(file.get_tensor(names[10]), tensors[names[10]])


class Fake:
    """An operation that has ended, and reads of tensors that are their indexes."""

    def __init__(self):
        self.windows = []
        self.cancelled = 0

    def start(self, first, end):
        self.windows.append((first, end))
        return list(range(first, end)), self

    def wait(self):
        pass

    def cancel(self):
        self.cancelled += 1


def test_windows_follow_the_program_also_past_tensors_that_it_skips():
    fake = Fake()
    ahead = ReadAhead([4 * MIB] * 40)
    taken = [ahead.take(index, fake.start) for index in range(40) if index % 10 != 7]
    assert [memory for memory in taken if memory is not None] == [
        index for index in range(2, 40) if index % 10 != 7
    ]
    assert fake.windows == [(2 + 4 * i, min(6 + 4 * i, 40)) for i in range(10)]
    assert fake.cancelled == 0


def test_a_jump_forgets_what_was_read_ahead():
    fake = Fake()
    ahead = ReadAhead([4 * MIB] * 40)
    assert [ahead.take(index, fake.start) for index in (0, 1, 2, 30, 31, 32)] == [
        None,
        None,
        2,
        None,
        None,
        32,
    ]
    assert fake.windows == [(2, 6), (6, 10), (32, 36), (36, 40)]
    assert fake.cancelled == 2


def test_a_tensor_longer_than_a_window_is_read_by_itself():
    fake = Fake()
    ahead = ReadAhead([1, 1, 1, 17 * MIB, 1, 1])
    assert [ahead.take(index, fake.start) for index in range(6)] == [None, None, 2, None, 4, 5]
    assert fake.windows == [(2, 3), (4, 6)]


@pytest.mark.parametrize("framework", ["pt", "np"])
def test_some_tensors_are_one_read_in_the_order_of_the_file(tmp_path, reads, framework):
    path = tmp_path / "model.safetensors"
    tensors = made(path, 50, 300_000)
    with safe_open(path, framework) as file:
        names = file.offset_keys()[::2]
        found = file.get_tensors(reversed(names))
        assert list(found) == names
        assert file.get_tensors([]) == {}
        with pytest.raises(SafetensorError, match="does not contain tensor nobody"):
            file.get_tensors(["nobody"])
    assert reads == [names]
    for name, tensor in found.items():
        assert bytes(memoryview(tensor.numpy() if framework == "pt" else tensor)) == bytes(
            tensors[name].numpy()
        )
    assert load_arrays(path).keys() == tensors.keys()
