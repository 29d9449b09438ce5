"""tensorferry.dcp in one process: torch's files and ours, boxes of tensors, hostile files."""

import io
import os
import pickle
import random
import re
import threading
import types
import zipfile
import zlib

import pytest

torch = pytest.importorskip("torch")

import tensorferry
import torch.distributed.checkpoint as dcp
from tensorferry._core import PieceChecksums
from tensorferry.dcp import Reader, Writer, verify
from tensorferry.dcp.piece_checksums import piece_count
from tensorferry.dcp.stored_tensor import find_tensor, piece_checksums
from tensorferry.dcp.tensor_frame import TensorFrame
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def many_kinds():
    """A state with all that torch saves: kinds of numbers, strides, sizes and other objects."""
    make = torch.Generator().manual_seed(1)
    plain = torch.randn(300, 400, generator=make)
    return {
        "plain": plain,
        "half": plain.half(),
        "bfloat16": plain.bfloat16(),
        "float8": plain[0].to(torch.float8_e4m3fn),
        "unsigned": torch.arange(50_000).to(torch.uint16),
        "bool": plain > 0,
        "complex": torch.complex(plain[:2], plain[2:4]).conj(),
        "transposed": plain.t(),
        "channels_last": plain.reshape(2, 3, 200, 100).to(memory_format=torch.channels_last),
        "view": plain[5:9, 7:300],
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3.5),
        "large": torch.randn(3000, 2000, generator=make),
        "parameter": torch.nn.Parameter(plain[:5, :5]),
        "step": 7,
        "nested": {"list": [1, torch.ones(4), "text"], "none": None},
    }


def blank(value):
    if isinstance(value, dict):
        return {key: blank(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [blank(inner) for inner in value]
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value.detach())
    return None


def assert_same(a, b):
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list):
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape
        if a.dtype == torch.float8_e4m3fn:
            a, b = a.view(torch.uint8), b.view(torch.uint8)
        assert torch.equal(a, b)
    else:
        assert a == b


def save(state, folder, writer=Writer, **options):
    return dcp.save(state, storage_writer=writer(folder, **options))


def load(state, folder, reader=Reader, **options):
    dcp.load(state, storage_reader=reader(folder, **options))
    return state


def names_in(folder):
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("writer", [Writer, FileSystemWriter])
@pytest.mark.parametrize("reader", [Reader, FileSystemReader])
def test_what_one_writes_the_other_reads(tmp_path, writer, reader, single):
    state = many_kinds()
    save(state, tmp_path, writer, single_file_per_rank=single)
    assert_same(state, load(blank(state), tmp_path, reader))


def test_items_are_zip_archives_and_large_tensors_begin_on_pages(tmp_path):
    metadata = save(many_kinds(), tmp_path)
    for index, place in metadata.storage_data.items():
        with open(tmp_path / place.relative_path, "rb") as file:
            file.seek(place.offset)
            data = file.read(place.length)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.testzip() is None
            [storage] = [i for i in archive.infolist() if "data/0" in i.filename] or [None]
        if storage is not None and storage.file_size >= 64 << 10:
            at = data.find(b"archive/data/0") + len("archive/data/0")
            at += int.from_bytes(data[at - 16 : at - 14], "little")
            assert (place.offset + at) % 4096 == 0, index


def test_a_tensor_of_more_than_4_gib_is_an_archive_that_torch_reads(tmp_path):
    count = (4 << 30) + 12345
    frame = TensorFrame(torch.uint8, [count], 0)
    frame.set_crc(7, range(piece_count(count)))
    with open(tmp_path / "item", "wb") as file:
        file.write(frame.head)
        file.seek(count, os.SEEK_CUR)  # a hole
        file.write(frame.tail)
    tensor = torch.load(tmp_path / "item", mmap=True)
    assert tensor.shape == (count,)
    with zipfile.ZipFile(tmp_path / "item") as archive:
        assert archive.getinfo("archive/data/0").file_size == count
    with open(tmp_path / "item", "rb") as file:

        def read(offset, count):
            file.seek(offset)
            return file.read(count)

        stored = find_tensor(read, frame.bytes, verify=True)
        assert piece_checksums(stored, read) == tuple(range(piece_count(count)))
    assert (stored.size, stored.offset, stored.crc) == ((count,), len(frame.head), 7)


