"""Pickles that a hostile file could have: they change no class and no function of the process."""

import copy
import errno
import io
import os
import pickle
import zipfile

import pytest

torch = pytest.importorskip("torch")

import tensorferry
import torch.distributed.checkpoint as dcp
from tensorferry.dcp import Reader, Writer
from tensorferry.inspection.torch_file import open_torch_file
from torch.distributed.checkpoint import metadata as formats
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

ENCODING = formats._MEM_FORMAT_ENCODING
CLASSES = [
    formats.BytesStorageMetadata,
    formats.ChunkStorageMetadata,
    formats.Metadata,
    formats.MetadataIndex,
    formats.StorageMeta,
    formats.TensorProperties,
    formats.TensorStorageMetadata,
    _StorageInfo,
    ENCODING,
]


def named(module, name):
    """Opcodes: puts what has this name on the stack."""
    return f"c{module}\n{name}\n".encode()


def called(function, argument):
    return function + b"(" + argument + b"tR"


def text(value):
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


# What an unpickler sets: entries of __dict__, and attributes.
STATES = {
    "dict": b"}" + text("__reduce__") + b"K\7s",
    "attributes": b"N}" + text("hostile") + b"K\7s\x86",
    "defaults": b"N}" + text("__defaults__") + b"K\7\x85s\x86",
}
METADATA_NAMES = [
    *(named(cls.__module__, cls.__qualname__) for cls in CLASSES),
    called(named(ENCODING.__module__, ENCODING.__qualname__), b"K\1"),  # one of its members
    named("torch.serialization", "_get_layout"),
    called(named("torch.serialization", "_get_layout"), text("torch.strided")),
    named("torch", "float32"),
    named("torch", "Size"),
    named("collections", "OrderedDict"),
    named("pathlib", "PosixPath"),
]
TENSOR_NAMES = [
    named("torch._utils", "_rebuild_tensor_v2"),
    named("torch._utils", "_rebuild_tensor_v3"),
    named("torch", "float32"),
    named("torch", "FloatStorage"),
    named("collections", "OrderedDict"),
]


def facts():
    """All that can be set of the classes."""
    members = [dict(vars(member)) for member in ENCODING]
    return [dict(vars(one)) for one in [*CLASSES, os.PathLike]] + copy.copy(members)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", METADATA_NAMES)
def test_metadata_change_nothing(tmp_path, name, state):
    before = facts()
    (tmp_path / ".metadata").write_bytes(b"\x80\2" + name + STATES[state] + b"b.")
    with pytest.raises(OSError, match="would change|attribute|assignment|setting") as caught:
        Reader(tmp_path).read_metadata()
    assert caught.value.errno == errno.EBADMSG
    assert facts() == before


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_metadata_of_any_modern_protocol_and_memory_format_are_read(tmp_path, protocol):
    metadata = dcp.save({"x": torch.ones(5), "y": 3}, storage_writer=Writer(tmp_path))
    kept = metadata.state_dict_metadata["x"].properties
    for kept.memory_format in (torch.contiguous_format, torch.channels_last, torch.preserve_format):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata, protocol))
        found = Reader(tmp_path).read_metadata()
        assert type(found) is formats.Metadata
        assert found.state_dict_metadata == metadata.state_dict_metadata
        assert found.storage_data == metadata.storage_data


@pytest.mark.parametrize("name", ["x", "object"])
@pytest.mark.parametrize("field", ["length", "offset"])
def test_a_place_beyond_its_file_takes_no_memory(tmp_path, name, field):
    metadata = dcp.save({"x": torch.ones(5), "object": 3}, storage_writer=Writer(tmp_path))
    for index, place in metadata.storage_data.items():
        vars(place).pop("tensorferry", None)
        if index.fqn == name:
            setattr(place, field, 1 << 62)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointException, match=f"the file ends before {name} does"):
        dcp.load({"x": torch.zeros(5), "object": 0}, storage_reader=Reader(tmp_path))


def packed(data):
    """A file of torch.save with another pickle in it."""
    saved, packed = io.BytesIO(), io.BytesIO()
    torch.save(torch.ones(5), saved)
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(packed, "w") as new:
        for record in old.infolist():
            held = old.read(record)
            new.writestr(record.filename, data if record.filename.endswith("data.pkl") else held)
    return packed.getvalue()


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", TENSOR_NAMES)
def test_items_change_nothing(tmp_path, name, state):
    metadata = dcp.save({"x": torch.ones(5)}, storage_writer=dcp.FileSystemWriter(tmp_path))
    (place,) = metadata.storage_data.values()
    item = packed(b"\x80\2" + name + STATES[state] + b"b.")
    place.length = len(item)
    (tmp_path / place.relative_path).write_bytes(item)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointException, match="would change|attribute|assignment|setting"):
        dcp.load({"x": torch.zeros(5)}, storage_reader=Reader(tmp_path))
    dcp.save({"x": torch.ones(5)}, storage_writer=dcp.FileSystemWriter(tmp_path / "other"))
    state = {"x": torch.zeros(5)}
    dcp.load(state, storage_reader=Reader(tmp_path / "other"))
    assert state["x"].sum() == 5


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", [*TENSOR_NAMES[:2], *METADATA_NAMES, named("os", "system")])
def test_inspecting_a_file_changes_nothing(tmp_path, name, state):
    path = tmp_path / "file.pt"
    tensorferry.checkpoint.save({"x": torch.ones(5)}, path)
    before = repr(open_torch_file(str(path)).tensors)
    hostile = tmp_path / "hostile.pt"
    hostile.write_bytes(packed(b"\x80\2}" + text("y") + name + STATES[state] + b"bs."))
    try:
        open_torch_file(str(hostile))
    except (OSError, tensorferry.inspection.tensors.Unusable):
        pass
    assert repr(open_torch_file(str(path)).tensors) == before
