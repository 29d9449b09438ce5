"""tensorferry.safetensors beside the package safetensors: the same files, tensors and errors."""

import os
import re
import stat

import pytest

pytest.importorskip("safetensors")
np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

import safetensors.numpy
import safetensors.torch
import tensorferry.safetensors.numpy
import tensorferry.safetensors.torch
from safetensors_cases import cases, mutations
from tensorferry.safetensors.serialization import CODES

ours = tensorferry.safetensors
SIDES = pytest.mark.parametrize("side", [ours, safetensors], ids=["ours", "theirs"])

DTYPES = [
    dtype
    for name in CODES  # those of safetensors
    if (dtype := getattr(torch, name, None)) is not None
]
SHAPES = [(), (0,), (1,), (7,), (2, 0, 3), (3, 5), (2, 3, 4), (1, 1, 1, 1), (300, 1000)]


def random_tensor(dtype, shape, seed=0):
    """A tensor of random bytes, as far as the dtype has values for them."""
    generator = torch.Generator().manual_seed(seed)
    count = int(np.prod(shape)) * dtype.itemsize
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), generator=generator)
    return data.to(torch.uint8).view(dtype).reshape(shape)


def same(one, other):
    """Whether two tensors or arrays have the same dtype, shape and bytes."""
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and (
            one.tobytes() == other.tobytes()
        )
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if not one.numel():
        return True
    raw = [x.contiguous().view(-1).view(torch.uint8) for x in (one, other)]
    return torch.equal(*raw)


def outcome(function):
    """What a call returns, or what it raises."""
    try:
        return function()
    except Exception as error:
        return error


def same_refusal(one, other):
    return type(one) is type(other) and str(one).startswith(str(other))


@pytest.fixture
def mixed():
    tensors = {}
    for i, dtype in enumerate(DTYPES):
        for shape in SHAPES["x2" in str(dtype) :]:
            tensors[f"{str(dtype)[6:]}{list(shape)}"] = random_tensor(dtype, shape, i)
    return tensors


def test_files_are_byte_for_byte_those_of_safetensors(tmp_path, mixed):
    safetensors.torch.save_file(mixed, tmp_path / "theirs", {"format": "pt"})
    ours.torch.save_file(mixed, tmp_path / "ours", {"format": "pt"})
    theirs = (tmp_path / "theirs").read_bytes()
    assert (tmp_path / "ours").read_bytes() == theirs
    assert ours.torch.save(mixed, {"format": "pt"}) == theirs
    assert sorted(os.listdir(tmp_path)) == ["ours", "theirs"]


@pytest.mark.parametrize("metadata", [None, {}, {"a": "b"}, {"": 'é"\\\n\x01\u2028'}])
def test_metadata_comes_back_and_is_written_alike(tmp_path, metadata):
    tensors = {'n"ame\n': torch.ones(2), "ü": torch.ones(3)}
    safetensors.torch.save_file(tensors, tmp_path / "theirs", metadata)
    ours.torch.save_file(tensors, tmp_path / "ours", metadata)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    with ours.safe_open(tmp_path / "ours", "pt") as file:
        assert file.metadata() == metadata


@pytest.mark.parametrize("names", [[], ["b", "a", "é", "Z", "aa", "\U0001f600", "\uffff"]])
def test_names_come_in_the_same_order(tmp_path, names):
    tensors = {n: torch.zeros(i + 1, dtype=DTYPES[i % 3]) for i, n in enumerate(names)}
    safetensors.torch.save_file(tensors, tmp_path / "x")
    with (
        ours.safe_open(tmp_path / "x", "pt") as one,
        safetensors.safe_open(tmp_path / "x", "pt") as other,
    ):
        assert one.keys() == other.keys()
        assert one.offset_keys() == other.offset_keys()
        assert list(one.get_tensors()) == list(other.get_tensors())


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_every_dtype_and_shape_is_loaded(tmp_path, mixed, backend):
    safetensors.torch.save_file(mixed, tmp_path / "x")
    loaded = ours.torch.load_file(tmp_path / "x", backend=backend)
    assert loaded.keys() == mixed.keys()
    for name, tensor in mixed.items():
        assert same(loaded[name], tensor), name
    with ours.safe_open(tmp_path / "x", "pt", backend=backend) as file:
        for name, tensor in mixed.items():
            assert same(file.get_tensor(name), tensor), name
    from_memory = ours.torch.load((tmp_path / "x").read_bytes())
    assert all(same(from_memory[name], tensor) for name, tensor in mixed.items())


