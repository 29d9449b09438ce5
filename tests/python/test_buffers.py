"""Which Python objects have memory to move, and what is said of those that have not."""

import array
import ctypes
import mmap

import numpy as np
import pytest
import tensorferry
import torch
from any_tensor import any_tensor, write_and_read
from only_dlpack import OnlyDlpack

KiB = 1 << 10

TORCH_DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)
# Those that torch.empty() makes on the CPU; quantised ones are tried by themselves.
DENSE_DTYPES = [d for d in TORCH_DTYPES if not str(d).startswith(("torch.q", "torch.bits"))]


def fill(tensor):
    """Random bytes, whatever the dtype says they mean."""
    raw = bytearray(np.random.default_rng(7).bytes(tensor.nbytes))
    if raw:
        ctypes.memmove(tensor.data_ptr(), (ctypes.c_char * len(raw)).from_buffer(raw), len(raw))
    return bytes(raw)


def bytes_of(tensor):
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""


def round_trip(handle, path, source, target, raw):
    handle.write(source, path).wait()
    with open(path, "rb") as file:
        assert file.read() == raw
    handle.read(target, path).wait()


@pytest.mark.parametrize("dtype", DENSE_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (1000,)], ids=str)
def test_every_dtype_of_torch(handle, path, dtype, shape):
    try:
        source, target = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
    except (RuntimeError, NotImplementedError) as reason:
        pytest.skip(f"torch itself cannot: {reason}")
    raw = fill(source)
    round_trip(handle, path, source, target, raw)
    assert bytes_of(target) == raw


@pytest.mark.parametrize(
    "dtype",
    ["f2", "f8", "i4", "?", "c8", "c16", "G", "M8[s]", "S7", [("name Z", "u1"), ("wave", "c8")]],
    ids=str,
)
def test_dtypes_of_numpy(handle, path, dtype):
    dtype = np.dtype(dtype)
    raw = np.random.default_rng(7).bytes(100 * dtype.itemsize)
    source, target = np.frombuffer(raw, dtype), np.zeros(100, dtype)
    if dtype.kind == "M":  # it has no buffer protocol
        source, target = source.view("i8"), target.view("i8")
    round_trip(handle, path, source, target, raw)
    assert target.tobytes() == raw


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32], ids=str)
def test_quantised_tensors_are_bytes(handle, path, dtype):
    source = torch.quantize_per_tensor(torch.randn(100), 0.1, 3, dtype)
    target = torch.quantize_per_tensor(torch.zeros(100), 0.1, 3, dtype)
    handle.write(source, path).wait()
    handle.read(target, path).wait()
    assert torch.equal(source.int_repr(), target.int_repr())


def test_views_parameters_and_gradients(handle, path):
    base = torch.randn(1000)
    parameter = torch.nn.Parameter(torch.randn(10, 10))
    for source in (
        base[13:700],
        base.view(10, 100)[3],
        parameter,
        parameter[2:4],
        torch.randn(5, requires_grad=True),
        base.data,
        torch.tensor(3.5),
    ):
        target = torch.zeros_like(source).requires_grad_(source.requires_grad)
        handle.write(source, path).wait()
        handle.read(target, path).wait()
        assert torch.equal(source, target)
        path += "x"
    grown = torch.zeros(1000)
    handle.read(grown[13:700], path[: path.index("x")] if "x" in path else path).wait()
    assert torch.equal(grown[13:700], base[13:700]) and not grown[:13].any()


