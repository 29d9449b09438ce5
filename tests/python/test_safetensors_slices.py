"""get_slice() beside that of the package safetensors: the same parts, the same refusals."""

import functools

import pytest

pytest.importorskip("safetensors")
np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
pytest.importorskip("hypothesis")

import safetensors
import tensorferry.safetensors
import tensorferry.safetensors.torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from tensorferry._shared_handle import shared_handle

ours = tensorferry.safetensors

SHAPES = [(), (0,), (1,), (10,), (10, 5), (4, 0, 3), (3, 4, 5), (1, 2, 1, 3)]
MODES = [("pt", "mmap"), ("pt", "pread"), ("np", "mmap"), ("np", "pread")]

numbers = some.integers(-12, 12)
ends = some.none() | numbers
steps = some.none() | some.integers(-1, 4)
items = (
    numbers
    | some.builds(slice, ends, ends, steps)
    | some.just(...)
    | some.none()
    | some.lists(numbers, max_size=4)
    | some.sampled_from([True, 1.5, "a", np.int64(1), [[0, 1]], [True, False], 1 << 40])
)
indexes = items | some.lists(items, max_size=5).map(tuple)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    tensors = {}
    for shape in SHAPES:
        count = int(np.prod(shape))
        tensors[str(shape)] = torch.arange(count, dtype=torch.float32).reshape(shape)
        tensors[f"{shape} bytes"] = torch.arange(count).to(torch.uint8).reshape(shape)
    path = tmp_path_factory.mktemp("slices") / "x"
    ours.torch.save_file(tensors, path)
    return path


def outcome(function):
    try:
        return function()
    except BaseException as error:  # safetensors panics, which is no Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        return error


def goes_back(index):
    items = index if isinstance(index, tuple) else (index,)
    return any(
        isinstance(item, slice) and item.stop is not None and (item.start or 0) > item.stop
        for item in items
    )


def check(path, framework, backend, shape, index):
    one, other = (
        outcome(lambda: side.safe_open(path, framework, backend=backend).get_slice(shape)[index])
        for side in (ours, safetensors)
    )
    what = (framework, backend, shape, index, one, other)
    if (framework, backend) != ("pt", "mmap") and goes_back(index):
        return  # safetensors takes the length for a huge one; with us nothing is in it
    if not isinstance(other, BaseException):
        assert type(one) is type(other), what
        assert one.shape == other.shape and one.dtype == other.dtype, what
        assert np.array_equal(np.asarray(one), np.asarray(other)), what
    elif type(other).__name__ == "PanicException" or isinstance(other, (MemoryError, SystemError)):
        pass  # it stops before it begins: nothing to learn from it
    else:
        assert type(one) is type(other), what
        if str(index).count("Ellipsis") < 2:  # what torch says of more depends on the dtype
            assert str(one) == str(other), what


@pytest.mark.parametrize("framework, backend", MODES)
@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(shape=some.sampled_from(SHAPES), index=indexes)
def test_any_index_gives_the_same(path, framework, backend, shape, index):
    check(path, framework, backend, str(shape), index)


GOOD = [
    np.s_[:],
    np.s_[...],
    (),
    0,
    -1,
    np.s_[2:7],
    np.s_[2:7:3],
    np.s_[-3:],
    np.s_[:, 1:3],
    np.s_[:, -1],
    np.s_[1, 2],
    np.s_[..., 1],
    np.s_[1:3, ..., ::2],
    np.s_[None, 2:4],
    [],
    [1, 3],
    [-1, 0, 0],
    np.s_[:, [0, 2]],
    np.s_[[0, 2], [1, 1]],
    np.s_[2:2],
    np.s_[7:3],
    np.s_[:20],
]


@pytest.mark.parametrize("index", GOOD, ids=str)
@pytest.mark.parametrize("framework, backend", MODES)
def test_usual_indexes(path, framework, backend, index):
    check(path, framework, backend, "(10, 5)", index)
    check(path, framework, backend, "(10, 5) bytes", index)
    check(path, framework, backend, "(3, 4, 5)", index)


@pytest.mark.parametrize(
    "index", [torch.tensor([0, 2]), torch.ones(10, dtype=torch.bool), np.array([1, 2])], ids=repr
)
def test_tensors_as_indexes(path, index):
    check(path, "pt", "mmap", "(10, 5)", index)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """16 MiB: rows of 64 KiB and columns."""
    tensor = torch.arange(4 << 20, dtype=torch.float32).reshape(256, 16384)
    path = tmp_path_factory.mktemp("large") / "x"
    ours.torch.save_file({"t": tensor, "v": tensor.view(-1)[: 1 << 20].clone()}, path)
    return path, tensor


def bytes_read(function):
    before = shared_handle().stats()["read_bytes"]
    function()
    return shared_handle().stats()["read_bytes"] - before