def test_numpy_arrays_are_saved_and_loaded_alike(tmp_path):
    arrays = {}
    for dtype in [*"?bBhHiIlLefdF", ">i4", ">f8"]:
        for shape in SHAPES:
            arrays[f"{dtype}{list(shape)}"] = np.random.default_rng(0).random(shape).astype(dtype)
    safetensors.numpy.save_file(arrays, tmp_path / "theirs")
    ours.numpy.save_file(arrays, tmp_path / "ours")
    data = (tmp_path / "theirs").read_bytes()
    assert (tmp_path / "ours").read_bytes() == data
    assert ours.numpy.save(arrays) == data
    for loaded in (ours.numpy.load_file(tmp_path / "ours"), ours.numpy.load(data)):
        theirs = safetensors.numpy.load_file(tmp_path / "theirs")
        assert loaded.keys() == theirs.keys()
        for name, array in theirs.items():
            assert same(loaded[name], array), name
            assert loaded[name].flags.writeable


def test_an_array_with_gaps_is_saved_by_its_values(tmp_path):
    array = np.arange(12).reshape(3, 4)[:, ::2]
    ours.numpy.save_file({"a": array}, tmp_path / "x")
    assert np.array_equal(safetensors.numpy.load_file(tmp_path / "x")["a"], array)


def test_a_conjugated_tensor_is_saved_by_its_values(tmp_path):
    tensor = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj()
    ours.torch.save_file({"a": tensor}, tmp_path / "x")
    assert torch.equal(ours.torch.load_file(tmp_path / "x")["a"], tensor.resolve_conj())


def test_loaded_tensors_have_writable_memory_of_their_own(tmp_path):
    tensors = {f"t{i}": torch.full((1 << 19,), float(i)) for i in range(4)}
    ours.torch.save_file(tensors, tmp_path / "x")
    loaded = ours.torch.load_file(tmp_path / "x")
    os.truncate(tmp_path / "x", 0)  # nothing of the file is mapped
    for i in range(4):
        storage = loaded[f"t{i}"].untyped_storage()
        assert storage.nbytes() == 4 << 19
        assert storage.data_ptr() == loaded[f"t{i}"].data_ptr()
        assert loaded[f"t{i}"].is_contiguous()
    loaded["t1"].fill_(7)
    del loaded["t2"]
    assert all(torch.equal(loaded[f"t{i}"], tensors[f"t{i}"]) for i in (0, 3))
    ours.torch.save_file(loaded, tmp_path / "again")  # they share no storage


def resident_bytes(address):
    """Of the mapping that holds an address."""
    with open("/proc/self/smaps") as maps:
        inside = False
        for line in maps:
            if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                inside = int(found[1], 16) <= address < int(found[2], 16)
            elif inside and line.startswith("Rss:"):
                return int(line.split()[1]) << 10
    return 0


def test_the_memory_of_a_tensor_that_has_gone_is_given_back(tmp_path):
    ours.torch.save_file({f"t{i}": torch.ones(4 << 20) for i in range(4)}, tmp_path / "x")
    loaded = ours.torch.load_file(tmp_path / "x")
    kept = loaded.pop("t0")
    before = resident_bytes(kept.data_ptr())
    loaded.clear()
    assert before - resident_bytes(kept.data_ptr()) >= 47 << 20
    assert torch.equal(kept, torch.ones(4 << 20))


def misaligned_file(path, dtype, count):
    """A file whose second tensor begins at an odd byte. safetensors never writes one."""
    size = count * dtype.itemsize
    code = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16"}[dtype]
    header = (
        f'{{"a":{{"dtype":"U8","shape":[1],"data_offsets":[0,1]}},'
        f'"b":{{"dtype":"{code}","shape":[{count}],"data_offsets":[1,{1 + size}]}}}}'
    ).encode()
    tensor = random_tensor(dtype, (count,))
    raw = tensor.view(torch.uint8).numpy().tobytes()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\7" + raw)
    return tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("count", [3, 1 << 20])