def test_a_tensor_that_is_more_than_its_bytes_goes_through_torch(tmp_path):
    saved = torch.quantize_per_tensor(torch.randn(40, 5), 0.1, 3, torch.qint8)
    save({"q": saved, "plain": torch.ones(3)}, tmp_path)
    loaded = torch.quantize_per_tensor(torch.zeros(40, 5), 0.1, 3, torch.qint8)
    load({"q": loaded}, tmp_path)
    assert torch.equal(saved.int_repr(), loaded.int_repr())


def test_strides_that_are_not_those_of_rows_are_no_damage(tmp_path):
    permuted = torch.arange(50 * 40 * 6000).reshape(50, 40, 6000).permute(1, 0, 2)
    overlapping = torch.arange(400_000.0).as_strided((2, 200_000), (1, 1))
    state = {"permuted": permuted, "overlapping": overlapping}
    save(state, tmp_path, FileSystemWriter)
    loaded = {"permuted": torch.zeros_like(permuted), "overlapping": torch.zeros(2, 200_000)}
    assert loaded["permuted"].stride() == permuted.stride()
    assert_same(state, load(loaded, tmp_path))


def test_another_kind_of_number_is_converted(tmp_path):
    state = {"x": torch.randn(500, 300)}
    save(state, tmp_path)
    loaded = load({"x": torch.zeros(500, 300, dtype=torch.float64)}, tmp_path)
    assert torch.equal(loaded["x"], state["x"].double())


class Planner(dcp.DefaultLoadPlanner):
    """Asks for boxes of one tensor."""

    def __init__(self, boxes):
        super().__init__()
        self.boxes = boxes  # (offsets, target)
        self.committed = []

    def create_local_plan(self):
        [index] = self.metadata.storage_data
        requests = []
        for number, (offsets, target) in enumerate(self.boxes):
            place = torch.Size([number])
            requests.append(
                ReadItem(
                    LoadItemType.TENSOR, index, place, index, torch.Size(offsets), target.size()
                )
            )
        return LoadPlan(requests)

    def resolve_tensor(self, item):
        return self.boxes[item.dest_offsets[0]][1]

    def commit_tensor(self, item, tensor):
        self.committed.append(item.dest_offsets[0])


@pytest.mark.parametrize("shape", [(40, 50, 600), (3, 9000, 7), (70_000, 5), (600_001,)])
@pytest.mark.parametrize("kind", ["contiguous", "transposed"])
def test_any_box_of_a_tensor_goes_into_any_target(tmp_path, shape, kind):
    rng = random.Random(str(shape))
    saved = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
    if kind == "transposed":
        saved = saved.transpose(0, -1)
    save({"x": saved}, tmp_path, FileSystemWriter if kind == "transposed" else Writer)
    boxes = []
    for _ in range(40):
        begin = [rng.randrange(size) for size in saved.shape]
        # Often all of a dimension, as shards have it.
        begin = [0 if rng.random() < 0.5 else at for at in begin]
        lengths = [
            size - at if rng.random() < 0.6 else rng.randrange(size - at) + 1
            for at, size in zip(begin, saved.shape)
        ]
        room = [length + rng.choice([0, 0, 1]) for length in lengths]
        target = torch.zeros(room, dtype=torch.int32)
        if rng.random() < 0.2:
            target = target.transpose(0, -1).contiguous().transpose(0, -1)
        for dim, length in enumerate(lengths):
            target = target.narrow(dim, room[dim] - length, length)
        boxes.append((begin, target))
    planner = Planner(boxes)
    dcp.load({}, storage_reader=Reader(tmp_path), planner=planner)
    for begin, target in boxes:
        expected = saved
        for dim, at in enumerate(begin):
            expected = expected.narrow(dim, at, target.size(dim))
        assert torch.equal(expected, target), (begin, target.shape)
    assert sorted(planner.committed) == list(range(40))