PARTS = [
    (np.s_[10:20], 10 * 65536),
    (np.s_[7], 65536),
    (np.s_[3, 100:200], 400),
    (np.s_[100:, :], 156 * 65536),
    (np.s_[[3, 6]], 4 * 65536),
    (np.s_[::255], 256 * 65536),
    (np.s_[:, 4096:8192], 256 * 16384),
    (np.s_[64:, 4096:4352], 192 * 1024),
    (np.s_[5:5], 0),
]


@pytest.mark.parametrize("index, most", PARTS, ids=str)
def test_only_the_bytes_that_are_needed_are_read(large, index, most):
    path, tensor = large
    with ours.safe_open(path, "pt") as file:
        part = file.get_slice("t")
        assert bytes_read(lambda: part[index]) <= most
        assert torch.equal(part[index], tensor[index])
        assert part[index].is_contiguous()


def test_tensors_that_follow_each_other_are_read_in_few_requests(tmp_path):
    ours.torch.save_file({f"t{i}": torch.zeros(1024) for i in range(256)}, tmp_path / "x")
    before = shared_handle().stats()["requests"]
    ours.torch.load_file(tmp_path / "x")
    assert shared_handle().stats()["requests"] - before <= 8


def test_columns_that_are_long_are_read_alone(tmp_path):
    tensor = torch.arange(4 << 20, dtype=torch.float32).reshape(8, 2, 1 << 18)
    ours.torch.save_file({"t": tensor}, tmp_path / "x")
    with ours.safe_open(tmp_path / "x", "pt") as file:
        part = file.get_slice("t")
        assert bytes_read(lambda: part[:, 1]) == 8 << 20
        assert torch.equal(part[:, 1], tensor[:, 1])
        assert bytes_read(lambda: part[2:4, :, 1 << 17 :]) == 2 << 20
        assert torch.equal(part[2:4, :, 1 << 17 :], tensor[2:4, :, 1 << 17 :])


def test_a_part_does_not_keep_the_rest_in_memory(large):
    path, tensor = large
    with ours.safe_open(path, "pt") as file:
        part = file.get_slice("t")[::64, :10]
    assert part.untyped_storage().nbytes() == 4 * 10 * 4
    assert torch.equal(part, tensor[::64, :10])


@settings(
    deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(asked=some.dictionaries(some.sampled_from([str(shape) for shape in SHAPES]), indexes))
@pytest.mark.parametrize(("framework", "backend"), MODES)
def test_several_slices_are_what_each_alone_is(path, framework, backend, asked):
    with ours.safe_open(path, framework, backend=backend) as file:
        alone = {
            name: outcome(functools.partial(file.get_slice(name).__getitem__, index))
            for name, index in asked.items()
        }
        together = outcome(lambda: file.get_slices(asked))
        refused = [type(each) for each in alone.values() if isinstance(each, BaseException)]
        if refused:
            assert type(together) is refused[0]
            return
        assert list(together) == sorted(asked, key=file.offset_keys().index)
        for name, one in alone.items():
            assert together[name].dtype == one.dtype
            assert together[name].shape == one.shape
            assert (np.asarray(together[name]) == np.asarray(one)).all()


def test_several_slices_are_one_read_of_their_bytes_alone(tmp_path):
    tensors = {f"t{i}": torch.randn(64, 4096) for i in range(8)}
    path = tmp_path / "x"
    ours.torch.save_file(tensors, path)
    reports = []
    with ours.safe_open(path, "pt", progress=lambda *done: reports.append(done)) as file:
        before = shared_handle().stats()["read_bytes"]
        found = file.get_slices({name: slice(16, 48) for name in reversed(tensors)})
        read = shared_handle().stats()["read_bytes"] - before
        assert file.get_slices({}) == {}
        with pytest.raises(ours.SafetensorError, match="does not contain tensor nobody"):
            file.get_slices({"nobody": slice(1)})
    assert list(found) == list(tensors)
    assert all(torch.equal(found[name], tensors[name][16:48]) for name in tensors)
    asked = sum(part.nbytes for part in found.values())
    assert read == asked
    assert reports[-1] == (asked, asked)


def test_several_slices_of_a_damaged_file_name_the_tensor(tmp_path):
    tensors = {f"t{i}": torch.randn(64, 64) for i in range(4)}
    path = tmp_path / "x"
    ours.torch.save_file(tensors, path, checksums=True)
    bytes_of_file = bytearray(path.read_bytes())
    bytes_of_file[-1] ^= 1
    path.write_bytes(bytes_of_file)
    with ours.safe_open(path, "pt", verify=True) as file:
        assert torch.equal(file.get_slices({"t0": slice(3)})["t0"], tensors["t0"][:3])
        with pytest.raises(ours.SafetensorError, match="t3"):
            file.get_slices({name: slice(3) for name in tensors})