def test_a_tensor_at_an_odd_place_is_aligned_in_memory(tmp_path, dtype, count):
    tensor = misaligned_file(tmp_path / "x", dtype, count)
    with ours.safe_open(tmp_path / "x", "pt") as file:
        parts = (file.get_slice("b")[1:], file.get_tensor("b")[1:], file.get_tensors()["b"][1:])
    for part in parts:
        assert part.data_ptr() % dtype.itemsize == 0
        assert same(part, tensor[1:])
    if dtype != torch.bfloat16:
        loaded = ours.numpy.load_file(tmp_path / "x")["b"]
        assert loaded.flags.aligned and same(loaded, tensor.numpy())


@pytest.mark.parametrize("device", ["cpu", None, "meta", torch.device("cpu"), "cpu:0"])
def test_devices(tmp_path, device):
    ours.torch.save_file({"a": torch.ones(3)}, tmp_path / "x")
    with ours.safe_open(tmp_path / "x", "pt", device) as file:
        for tensor in (file.get_tensor("a"), file.get_slice("a")[:2], file.get_tensors()["a"]):
            assert tensor.device.type == ("meta" if device == "meta" else "cpu")


@pytest.mark.parametrize("default", ["meta", "cpu"])
def test_the_default_device_of_torch_does_not_matter(tmp_path, default):
    tensors = {"a": torch.arange(5), "b": torch.ones(1 << 20), "c": torch.ones(0)}
    ours.torch.save_file(tensors, tmp_path / "x")
    with torch.device(default):
        loaded = ours.torch.load_file(tmp_path / "x")
        with ours.safe_open(tmp_path / "x", "pt") as file:
            part = file.get_slice("b")[[3, 5]]
    assert all(same(loaded[name], tensor) for name, tensor in tensors.items())
    assert torch.equal(part, torch.ones(2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0])
def test_without_a_gpu_torch_says_so(tmp_path, device):
    ours.torch.save_file({"a": torch.ones(3)}, tmp_path / "x")
    errors = [
        outcome(lambda: side.torch.load_file(tmp_path / "x", device=device))
        for side in (ours, safetensors)
    ]
    assert all(isinstance(e, (RuntimeError, AssertionError)) for e in errors), errors


OPENING = [
    (("missing", "pt"), {}),
    (("missing/file", "pt"), {}),
    ((5, "pt"), {}),
    (("x",), {}),
    (("x", 5), {}),
    (("x", "zz"), {}),
    (("x", "pt", "foo"), {}),
    (("x", "pt", "cuda:a"), {}),
    (("x", "pt", "cuda:1:2"), {}),
    (("x", "pt", "mps:1"), {}),
    (("x", "pt", 1.5), {}),
    (("x", "pt", -1), {}),
    (("x", "pt", [1]), {}),
    (("x", "np", "cuda"), {}),
    (("x", "np", "foo"), {}),
    (("x", "np", 0), {}),
    (("missing", "np", "cuda"), {}),
    (("x", "pt"), {"backend": "z"}),
    (("x", "pt"), {"backend": 3}),
    (("x", "pt", "cpu", "mmap"), {}),
]


@pytest.mark.parametrize("args, options", OPENING, ids=repr)
def test_opening_refuses_the_same(tmp_path, monkeypatch, args, options):
    monkeypatch.chdir(tmp_path)
    ours.torch.save_file({"a": torch.ones(3)}, "x")
    one, other = (outcome(lambda: s.safe_open(*args, **options)) for s in (ours, safetensors))
    if isinstance(other, TypeError) and "__new__" in str(other):
        assert type(one) is TypeError
    else:
        assert same_refusal(one, other), (one, other)


def test_a_directory_and_a_device_are_refused(tmp_path):
    for path in (tmp_path, "/dev/null"):
        assert isinstance(outcome(lambda: ours.safe_open(path, "np")), OSError)
        assert isinstance(outcome(lambda: safetensors.safe_open(path, "np")), OSError)