def test_what_has_the_buffer_protocol(handle, path, tmp_path):
    raw = bytes(range(256)) * 64
    handle.write_now(raw, path)
    mapped = mmap.mmap(-1, len(raw))
    on_disk = np.memmap(tmp_path / "map", "u1", "w+", shape=len(raw))
    targets = [
        bytearray(len(raw)),
        memoryview(bytearray(len(raw) + 10))[10:],
        array.array("d", bytes(len(raw))),
        np.zeros(len(raw) // 8),
        np.zeros((4, 8, len(raw) // 64), dtype="<u2"),
        np.zeros(len(raw), dtype="S1"),
        np.zeros(len(raw) // 8, dtype="datetime64[ns]"),
        np.zeros(len(raw) // 16, dtype=[("a", "<f8"), ("b", "<i8")]),
        (ctypes.c_uint32 * (len(raw) // 4))(),
        on_disk,
        mapped,
    ]
    for target in targets:
        handle.read(target, path).wait()
        view = target if isinstance(target, np.ndarray) else memoryview(target)
        assert view.tobytes() == raw, type(target)
        handle.write_now(target, path)
    handle.write_now(np.float64(3.5), path)  # a scalar is a buffer too
    handle.write_now(np.array(3.5), path)


def test_dlpack(handle, path):
    source = np.arange(1000, dtype="f4")
    handle.write(OnlyDlpack(source), path).wait()
    target = np.zeros_like(source)
    handle.read(OnlyDlpack(target), path).wait()
    assert (source == target).all()
    with pytest.raises(ValueError, match="not contiguous"):
        handle.write(OnlyDlpack(source[::2]), path)
    source.flags.writeable = False
    handle.write(OnlyDlpack(target), path).wait()


class OnAnotherDevice(OnlyDlpack):
    def __dlpack_device__(self):
        return (2, 0)


class Tensorlike(torch.Tensor):
    pass


def refused(use, value, error, text):
    with tensorferry.Handle() as handle, pytest.raises(error, match=text):
        getattr(handle, use)(value, "/nonexistent/file")
    with tensorferry.Handle() as handle, pytest.raises(error, match=text):
        getattr(handle, use + "_now")(value, "/nonexistent/file")


@pytest.mark.parametrize("use", ["read", "write"])
def test_what_is_not_one_block_of_memory_is_refused(use):
    refused(use, torch.randn(4, 4).t(), ValueError, "contiguous")
    refused(use, torch.randn(10)[::2], ValueError, "contiguous")
    refused(use, torch.randn(1, 3).expand(4, 3), ValueError, "contiguous")
    refused(use, np.zeros((4, 4)).T[1:], ValueError, "contiguous")
    refused(use, memoryview(bytearray(10))[::2], ValueError, "contiguous")
    refused(use, np.zeros(10, dtype="datetime64[s]")[::2], ValueError, "contiguous")
    refused(use, torch.eye(3).to_sparse(), TypeError, "to_dense")
    refused(use, torch.eye(3).to_sparse_csr(), TypeError, "to_dense")
    refused(use, torch.empty(3, device="meta"), TypeError, "meta.*torch.empty_like")
    refused(use, torch.randn(3, dtype=torch.complex64).conj(), ValueError, "resolve_conj")
    refused(use, torch.randn(3, dtype=torch.complex64).conj().imag, ValueError, "contiguous|neg")
    refused(use, OnAnotherDevice(np.zeros(3)), ValueError, "device")
    for nothing in ("text", 5, None, [1, 2], object(), {}):
        refused(use, nothing, TypeError, "no memory to transfer.*buffer comes first")


def test_read_only_memory_is_refused_for_a_read_and_taken_for_a_write(handle, path):
    fixed = np.arange(10)
    fixed.flags.writeable = False
    times = np.zeros(3, dtype="datetime64[s]")
    times.flags.writeable = False
    for value in (b"bytes", memoryview(b"view"), fixed, times):
        handle.write(value, path).wait()
        with pytest.raises(ValueError, match="read-only"):
            handle.read(value, path)


def test_a_fake_tensor_is_refused(handle, path):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(10)
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        handle.write(fake, path)


def test_a_subclass_of_tensor_is_a_tensor(handle, path):
    source = torch.randn(10).as_subclass(Tensorlike)
    handle.write(source, path).wait()
    target = torch.empty(10)
    handle.read(target, path).wait()
    assert torch.equal(source, target)


def test_a_bytearray_in_flight_cannot_be_resized(path):
    with tensorferry.Handle(queue_depth=1, block_bytes=4096, workers=1) as handle:
        data = bytearray(64 << 20)
        operation = handle.write(data, path)
        with pytest.raises(BufferError):
            data.extend(b"more")
        operation.wait()
        data.extend(b"more")


@any_tensor(60)
def test_any_tensor_at_any_offset(tmp_path, dtype, shape, skip, offset, engine, now):
    path = tmp_path / "data.bin"
    count = int(np.prod(shape, dtype=int))
    source = torch.empty(skip + count, dtype=dtype)
    raw = fill(source)
    source = source[skip:].view(shape)
    target = torch.empty(skip + count + 1, dtype=dtype)
    around = fill(target)
    inner = target[skip : skip + count].view(shape)
    begin, size = skip * dtype.itemsize, count * dtype.itemsize
    write_and_read(engine, now, source, inner, path, offset)
    whole = bytes_of(target)
    assert whole[begin : begin + size] == raw[begin:]
    assert whole[:begin] == around[:begin]
    assert whole[begin + size :] == around[begin + size :]
    if size:
        with open(path, "rb") as file:
            file.seek(offset)
            assert file.read(size) == raw[begin:]
