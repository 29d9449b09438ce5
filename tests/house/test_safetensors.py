"""The library judges safetensors files as the safetensors package does, and writes the same."""

import ctypes
import errno
import json
import struct
import subprocess

import pytest
import safetensors
from house import built_job
from safetensors_cases import DTYPES, cases, file_of, mutations

MUTATIONS = 4000


@pytest.fixture
def lines(build_dir):
    """What the program prints about files, in their order."""
    program = built_job(build_dir, "safetensors_job")

    def judge(files):
        packed = b"".join(struct.pack("<Q", len(content)) + content for content in files)
        done = subprocess.run([program], input=packed, capture_output=True, check=True)
        return done.stdout.rstrip(b"\n").split(b"\n")

    return judge


@pytest.fixture
def ours(lines):
    """What our parser says about files, in their order."""
    return lambda files: [json.loads(line) for line in lines(files)]


@pytest.fixture
def theirs(tmp_path):
    """What the package says about a file: the header that it read, or why it refuses."""
    path = tmp_path / "any.safetensors"

    def judge(content):
        path.write_bytes(content)
        try:
            with safetensors.safe_open(path, "numpy") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                return {
                    "names": file.offset_keys(),
                    "metadata": file.metadata(),
                    "tensors": {n: (s.get_dtype(), s.get_shape()) for n, s in slices.items()},
                }
        except safetensors.SafetensorError as error:
            return {"error": str(error)}

    return judge


def same(our, their):
    """Both refuse the file, or both read the same from it."""
    if "error" in our or "error" in their:
        return "error" in our and "error" in their and our["code"] == errno.EBADMSG
    tensors = dict(our["header"])
    metadata = tensors.pop("__metadata__", None)
    # Both order tensors by their offsets. At one offset the package leaves the order to chance.
    empty = [name for name, tensor in tensors.items() if 0 in tensor["shape"]]
    names = [[name for name in one["names"] if name not in empty] for one in (our, their)]
    return (
        metadata == their["metadata"]
        and names[0] == names[1]
        and {name: (t["dtype"], t["shape"]) for name, t in tensors.items()} == their["tensors"]
    )


def differences(files, ours, theirs):
    found = []
    accepted = 0
    for (name, content), our in zip(files.items(), ours(files.values())):
        their = theirs(content)
        accepted += "error" not in their
        if not same(our, their):
            found.append(f"{name}: {content[:300]!r}\n  ours: {our}\n  theirs: {their}")
    return found, accepted


def test_every_case_gets_the_verdict_of_the_package(ours, theirs):
    files = cases()
    found, accepted = differences(files, ours, theirs)
    assert not found, "\n".join(found)
    assert len(files) > 600 and 180 < accepted < 220


def test_spoiled_files_get_the_verdict_of_the_package(ours, theirs):
    files = {f"mutation {i}": content for i, content in enumerate(mutations(MUTATIONS, seed=24))}
    found, accepted = differences(files, ours, theirs)
    assert not found, f"{len(found)} differ\n" + "\n".join(found[:20])
    assert MUTATIONS / 20 < accepted < MUTATIONS / 2


def test_what_the_fuzzer_starts_from_and_has_found_gets_the_verdict_of_the_package(
    root, ours, theirs
):
    """Its seeds, its crashes, and the corpus that `make fuzz` has left in the build folder."""
    folders = [
        *root.glob("tests/fuzz/*/safetensors"),
        *root.glob("tests/fuzz/*/json"),
        root / "build/corpus/safetensors",
    ]
    paths = [path for folder in folders if folder.is_dir() for path in sorted(folder.iterdir())]
    files = {str(path.relative_to(root)): path.read_bytes() for path in paths}
    found, _ = differences(files, ours, theirs)
    assert not found, f"{len(found)} differ\n" + "\n".join(found[:20])
    assert len(files) > 5


def test_a_header_at_the_limit_is_read_and_one_beyond_is_not(ours, theirs):
    limit = 100_000_000
    for length, accepted in ((limit, True), (limit + 1, False)):
        content = struct.pack("<Q", length) + b"{}".ljust(length)
        (our,), their = ours([content]), theirs(content)
        assert same(our, their)
        assert ("error" not in our) == accepted


# As frameworks call the types that TensorSpec takes.
NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0", "int16": "I16", "uint16": "U16",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float16": "F16", "bfloat16": "BF16", "int32": "I32", "uint32": "U32", "float32": "F32",
    "complex64": "C64", "float64": "F64", "int64": "I64", "uint64": "U64",
}  # fmt: skip


def serialized(tensors, metadata):
    """What the package writes for tensors: name -> (dtype, shape)."""
    kept = []
    specs = {}
    for name, (dtype, shape) in tensors.items():
        size = DTYPES[NAMES[dtype]] // 8
        for one in shape:
            size *= one
        kept.append(ctypes.create_string_buffer(max(size, 1)))
        specs[name] = safetensors.TensorSpec(
            dtype=dtype, shape=shape, data_ptr=ctypes.addressof(kept[-1]), data_len=size
        )
    return safetensors.serialize(specs, metadata=metadata)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {'é"\n': "\x00\x1f\x7f\\/\t"}])
def test_headers_are_written_as_the_package_writes_them(lines, metadata):
    names = ["b", "a", "é", "z.10", "z.2", "😀", "", '"\\/\b\f\n\r\t\x01\x1f\x7f', "A", "\u2028"]
    tensors = {}
    for i, dtype in enumerate(reversed(NAMES)):
        for j, name in enumerate(names):
            tensors[f"{name}{i}" if name else str(i)] = (dtype, [[], [3], [2, 0], [4, 1, 2]][j % 4])
    written = serialized(tensors, metadata)
    length = struct.unpack("<Q", written[:8])[0]
    (line,) = lines([written])
    made = line.partition(b'],"header":')[2].removesuffix(b"}")
    assert made == written[8 : 8 + length]


def test_metadata_without_entries_and_tensors_is_written_as_json(ours, theirs):
    """The package closes the object too early there, and cannot read what it has written."""
    assert "error" in theirs(serialized({}, {}))
    assert ours([file_of('{"__metadata__":{}}', 0)]) == [
        {"names": [], "header": {"__metadata__": {}}}
    ]