@pytest.mark.parametrize("method", ["get_tensor", "get_slice"])
@pytest.mark.parametrize("name", ["missing", 3, b"a"])
def test_names_that_are_not_there(tmp_path, method, name):
    ours.torch.save_file({"a": torch.ones(3)}, tmp_path / "x")
    errors = []
    for side in (ours, safetensors):
        with side.safe_open(tmp_path / "x", "pt") as file:
            errors.append(outcome(lambda: getattr(file, method)(name)))
    assert same_refusal(*errors), errors


@pytest.mark.parametrize("method", ["keys", "offset_keys", "metadata", "get_tensors"])
def test_a_closed_file_says_so(tmp_path, method):
    ours.torch.save_file({"a": torch.ones(3)}, tmp_path / "x")
    errors = []
    for side in (ours, safetensors):
        with side.safe_open(tmp_path / "x", "pt") as file:
            part = file.get_slice("a")
        assert torch.equal(part[1:], torch.ones(2))  # a slice outlives it
        errors.append(outcome(getattr(file, method)))
    assert same_refusal(*errors), errors


@pytest.mark.parametrize(
    "dtype, framework",
    [("F6_E2M3", "pt"), ("F6_E3M2", "np"), ("F4", "np"), ("F8_E4M3", "np"), ("BF16", "np")],
)
def test_dtypes_that_a_framework_does_not_have(tmp_path, dtype, framework):
    bits = {"F6_E2M3": 6, "F6_E3M2": 6, "F4": 4, "F8_E4M3": 8, "BF16": 16}[dtype]
    header = f'{{"a":{{"dtype":"{dtype}","shape":[4],"data_offsets":[0,{bits // 2}]}}}}'.encode()
    data = len(header).to_bytes(8, "little") + header + bytes(bits // 2)
    (tmp_path / "x").write_bytes(data)
    for use in (lambda f: f.get_tensor("a"), lambda f: f.get_slice("a")[:2]):
        one, other = (
            outcome(lambda: use(side.safe_open(tmp_path / "x", framework)))
            for side in (ours, safetensors)
        )
        assert isinstance(other, Exception) and same_refusal(one, other), (one, other)


HOSTILE = {name: data for name, data in cases().items() if name != "metadata_checksums"}


def test_hostile_files_get_the_same_verdict(tmp_path):
    for name, data in HOSTILE.items():
        check_verdict(tmp_path / "x", data, name)


def test_damaged_files_get_the_same_verdict(tmp_path):
    for data in mutations(300, seed=5):
        if b"tensorferry.xxh3" not in data:
            check_verdict(tmp_path / "x", data, data)


def check_verdict(path, data, what):
    path.write_bytes(data)
    one, other = (outcome(lambda: side.safe_open(path, "np")) for side in (ours, safetensors))
    in_memory = [outcome(lambda: side.deserialize(data)) for side in (ours, safetensors)]
    if isinstance(other, Exception):
        # Our reason follows. That of a JSON parser is its own, and which of two tensors at one
        # place is wrong, safetensors leaves to chance.
        said = re.split("JSON in header|UTF-8 in header|for tensor `", str(other))[0]
        assert type(one) is safetensors.SafetensorError, what
        assert str(one).startswith(said), (what, one, other)
        assert type(in_memory[0]) is type(in_memory[1]) is safetensors.SafetensorError, what
    else:
        assert sorted(one.keys()) == sorted(other.keys()), what
        assert one.metadata() == other.metadata(), what
        assert dict(in_memory[0]) == dict(in_memory[1]), what  # their order is left to chance


def spec(side, **changes):
    fields = {"dtype": "float32", "shape": [2, 2], "data_ptr": MEMORY.ctypes.data, "data_len": 16}
    return side.TensorSpec(**fields | changes)


MEMORY = np.zeros((4, 4), np.float32)

SPECS = [
    {},
    {"dtype": "float4_e2m1fn_x2", "shape": [2, 3]},
    {"dtype": "zz"},
    {"dtype": 3},
    {"shape": (2, 2)},
    {"shape": torch.Size([2])},
    {"shape": [-1]},
    {"shape": 3},
    {"shape": "ab"},
    {"shape": [1.5]},
    {"data_ptr": -1},
    {"data_ptr": 1 << 64},
    {"data_len": "x"},
    {"dtype": "float4_e2m1fn_x2", "shape": [1 << 63]},
]


@pytest.mark.parametrize("changes", SPECS, ids=repr)
def test_tensor_specs_are_the_same(changes):
    one, other = (outcome(lambda: spec(side, **changes)) for side in (ours, safetensors))
    if isinstance(other, Exception):
        assert same_refusal(one, other), (one, other)
    else:
        assert repr(one) == repr(other)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        with pytest.raises(AttributeError):
            one.dtype = "F64"


SERIALIZED = {
    "good": lambda s: ({"b": spec(s), "a": spec(s, dtype="int64", shape=[2])},),
    "with_metadata": lambda s: ({"a": spec(s)}, {"b": "c"}),
    "nothing": lambda s: ({},),
    "short": lambda s: ({"a": spec(s, data_len=8)},),
    "packed": lambda s: ({"a": spec(s, dtype="float4_e2m1fn_x2", shape=[])},),
    "too_large": lambda s: ({"a": spec(s, shape=[1 << 32, 1 << 32])},),
    "no_spec": lambda s: ({"a": 3},),
    "a_dict": lambda s: ({"a": {"dtype": "float32"}},),
    "no_name": lambda s: ({3: spec(s)},),
    "no_dict": lambda s: ("x",),
    "metadata_no_dict": lambda s: ({"a": spec(s)}, 5),
    "metadata_no_text": lambda s: ({"a": spec(s)}, {"a": 5}),
    "metadata_no_name": lambda s: ({"a": spec(s)}, {5: "a"}),
    "half_a_character": lambda s: ({"a\udcff": spec(s)},),
    "metadata_half_a_character": lambda s: ({"a": spec(s)}, {"a": "\udcff"}),
}


@pytest.mark.parametrize("name", SERIALIZED)
def test_specs_are_serialized_alike(tmp_path, name):
    one, other = (outcome(lambda: s.serialize(*SERIALIZED[name](s))) for s in (ours, safetensors))
    if isinstance(other, Exception):
        assert same_refusal(one, other), (one, other)
    else:
        assert one == other
        for side in (ours, safetensors):
            specs, *metadata = SERIALIZED[name](side)
            side.serialize_file(specs, tmp_path / side.__name__, *metadata)
            assert (tmp_path / side.__name__).read_bytes() == other
        assert dict(ours.deserialize(one)) == dict(safetensors.deserialize(one))


def test_specs_of_safetensors_are_taken(tmp_path):
    assert ours.serialize({"a": spec(safetensors)}) == ours.serialize({"a": spec(ours)})


@pytest.mark.parametrize("path", ["missing/x", "folder", 5, "file/x"])
def test_a_file_that_cannot_be_written_is_refused_alike(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    errors = [
        outcome(lambda: side.torch.save_file({"a": torch.ones(2)}, path))
        for side in (ours, safetensors)
    ]
    assert type(errors[0]) is type(errors[1]), errors
    assert str(errors[0]).startswith(str(errors[1]).split(" at path")[0]), errors
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


@pytest.mark.parametrize("data", [b"", "x", 5, [1]], ids=repr)
def test_what_is_no_file_in_memory(data):
    for side in (ours, safetensors):
        error = outcome(lambda: side.deserialize(data))
        wanted = safetensors.SafetensorError if data == b"" else TypeError
        assert type(error) is wanted
    assert same_refusal(*(outcome(lambda: s.deserialize(data)) for s in (ours, safetensors)))


A = torch.arange(6.0).reshape(2, 3)
REFUSED = {
    "no_dict": "notadict",
    "no_tensor": {"a": {"some": "thing"}},
    "sparse": {"a": A.to_sparse()},
    "gaps": {"a": A[:, :2]},
    "shared": {"a": A, "b": A},
    "overlap": {"a": A, "b": A[1:]},
    "meta": {"a": torch.empty(2, device="meta")},
    "dtype": {"a": torch.zeros(2, dtype=torch.complex128)},
    "no_name": {3: A},
    "half_a_character": {"a\udcff": A},
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("function", ["save", "save_file"])
def test_tensors_that_cannot_be_saved(tmp_path, name, function):
    errors = []
    for side in (ours, safetensors):
        call = getattr(side.torch, function)
        where = [tmp_path / "x"] if function == "save_file" else []
        errors.append(outcome(lambda: call(REFUSED[name], *where)))
    assert isinstance(errors[1], Exception)
    if name in ("shared", "overlap"):  # the layout of the text differs
        assert type(errors[0]) is type(errors[1]) is RuntimeError
        assert "Some tensors share memory" in str(errors[0])
    elif name == "dtype":  # theirs is a KeyError of a table
        assert type(errors[0]) is safetensors.SafetensorError
    else:
        assert same_refusal(*errors), errors
    assert not os.listdir(tmp_path)


def test_parts_of_one_storage_that_do_not_overlap_are_saved(tmp_path):
    ours.torch.save_file({"a": A[1:], "b": A[:1]}, tmp_path / "x")
    assert torch.equal(ours.torch.load_file(tmp_path / "x")["a"], A[1:])


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.b = torch.nn.Linear(4, 4)
        self.a = self.b
        self.c = torch.nn.Linear(4, 4)


@SIDES
def test_models_are_saved_and_loaded_across(tmp_path, side):
    other = safetensors if side is ours else ours
    model, copy = Tied(), Tied()
    side.torch.save_model(model, tmp_path / "x", {"my": "own"})
    other.torch.save_model(model, tmp_path / "y", {"my": "own"})
    assert sorted((tmp_path / "x").read_bytes()) == sorted((tmp_path / "y").read_bytes())
    assert other.torch.load_model(copy, tmp_path / "x") == (set(), [])
    assert all(map(torch.equal, model.parameters(), copy.parameters()))


@pytest.mark.parametrize("strict", [True, False])
def test_models_that_do_not_fit(tmp_path, strict):
    ours.torch.save_file({"b.weight": torch.ones(4, 4), "z": torch.ones(1)}, tmp_path / "x")
    one, other = (
        outcome(lambda: side.torch.load_model(Tied(), tmp_path / "x", strict=strict))
        for side in (ours, safetensors)
    )
    if strict:
        assert type(one) is RuntimeError and str(one) == str(other)
    else:
        assert one == other


def test_a_model_none_of_whose_names_covers_the_storage(tmp_path):
    class Halves(torch.nn.Module):
        def __init__(self):
            super().__init__()
            whole = torch.ones(6)
            self.a = torch.nn.Parameter(whole[:4])
            self.b = torch.nn.Parameter(whole[2:])

    for side in (ours, safetensors):
        with pytest.raises(RuntimeError, match="None is covering the entire storage"):
            side.torch.save_model(Halves(), tmp_path / "x")
    with pytest.raises(ValueError, match="force_contiguous=True"):
        model = torch.nn.Linear(3, 2)
        model.weight = torch.nn.Parameter(model.weight.t())
        ours.torch.save_model(model, tmp_path / "x", force_contiguous=False)


def test_a_new_file_has_the_usual_permissions_and_an_old_one_keeps_its_own(tmp_path):
    ours.torch.save_file({"a": A}, tmp_path / "x")
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o666 & ~mask
    (tmp_path / "x").chmod(0o640)
    ours.torch.save_file({"a": A}, tmp_path / "x")
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640


def test_an_open_file_is_read_by_its_name(tmp_path):
    ours.torch.save_file({"a": A}, tmp_path / "x")
    with open(tmp_path / "x") as opened, ours.safe_open_handle(opened, framework="pt") as file:
        assert torch.equal(file.get_tensor("a"), A)
    with pytest.raises(AttributeError):
        ours.safe_open_handle(tmp_path / "x", framework="pt")


def test_mapping_is_left_to_safetensors(tmp_path):
    ours.torch.save_file({"a": A}, tmp_path / "x")
    assert type(ours.safe_open(tmp_path / "x", "pt", mapping=True)) is safetensors.safe_open
    assert torch.equal(ours.torch.load_file(tmp_path / "x", mapping=True)["a"], A)
