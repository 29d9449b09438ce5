"""tensorferry.checkpoint writes what torch.save writes, and loads what torch.load loads."""

import gc
import io
import logging
import mmap
import os
import pickle
import sys
import threading
import weakref
import zipfile

import pytest

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")

from checkpoint_objects import PLAIN_DTYPES, SAFE, UNSAFE, of_dtype
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from programs import check_python, runs
from tensorferry import checkpoint
from tensorferry._shared_handle import shared_handle
from torch.utils.serialization import config
from warm_python import WARM_PYTHON

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of things it will remove

ALL = SAFE | UNSAFE


def bytes_of(obj, folder, name, save, **options):
    path = folder / save.__module__.split(".")[0] / name
    path.parent.mkdir(exist_ok=True, parents=True)
    save(obj, path, **options)
    return path.read_bytes()


def assert_same_file(obj, folder, name="model.pt", **options):
    mine = bytes_of(obj, folder, name, checkpoint.save, **options)
    theirs = bytes_of(obj, folder, name, torch.save, **options)
    assert len(mine) == len(theirs)
    assert mine == theirs, next(i for i in range(len(mine)) if mine[i] != theirs[i])


def content(obj):
    """An object as bytes, with its types, its shared storages and its values."""
    file = io.BytesIO()
    torch.save(obj, file)
    return file.getvalue()


@pytest.mark.parametrize("kind", ALL)
def test_a_file_has_the_bytes_of_torch_save(tmp_path, kind):
    assert_same_file(ALL[kind](), tmp_path)


@pytest.mark.parametrize("crc", [True, False])
@pytest.mark.parametrize("alignment", [1, 64, 512, 4096])
def test_the_settings_of_torch_hold(tmp_path, alignment, crc):
    with config.patch({"save.storage_alignment": alignment, "save.compute_crc32": crc}):
        for kind in ("training", "views", "larger than a window", "number"):
            assert_same_file(ALL[kind](), tmp_path)


@pytest.mark.parametrize(
    "name", ["model", "model.pt", "a.b.c.pt", "with space.bin", "größe.pt", "x" * 240, "-", "🎉"]
)
def test_the_name_of_the_file_is_in_it(tmp_path, name):
    assert_same_file(SAFE["training"](), tmp_path, name)


def test_letters_outside_ascii_in_the_folder(tmp_path):
    assert_same_file(SAFE["views"](), tmp_path / "größe")


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_protocols_of_pickle(tmp_path, protocol):
    assert_same_file(SAFE["training"](), tmp_path, pickle_protocol=protocol)


class OwnPickle:
    """A pickle module of the user's."""

    __name__ = "own_pickle"

    class Pickler(pickle._Pickler):
        pass


def test_a_pickle_module_of_the_user(tmp_path):
    assert_same_file(SAFE["training"](), tmp_path, pickle_module=OwnPickle)


@pytest.mark.parametrize("crc", [True, False])
def test_storages_of_other_devices_pass_through_memory_of_the_cpu(tmp_path, monkeypatch, crc):
    from tensorferry.checkpoint import torch_writer

    monkeypatch.setattr(torch_writer, "_elsewhere", lambda piece, _: piece.storage is not None)
    with config.patch("save.compute_crc32", crc):
        assert_same_file([torch.randn(count) for count in (3, 30 << 20, 70, 900)], tmp_path)


def test_torch_writes_data_after_a_save_that_failed(tmp_path):
    with pytest.raises((TypeError, AttributeError)):
        checkpoint.save([torch.ones(3), threading.Lock()], tmp_path / "model.pt")
    torch.save(torch.arange(5), tmp_path / "model.pt")
    assert torch.equal(torch.load(tmp_path / "model.pt"), torch.arange(5))


@pytest.mark.skipif("TENSORFERRY_SOAK" not in os.environ, reason="takes a minute and 15 GB")
def test_a_storage_of_more_than_four_gibibytes(tmp_path):
    large = torch.zeros(5 << 27, dtype=torch.int64)
    large[::1000] = torch.arange(len(large[::1000]))
    assert_same_file([torch.arange(9), large, torch.arange(7)], tmp_path)
    first, second, last = checkpoint.load(tmp_path / "tensorferry/model.pt")
    assert torch.equal(second, large) and len(first) == 9 and len(last) == 7