def test_rows_are_read_alone(tmp_path):
    """A quarter of the rows, and every second tensor: little more than these bytes is read."""
    save({"x": torch.ones(4096, 4096)}, tmp_path)
    target = torch.zeros(1024, 4096)
    before = bytes_read()
    dcp.load({}, storage_reader=Reader(tmp_path), planner=Planner([((1024, 0), target)]))
    assert target.sum() == target.numel()
    assert bytes_read() - before < 1.02 * target.nbytes


def bytes_read():
    from tensorferry._shared_handle import shared_handle

    return shared_handle().stats()["read_bytes"]


def test_the_metadata_say_where_tensors_are(tmp_path):
    """So nothing is read to find them. torch does not see it, and verify() does not believe it."""
    state = {str(i): torch.arange(float(n)) for i, n in enumerate([1, 900, 50_000, 1 << 20])}
    metadata = save(state, tmp_path)
    [path] = {tmp_path / place.relative_path for place in metadata.storage_data.values()}
    ends = [place.offset + place.length for place in metadata.storage_data.values()]
    assert path.stat().st_size == max(ends)
    data = bytearray(path.read_bytes())
    for place in metadata.storage_data.values():
        data[place.offset : place.offset + 20] = bytes(20)
    assert_same(state, load(blank(state), tmp_path, FileSystemReader))
    path.write_bytes(data)
    assert_same(state, load(blank(state), tmp_path))
    with pytest.raises(OSError, match="damaged"):
        verify(tmp_path)


@pytest.mark.parametrize("note", [None, "text", (1, 2, 3), (-1, 0), (1 << 60, 0), ("a", 1)])
def test_wrong_notes_in_the_metadata_are_not_believed(tmp_path, note):
    state = {"x": torch.arange(70_000.0)}
    metadata = save(state, tmp_path)
    for place in metadata.storage_data.values():
        place.tensorferry = note
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert_same(state, load(blank(state), tmp_path))


def test_a_planner_may_save_other_tensors_than_it_planned(tmp_path):
    class Doubles(DefaultSavePlanner):
        def transform_object(self, write_item, object):
            return object.double()

    state = {"x": torch.arange(2000.0)}
    dcp.save(state, storage_writer=Writer(tmp_path), planner=Doubles())
    assert_same(state, load(blank(state), tmp_path))


def test_checksums_of_pieces_are_those_of_zlib():
    rng = random.Random(5)
    data = rng.randbytes(100_000)
    for piece_bytes in (1, 7, 4096, 30_000, 200_000):
        crcs, at = PieceChecksums(piece_bytes), 0
        while at < len(data):
            count = rng.choice([1, 100, 5000, 60_000])
            crcs.add(data[at : at + count])
            at += count
        crcs.end()
        assert crcs.whole == zlib.crc32(data)
        cuts = range(0, len(data), piece_bytes)
        assert crcs.pieces == [zlib.crc32(data[cut : cut + piece_bytes]) for cut in cuts]


def test_overwriting_leaves_only_the_new_files(tmp_path):
    save(many_kinds(), tmp_path, FileSystemWriter, thread_count=3)
    assert len(names_in(tmp_path)) == 4
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "__0_7.0123456789ab.distcp").write_text("of a save that was killed")
    save({"x": torch.ones(5)}, tmp_path)
    names = names_in(tmp_path)
    assert len(names) == 3 and names[0] == ".metadata" and names[2] == "notes.txt"
    save({"x": torch.ones(6)}, tmp_path)
    assert names_in(tmp_path)[1] != names[1]
    assert load({"x": torch.zeros(6)}, tmp_path)["x"].sum() == 6


def test_a_planner_that_keeps_its_plan_gets_new_files(tmp_path):
    for step in range(3):
        state = {"x": torch.full((100_000,), float(step))}
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=Writer(tmp_path), planner=planner)
        assert_same(state, load(blank(state), tmp_path))
        assert len(names_in(tmp_path)) == 2


def test_overwrite_can_be_refused(tmp_path):
    save({"x": torch.ones(5)}, tmp_path)
    with pytest.raises(CheckpointException, match="overwrite=True"):
        save({"x": torch.zeros(5)}, tmp_path, overwrite=False)
    assert load({"x": torch.zeros(5)}, tmp_path)["x"].sum() == 5


def test_progress_is_told_and_can_end_a_save(tmp_path):
    told = []
    state = {"x": torch.ones(10 << 20), "y": torch.ones(70)}
    save(state, tmp_path, progress=lambda done, total: told.append((done, total)))
    total = sum(tensor.nbytes for tensor in state.values())
    assert told[-1] == (total, total)
    told.clear()
    load(blank(state), tmp_path, progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (total, total)
    names = names_in(tmp_path)

    def stop(done, total):
        raise InterruptedError("enough")

    with pytest.raises(CheckpointException, match="enough"):
        save(state, tmp_path, progress=stop)
    assert names_in(tmp_path) == names


# Hostile and damaged files


class Hostile:
    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


def test_metadata_cannot_run_anything(tmp_path):
    metadata = save({"x": torch.ones(5)}, tmp_path / "folder")
    for place in ("planner_data", "storage_meta", "version"):
        held = getattr(metadata, place)
        setattr(metadata, place, Hostile(tmp_path / "mark"))
        (tmp_path / "folder" / ".metadata").write_bytes(pickle.dumps(metadata))
        setattr(metadata, place, held)
        with pytest.raises(OSError, match="names posix.mkdir, which no checkpoint needs"):
            Reader(tmp_path / "folder").read_metadata()
        with pytest.raises(CheckpointException, match="posix.mkdir"):
            load({"x": torch.zeros(5)}, tmp_path / "folder")
        assert names_in(tmp_path) == ["folder"]
    # torch's reader shows that the file is hostile.
    (tmp_path / "folder" / ".metadata").write_bytes(pickle.dumps(Hostile(tmp_path / "mark")))
    with pytest.raises(CheckpointException):
        load({"x": torch.zeros(5)}, tmp_path / "folder", FileSystemReader)
    assert names_in(tmp_path) == ["folder", "mark"]


@pytest.mark.parametrize("path", ["/etc/passwd", "../other", "a/../../b", 7])
def test_metadata_cannot_name_files_outside_the_folder(tmp_path, path):
    metadata = save({"x": torch.ones(5)}, tmp_path)
    for place in metadata.storage_data.values():
        place.relative_path = path
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(OSError, match="outside the folder"):
        Reader(tmp_path).read_metadata()


def test_objects_need_weights_only_false(tmp_path):
    state = {"x": torch.ones(5), "hostile": Hostile(tmp_path / "mark")}
    save(state, tmp_path / "folder")
    target = {"x": torch.zeros(5), "hostile": None}
    with pytest.raises(CheckpointException, match=r"hostile .* weights_only=False"):
        load(target, tmp_path / "folder")
    assert names_in(tmp_path) == ["folder"]
    load(target, tmp_path / "folder", weights_only=False)
    assert names_in(tmp_path) == ["folder", "mark"]


def test_a_flipped_bit_in_a_tensor_is_reported(tmp_path):
    rng = random.Random(3)
    make = torch.Generator().manual_seed(2)
    state = {str(i): torch.randn(n, generator=make) for i, n in enumerate([1, 70, 30_000, 1 << 20])}
    for writer in (Writer, FileSystemWriter):
        metadata = save(state, tmp_path / writer.__name__, writer)
        for index, place in metadata.storage_data.items():
            path = tmp_path / writer.__name__ / place.relative_path
            data = path.read_bytes()
            expected = state[index.fqn].numpy().tobytes()
            begin = data.index(expected, place.offset)
            for offset in (begin, begin + len(expected) - 1, begin + rng.randrange(len(expected))):
                flip(path, data, offset, rng)
                with pytest.raises(OSError) as caught:
                    read_item(tmp_path / writer.__name__, index.fqn, state)
                assert caught.value.filename == str(path) and "checksum" in str(caught.value)
                assert f"data/0 of {index.fqn}" in str(caught.value)
                assert (caught.value.offset, caught.value.length) == (begin, len(expected))
                read_item(tmp_path / writer.__name__, index.fqn, state, verify=False)
            path.write_bytes(data)


def test_a_flipped_bit_in_a_part_of_a_tensor_is_reported(tmp_path):
    """Of parts of 1 MiB and more, pieces of 256 KiB have checksums."""
    rng = random.Random(8)
    saved = torch.randn(2001, 1000, generator=torch.Generator().manual_seed(2))
    [place] = save({"x": saved}, tmp_path).storage_data.values()
    path = tmp_path / place.relative_path
    data = path.read_bytes()
    begin = data.index(saved.numpy().tobytes())
    for number in range(60):
        first = rng.choice([0, rng.randrange(1600)])
        count = rng.choice([2001 - first, 300, rng.randrange(263, 2001 - first + 1)])
        count = min(max(count, 263), 2000, 2001 - first)
        target = torch.zeros(count, 1000)
        box = [((first, 0), target)]
        read_boxes(tmp_path, box)
        assert torch.equal(target, saved[first : first + count])
        low, high = 4000 * first, 4000 * (first + count)
        offset = begin + [low, high - 1, rng.randrange(low, high)][number % 3]
        flip(path, data, offset, rng)
        with pytest.raises(OSError, match="checksum") as caught:
            read_boxes(tmp_path, box)
        assert caught.value.offset <= offset < caught.value.offset + caught.value.length
        path.write_bytes(data)


def test_a_flipped_bit_in_a_file_for_hugging_face_is_reported(tmp_path):
    rng = random.Random(6)
    make = torch.Generator().manual_seed(2)
    state = {str(i): torch.randn(n, generator=make) for i, n in enumerate([1, 70, 30_000, 5 << 20])}
    before = bytes_read()
    save(state, tmp_path, layout="huggingface")
    assert bytes_read() == before  # a rank computes the checksums of what it has
    assert_same(state, load(blank(state), tmp_path))
    wider = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in state.items()}
    assert torch.equal(load(wider, tmp_path)["2"], state["2"].double())
    verify(tmp_path)
    [path] = tmp_path.glob("*.safetensors")
    data = path.read_bytes()
    for name, tensor in state.items():
        expected = tensor.numpy().tobytes()
        begin = data.index(expected)
        flip(path, data, begin + rng.randrange(len(expected)), rng)
        with pytest.raises(OSError, match=f"'{name}'.*checksum") as caught:
            read_item(tmp_path, name, state)
        assert caught.value.filename == str(path) and caught.value.offset >= begin
        with pytest.raises(OSError, match=f"'{name}'.*checksum"):
            verify(tmp_path)
        assert not torch.equal(read_item(tmp_path, name, state, verify=False), tensor)
        for other in state.keys() - {name}:
            assert torch.equal(read_item(tmp_path, other, state), state[other])
    path.write_bytes(data)