TENSORS = st.builds(
    lambda dtype, count, begin: of_dtype(dtype, count)[begin:],
    st.sampled_from(PLAIN_DTYPES),
    st.integers(0, 3000),
    st.integers(0, 10),
)
OBJECTS = st.recursive(
    TENSORS | st.integers() | st.text(max_size=5) | st.none() | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
        | st.tuples(inner, inner)
        | inner.map(lambda one: [one, one])
    ),
    max_leaves=12,
)


@given(obj=OBJECTS, alignment=st.sampled_from([64, 4096]), crc=st.booleans())
@settings(
    max_examples=runs(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_object_has_the_bytes_of_torch_save_and_comes_back(tmp_path, obj, alignment, crc):
    with config.patch({"save.storage_alignment": alignment, "save.compute_crc32": crc}):
        assert_same_file(obj, tmp_path)
    file = tmp_path / "tensorferry/model.pt"
    assert content(checkpoint.load(file)) == content(torch.load(file))


@pytest.mark.parametrize("kind", ALL)
def test_a_file_of_torch_is_loaded_as_torch_loads_it(tmp_path, kind):
    file = tmp_path / "model.pt"
    torch.save(ALL[kind](), file)
    safe = kind in SAFE
    mine, theirs = (load(file, weights_only=safe) for load in (checkpoint.load, torch.load))
    assert type(mine) is type(theirs)
    assert content(mine) == content(theirs)


@pytest.mark.parametrize(
    "place",
    [
        "cpu",
        torch.device("cpu"),
        {"cpu": "cpu"},
        {"cuda:0": "cpu"},
        lambda storage, location: storage,
        lambda storage, location: None,
        lambda storage, location: storage.clone(),
    ],
)
def test_every_form_of_map_location(tmp_path, place):
    file = tmp_path / "model.pt"
    for kind in ("views", "training", "larger than a window"):
        obj = ALL[kind]()
        torch.save(obj, file)
        assert content(checkpoint.load(file, map_location=place)) == content(obj)


@pytest.mark.parametrize("place", ["meta", {"cpu": "meta"}, torch.device("meta")])
def test_to_the_meta_device(tmp_path, place):
    torch.save(SAFE["views"](), tmp_path / "model.pt")
    loaded = checkpoint.load(tmp_path / "model.pt", map_location=place)
    assert {tensor.device.type for tensor in loaded.values()} == {"meta"}
    assert loaded["part"].shape == (10, 25)


def test_a_function_of_the_user_gets_storages_with_their_bytes(tmp_path):
    tensors = [torch.randn(count) for count in (5, 3 << 20, 7)]
    torch.save(tensors, tmp_path / "model.pt")
    seen = []

    def place(storage, location):
        memory = torch.empty(0, dtype=torch.uint8).set_(storage)
        seen.append((memory.numpy().tobytes(), location))

    checkpoint.load(tmp_path / "model.pt", map_location=place)
    assert seen == [(tensor.numpy().tobytes(), "cpu") for tensor in tensors]


def test_a_device_that_is_not_here(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    torch.save(torch.eye(5).to_sparse(), tmp_path / "model.pt")
    with pytest.raises(RuntimeError, match="CUDA"):
        checkpoint.load(tmp_path / "model.pt", map_location="cuda")


def test_a_class_that_is_not_allowed(tmp_path):
    torch.save(UNSAFE["class"](), tmp_path / "model.pt")
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        checkpoint.load(tmp_path / "model.pt")


def test_loaded_tensors_own_their_memory(tmp_path):
    file = tmp_path / "model.pt"
    tensor = torch.randn(1 << 20)
    checkpoint.save(tensor, file)
    loaded = checkpoint.load(file)
    file.write_bytes(bytes(file.stat().st_size))
    assert torch.equal(loaded, tensor)
    loaded.zero_()
    loaded.clone().resize_(2 << 20)


def test_loaded_tensors_lie_in_the_memory_of_the_file(tmp_path):
    """So the drive fills them in place: no copy, and huge pages where there are any."""
    file = tmp_path / "model.pt"
    tensors = [torch.randn(300_001), torch.randn(70), torch.randn(1 << 20)]
    checkpoint.save(tensors, file)
    with zipfile.ZipFile(file) as archive:
        offsets = [archive.getinfo(f"model/data/{i}").header_offset for i in range(3)]
    handle = shared_handle()
    before = handle.stats()["bounced_bytes"]
    loaded = checkpoint.load(file)
    assert handle.stats()["bounced_bytes"] - before < 3 * mmap.PAGESIZE
    assert all(torch.equal(a, b) for a, b in zip(loaded, tensors))
    distance = loaded[2].data_ptr() - loaded[0].data_ptr()
    assert abs(distance - (offsets[2] - offsets[0])) < 128  # names and padding differ in length


def test_the_memory_of_a_large_tensor_goes_with_it(tmp_path):
    file = tmp_path / "model.pt"
    checkpoint.save([torch.ones(16 << 20), torch.ones(5)], file)
    loaded = checkpoint.load(file)
    before = resident_bytes()
    kept = loaded.pop()
    del loaded
    assert resident_bytes() < before - (60 << 20)
    assert torch.equal(kept, torch.ones(5))


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def test_nothing_keeps_the_tensors(tmp_path):
    """Memory is free as soon as the program lets go, before Python looks for cycles."""
    file = tmp_path / "model.pt"
    gc.collect()
    gc.disable()
    try:
        array = numpy.ones(1000)
        gone = weakref.ref(array)
        tensors = [torch.from_numpy(array)]
        checkpoint.save(tensors, file)
        del array, tensors
        assert gone() is None
        checkpoint.save(torch.ones(32 << 20), file)
        before = resident_bytes()
        loaded = checkpoint.load(file)
        assert resident_bytes() > before + (100 << 20)
        del loaded
        assert resident_bytes() < before + (28 << 20)
    finally:
        gc.enable()


def test_no_data_is_read_in_fake_tensor_mode(tmp_path):
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch.save(SAFE["views"](), tmp_path / "model.pt")
    with FakeTensorMode():
        loaded = checkpoint.load(tmp_path / "model.pt")
    assert loaded["base"].shape == (100, 50)


class Loads:
    """Loads another file while it is loaded itself."""

    def __init__(self, file, load):
        self.file, self.load = file, load

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.inner = self.load(self.file)


@pytest.mark.parametrize("load", [checkpoint.load, torch.load])
def test_a_load_inside_a_load(tmp_path, load):
    inner, outer = tmp_path / "inner.pt", tmp_path / "outer.pt"
    torch.save(torch.arange(1000), inner)
    torch.save([torch.ones(5), Loads(inner, load), torch.ones(7)], outer)
    first, loads, last = checkpoint.load(outer, weights_only=False)
    assert torch.equal(loads.inner, torch.arange(1000))
    assert torch.equal(first, torch.ones(5)) and torch.equal(last, torch.ones(7))


def test_threads_save_and_load_beside_each_other(tmp_path):
    failures = []

    def work(number):
        try:
            file = tmp_path / f"{number}.pt"
            for step in range(5):
                obj = [torch.full((300_000,), number * 10 + step), torch.arange(number)]
                checkpoint.save(obj, file)
                assert content(checkpoint.load(file)) == content(obj)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_child_saves_and_loads_after_its_parent_has(tmp_path):
    check_python(
        """
        import os, sys, warnings, torch
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)  # OpenMP does not survive a fork
        from tensorferry import checkpoint
        path = sys.argv[1]
        checkpoint.save(torch.ones(1 << 20), path)
        child = os.fork()
        if child == 0:
            checkpoint.save(torch.zeros(1 << 20), path)
            os._exit(0 if checkpoint.load(path).sum() == 0 else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert checkpoint.load(path).sum() == 0
        """,
        tmp_path / "model.pt",
        python=WARM_PYTHON,
    )


@pytest.mark.parametrize("size", [0, 100, 10 << 20])
def test_progress_rises_to_the_whole(tmp_path, size):
    file = tmp_path / "model.pt"
    saved, loaded = [], []
    checkpoint.save(torch.ones(size), file, progress=lambda *report: saved.append(report))
    checkpoint.load(file, progress=lambda *report: loaded.append(report))
    for reports, total in ((saved, file.stat().st_size), (loaded, 4 * size)):
        assert [done for done, _ in reports] == sorted({done for done, _ in reports})
        assert reports[-1] == (total, total)


def test_a_bar_of_progress(tmp_path, capsys):
    checkpoint.save(torch.ones(100), tmp_path / "model.pt", progress=True)
    checkpoint.load(tmp_path / "model.pt", progress=True)
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("100%") == 2 and said.err.endswith("\n")
    with pytest.raises(TypeError, match="progress"):
        checkpoint.save(1, tmp_path / "model.pt", progress="yes")


# What torch does alone


def legacy(file):
    torch.save([torch.ones(3)], file, _use_new_zipfile_serialization=False)


def packed(file):
    torch.save([torch.ones(3000)], file)
    again(file, lambda archive, info: (info.filename, archive.read(info), zipfile.ZIP_DEFLATED))


def stored_anew(file):
    torch.save([torch.ones(3000)], file)
    again(file, lambda archive, info: (info.filename, archive.read(info), zipfile.ZIP_STORED))


def again(file, change):
    with zipfile.ZipFile(file) as archive:
        records = [change(archive, info) for info in archive.infolist()]
    with zipfile.ZipFile(file, "w") as archive:
        for name, data, method in records:
            archive.writestr(name, data, method)


@pytest.mark.parametrize("write", [legacy, packed])
def test_other_formats_go_to_torch_and_the_log_says_so(tmp_path, caplog, write):
    file = tmp_path / "model.pt"
    write(file)
    with caplog.at_level(logging.INFO, "tensorferry"):
        assert content(checkpoint.load(file)) == content(torch.load(file))
    assert str(file) in caplog.text and "torch.load" in caplog.text


def test_an_archive_that_another_program_has_packed_anew(tmp_path, caplog):
    file = tmp_path / "model.pt"
    stored_anew(file)
    with caplog.at_level(logging.INFO, "tensorferry"):
        assert torch.equal(checkpoint.load(file)[0], torch.ones(3000))
    assert caplog.text == ""


def test_file_like_objects_go_to_torch(caplog):
    file = io.BytesIO()
    with caplog.at_level(logging.INFO, "tensorferry"):
        checkpoint.save(torch.arange(5), file)
        file.seek(0)
        assert torch.equal(checkpoint.load(file), torch.arange(5))
    assert "torch.save" in caplog.text and "torch.load" in caplog.text


@pytest.mark.parametrize("by_setting", [True, False])
def test_mapping_goes_to_torch(tmp_path, caplog, by_setting):
    file = tmp_path / "model.pt"
    checkpoint.save(torch.arange(5), file)
    with caplog.at_level(logging.INFO, "tensorferry"), config.patch("load.mmap", by_setting):
        loaded = checkpoint.load(file, mmap=None if by_setting else True)
    assert torch.equal(loaded, torch.arange(5)) and "mapped" in caplog.text


def test_torchscript_goes_to_torch(tmp_path, caplog):
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "model.pt")
    with caplog.at_level(logging.INFO, "tensorferry"):
        checkpoint.load(tmp_path / "model.pt", weights_only=False)
    assert "TorchScript" in caplog.text


def test_the_other_byte_order_goes_to_torch(tmp_path, monkeypatch, caplog):
    file = tmp_path / "model.pt"
    monkeypatch.setattr(sys, "byteorder", "big")
    torch.save(torch.arange(5), file)
    monkeypatch.undo()
    with caplog.at_level(logging.INFO, "tensorferry"):
        assert torch.equal(checkpoint.load(file), torch.load(file))
    assert "big-endian" in caplog.text


def test_a_file_without_checksums_is_loaded(tmp_path):
    with config.patch("save.compute_crc32", False):
        checkpoint.save(SAFE["training"](), tmp_path / "model.pt")
    mine = checkpoint.load(tmp_path / "model.pt")
    assert content(mine) == content(torch.load(tmp_path / "model.pt"))


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(IsADirectoryError) as caught:
        checkpoint.load(tmp_path)
    assert caught.value.filename == str(tmp_path)


def test_a_missing_file_and_a_missing_folder(tmp_path):
    with pytest.raises(FileNotFoundError):
        checkpoint.load(tmp_path / "model.pt")
    with pytest.raises(FileNotFoundError):
        checkpoint.save(1, tmp_path / "nowhere/model.pt")
    with pytest.raises(IsADirectoryError):
        checkpoint.save(1, tmp_path)


def test_mode_and_symbolic_links_stay(tmp_path):
    target, link = tmp_path / "target.pt", tmp_path / "link.pt"
    target.write_bytes(b"old")
    target.chmod(0o640)
    link.symlink_to(target)
    checkpoint.save(torch.ones(3), link)
    assert link.is_symlink() and target.stat().st_mode & 0o777 == 0o640
    assert torch.equal(checkpoint.load(target), torch.ones(3))
    assert sorted(os.listdir(tmp_path)) == ["link.pt", "target.pt"]