def read_boxes(folder, boxes):
    planner, reader = Planner(boxes), Reader(folder)
    metadata = reader.read_metadata()
    planner.set_up_planner({}, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    reader.read_data(planner.create_local_plan(), planner)


def flip(path, data, offset, rng):
    changed = bytearray(data)
    changed[offset] ^= 1 << rng.randrange(8)
    path.write_bytes(changed)


def read_item(folder, name, state, **options):
    """Loads one tensor without torch's wrapping of errors."""
    reader = Reader(folder, **options)
    loaded = {name: torch.zeros_like(state[name])}
    planner = dcp.DefaultLoadPlanner()
    metadata = reader.read_metadata()
    planner.set_up_planner(loaded, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    reader.read_data(planner.create_local_plan(), planner)
    return loaded[name]


@pytest.mark.parametrize("writer", [Writer, FileSystemWriter])
def test_verify_finds_every_flipped_bit_in_tensors_and_objects(tmp_path, writer):
    rng = random.Random(9)
    state = many_kinds() | {"hostile": Hostile(tmp_path / "mark")}
    metadata = save(state, tmp_path / "folder", writer)
    done = []
    verify(tmp_path / "folder", progress=lambda *counts: done.append(counts))
    assert done[-1][0] == done[-1][1] > 0
    for index, place in metadata.storage_data.items():
        path = tmp_path / "folder" / place.relative_path
        data = path.read_bytes()
        with zipfile.ZipFile(io.BytesIO(data[place.offset :][: place.length])) as archive:
            largest = max(archive.infolist(), key=lambda info: info.file_size)
            begin = place.offset + data[place.offset :].index(archive.read(largest))
        flip(path, data, begin + rng.randrange(max(largest.file_size, 1)), rng)
        with pytest.raises(OSError, match=re.escape(index.fqn)):
            verify(tmp_path / "folder")
        path.write_bytes(data)
    verify(tmp_path / "folder")
    path.write_bytes(data[:-1])
    with pytest.raises(OSError):
        verify(tmp_path / "folder")
    path.unlink()
    with pytest.raises(FileNotFoundError):
        verify(tmp_path / "folder")
    assert names_in(tmp_path) == ["folder"]  # nothing was unpickled


def test_any_flipped_bit_raises_or_changes_nothing(tmp_path):
    state = {"x": torch.arange(40.0), "y": torch.arange(20_000.0), "text": "some text"}
    rng = random.Random(4)
    save(state, tmp_path)
    for path in sorted(tmp_path.iterdir()):
        data = path.read_bytes()
        # The frames of small items, and the ends of large ones.
        offsets = [at for at in range(len(data)) if at < 6000 or at > len(data) - 600]
        for offset in rng.sample(offsets, min(len(offsets), 150)):
            flip(path, data, offset, rng)
            try:
                loaded = load(blank(state), tmp_path)
            except CheckpointException as error:
                for problem, _ in error.failures.values():
                    # torch says so if its planner finds no metadata.
                    assert isinstance(problem, OSError) or "metadata is None" in str(problem)
            else:
                assert_same(state, loaded)
        path.write_bytes(data)
    assert_same(state, load(blank(state), tmp_path))


def test_what_nobody_waits_for_is_in_the_background(tmp_path, monkeypatch):
    from tensorferry.dcp import writer

    chosen = []

    class Scope(tensorferry.PriorityScope):
        def __init__(self, priority):
            super().__init__(priority)
            chosen.append(priority)

    def save(**options):
        state = {"weight": torch.zeros(3)}
        dcp.save(state, storage_writer=Writer(tmp_path, **options), no_dist=True)

    monkeypatch.setattr(writer, "PriorityScope", Scope)
    save()
    thread = threading.Thread(target=save)
    thread.start()
    thread.join()
    daemon = types.SimpleNamespace(daemon=True)  # of async_save() with processes
    monkeypatch.setattr(writer, "current_process", lambda: daemon)
    save()
    assert chosen == ["normal", "background", "background"]
    save(priority="urgent")
    assert chosen[-1] == "urgent"
