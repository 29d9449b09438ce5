"""safe_open: a file, and its tensors as they are asked for."""

from __future__ import annotations

import errno
import math
import mmap
from itertools import islice

from .. import _core
from .._progress import report_of, wait_for
from .._shared_handle import shared_handle
from .devices import device_named, framework_named
from .errors import (
    SafetensorError,
    check_path,
    check_type,
    damage_is_a_safetensor_error,
    header_error,
)
from .frameworks import ARENA_BYTES, NumpyArrays, TorchTensors
from .indexing import box_by_safetensors, box_by_torch
from .read_ahead import ReadAhead
from .serialization import BITS

TYPE_CHECKING = False  # as in typing, which takes long to import
if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any, NamedTuple

    from .._core import Operation
    from .._progress import Progress
    from .frameworks import Framework
    from .indexing import Range

    class Info(NamedTuple):
        """What the header says of a tensor."""

        name: str
        dtype: str
        shape: list[int]
        file: int
        offset: int
        bytes: int

else:
    from collections import namedtuple

    Info = namedtuple("Info", "name dtype shape file offset bytes")

# Runs of fewer bytes cost more than the bytes between them.
_RUN_BYTES_MIN = 512


class OpenFile:
    """A file and how to make tensors of it. safe_open and its slices share it."""

    def __init__(self, path: str, framework: str, device: Any, verify: bool) -> None:
        try:
            self._file = _core.SafetensorsFile(path)
        except OSError as error:
            raise _opening_error(error, path) from error
        if device != "cpu" and framework != "pytorch":
            raise SafetensorError(f"Device {device} is not supported for framework {framework}")
        if verify and not self._file.has_checksums:
            raise SafetensorError(
                f"{path} has no checksums to verify: save it with checksums=True, "
                "or load it without verify"
            )
        self._rows = {row[0]: row for row in self._file.tensors}
        self.metadata = self._file.metadata
        self.by_torch = framework == "pytorch"
        self.verify = verify
        self._make: Framework = TorchTensors(device) if self.by_torch else NumpyArrays()
        self._order = {name: index for index, name in enumerate(self._rows)}
        self._ahead: ReadAhead | None = None
        if self._make.may_read_ahead:
            self._ahead = ReadAhead([row[5] for row in self._rows.values()])

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.stop()

    def names(self) -> list[str]:
        """Returns the names of the tensors in the order of the file."""
        return list(self._rows)

    def info(self, name: str) -> Info:
        check_type("name", name, str)
        try:
            return Info(*self._rows[name])
        except KeyError:
            raise SafetensorError(f"File does not contain tensor {name}") from None

    def _start(self, reads: list[tuple[Any, ...]]) -> Operation:
        verify = "required" if self.verify else "no"
        return self._file.read(shared_handle(), reads, verify)  # type: ignore[arg-type]

    def _start_ahead(self, first: int, end: int) -> tuple[list[Any], Operation]:
        infos = [Info(*row) for row in islice(self._rows.values(), first, end)]
        # A short tensor has memory of its own: who keeps it alone must not keep all.
        memories = self._memories(infos, ARENA_BYTES)
        reads = [(info.name, memory) for info, memory in zip(infos, memories) if info.bytes]
        return memories, self._start(reads)

    def _memories(self, infos: Sequence[Info], shared_bytes_min: int = 0) -> list[Any]:
        """Returns memory for each of these tensors. They share an arena, without gaps for what lies
        between them in the file; those of fewer bytes than this do not share it."""
        positions, end = [], 0
        for info in infos:
            if info.bytes >= shared_bytes_min:
                end += (info.offset - end) % mmap.PAGESIZE
                positions.append(end)
                end += info.bytes
            else:
                positions.append(-1)
        place = self._make.place(0, end)
        return [
            self._make.memory(place if position >= 0 else None, position, info.bytes)
            for info, position in zip(infos, positions)
        ]

    def _read(
        self,
        reads: list[tuple[Any, ...]],
        total: int,
        report: Callable[[int, int], object] | None = None,
    ) -> None:
        if not total:
            return
        with damage_is_a_safetensor_error():
            wait_for(self._start(reads), total, report)

    def _whole(self, info: Info) -> Any:
        """Returns memory with the bytes of a tensor."""
        if self._ahead is not None:
            memory = self._ahead.take(self._order[info.name], self._start_ahead)
            if memory is not None:
                return memory
        (memory,) = self._memories([info])
        self._read([(info.name, memory)], info.bytes)
        return memory

    def tensor(self, info: Info) -> Any:
        """Reads one tensor."""
        shape = self._shape(info)
        dtype = self._make.dtype(info.dtype)
        return self._make.finished(self._make.tensor(self._whole(info), dtype, shape))

    def tensors(
        self, names: Iterable[str] | None, report: Callable[[int, int], object] | None
    ) -> dict[str, Any]:
        """Reads these tensors, or all, in one go and in the order of the file."""
        if names is None:
            infos = [Info(*row) for row in self._rows.values()]
        else:
            wanted = {self.info(name).name for name in names}
            infos = [
                Info(*self._rows[name]) for name in sorted(wanted, key=self._order.__getitem__)
            ]
        shapes = [self._shape(info) for info in infos]
        dtypes = [self._make.dtype(info.dtype) for info in infos]
        memories = self._memories(infos)
        reads = [(info.name, memory) for info, memory in zip(infos, memories) if info.bytes]
        self._read(reads, sum(info.bytes for info in infos), report)
        found = {}
        for index, info in enumerate(infos):
            tensor = self._make.tensor(memories[index], dtypes[index], shapes[index])
            memories[index] = None
            found[info.name] = self._make.finished(tensor)
        return found

    def box(self, info: Info, ranges: Sequence[Range]) -> Any:
        """Reads a part of a tensor: these ranges of its dimensions."""
        dtype = self._make.dtype(info.dtype)
        sizes = [end - begin for begin, end in ranges]
        if sizes == info.shape:
            return self._make.tensor(self._whole(info), dtype, sizes)
        bits = BITS[info.dtype]
        length = math.prod(sizes) * bits // 8
        row_bytes = math.prod(info.shape[1:]) * bits // 8
        offset = info.offset + (ranges[0][0] * row_bytes if ranges and length else 0)
        memory = self._make.memory(self._make.place(offset, length), offset, length)
        self._read([(info.name, memory, ranges)], length)
        return self._make.tensor(memory, dtype, sizes)

    def finished(self, tensor: Any) -> Any:
        return self._make.finished(tensor)

    def _shape(self, info: Info) -> list[int]:
        if info.dtype != "F4" or not self.by_torch:
            return info.shape
        if not info.shape or info.shape[-1] % 2:
            raise SafetensorError(
                "f4_x2 dtype requires that the last dim be divisible by 2 in torch: "
                f"got {info.shape}"
            )
        return [*info.shape[:-1], info.shape[-1] // 2]


def _opening_error(error: OSError, path: str) -> Exception:
    if error.errno == errno.EBADMSG:
        return header_error(error, "Error while deserializing header")
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG):
        return FileNotFoundError(f"No such file or directory: {path}")
    return error


class SafeSlice:
    """A tensor of a file before it is read. Index it to read what you need of it."""

    def __init__(self, file: OpenFile, info: Info, by_torch: bool) -> None:
        self._file = file
        self._info = info
        self._by_torch = by_torch

    def get_shape(self) -> list[int]:
        """Returns the shape of the whole tensor."""
        return list(self._info.shape)

    def get_dtype(self) -> str:
        """Returns the name of its dtype in files: "F32"."""
        return self._info.dtype

    def __getitem__(self, index: Any) -> Any:
        shape = self._info.shape
        if not self._by_torch:
            return self._part(*box_by_safetensors(index, shape, BITS[self._info.dtype]))
        box = box_by_torch(index, shape)
        if box is not None:
            return self._part(*box)
        # torch finds what is wrong with the index, if anything is, before we read.
        import torch

        torch.empty((), dtype=torch.uint8, device="cpu").expand(shape)[index]
        whole = self._file.box(self._info, [(0, size) for size in shape])
        return self._file.finished(whole[index])

    def _part(self, ranges: list[Range], rest: tuple[Any, ...]) -> Any:
        shape = self._info.shape
        if self._file.verify:
            wider = [(0, size) for size in shape]  # checksums are of whole tensors
        else:
            wider = _widened(ranges, shape, BITS[self._info.dtype])
        tensor = self._file.box(self._info, wider)
        if wider != ranges:
            tensor = tensor[tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(ranges, wider))]
        if any(item != slice(None) for item in rest):
            tensor = tensor[rest if self._file.by_torch else (*rest, ...)]  # no scalar of NumPy's
        if self._file.by_torch:
            return self._file.finished(tensor.contiguous())
        return tensor if tensor.flags.c_contiguous else tensor.copy()


def _widened(ranges: list[Range], shape: Sequence[int], bits: int) -> list[Range]:
    """Returns the ranges to read: whole rows where a part of each would be many short runs."""
    wider = list(ranges)
    run_bits = bits
    for dimension in reversed(range(len(shape))):
        begin, end = wider[dimension]
        run_bits *= end - begin
        if (begin, end) == (0, shape[dimension]):
            continue
        above = math.prod(end - begin for begin, end in wider[:dimension])
        if above > 1 and run_bits < 8 * _RUN_BYTES_MIN:
            run_bits = run_bits // max(end - begin, 1) * shape[dimension]
            wider[dimension] = (0, shape[dimension])
        else:
            break
    return wider


class safe_open:  # noqa: N801
    """Opens a safetensors file; tensors are read as they are asked for.

    `framework` is "pt" or "np" ("tf", "flax", "mlx" and "paddle" go to the package safetensors).
    `device` is a device of torch. Tensors are in memory of their own and outlive the file.

    Beyond safetensors: `verify=True` checks the checksums of a file that was saved with them;
    `progress` is True for a bar in get_tensors(), or a function of (done bytes, total bytes);
    `mapping=True` maps the file, as the package safetensors does.
    """

    _inner: OpenFile | None
    _report: Callable[[int, int], object] | None
    _torch_indexes: bool

    def __new__(
        cls,
        filename: str | os.PathLike[str],
        framework: str,
        device: Any = "cpu",
        *,
        backend: str = "mmap",
        verify: bool = False,
        progress: Progress = None,
        mapping: bool = False,
    ) -> safe_open:
        path = check_path(filename)
        kind = framework_named(framework)
        place = device_named(device, kind)
        check_type("backend", backend, str)
        if backend not in ("mmap", "pread"):
            raise SafetensorError(
                f'backend "{backend}" is invalid (expected one of: "mmap", "pread")'
            )
        if mapping or kind not in ("pytorch", "numpy"):
            from .original import original_safe_open

            theirs: safe_open = original_safe_open()(filename, framework, device, backend=backend)
            return theirs
        self = super().__new__(cls)
        self._report = report_of(progress, "loading")
        self._torch_indexes = kind == "pytorch" and backend == "mmap"
        self._inner = OpenFile(path, kind, place, verify)
        return self

    def _opened(self) -> OpenFile:
        if self._inner is None:
            raise SafetensorError("File is closed")
        return self._inner

    def keys(self) -> list[str]:
        """Returns the names of the tensors, sorted."""
        return sorted(self._opened().names(), key=str.encode)

    def offset_keys(self) -> list[str]:
        """Returns the names of the tensors, in the order of the file."""
        return self._opened().names()

    def metadata(self) -> dict[str, str] | None:
        """Returns the texts of the header, without checksums of ours; None if it has none."""
        metadata = self._opened().metadata
        return None if metadata is None else dict(metadata)

    def get_tensor(self, name: str) -> Any:
        """Reads one tensor."""
        opened = self._opened()
        return opened.tensor(opened.info(name))

    def get_tensors(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Reads all tensors, or those of these names, as one read in the order of the file."""
        return self._opened().tensors(names, self._report)

    def get_slice(self, name: str) -> SafeSlice:
        """Returns an object to index: it reads the rows and columns that you ask for."""
        opened = self._opened()
        return SafeSlice(opened, opened.info(name), self._torch_indexes)

    def __enter__(self) -> safe_open:
        return self

    def __exit__(self, *args: object) -> None:
        if self._inner is not None:
            self._inner.close()
        self._inner = None


class safe_open_handle(safe_open):  # noqa: N801
    """safe_open for the file that a file object has open, by its name."""

    def __new__(
        cls, f: Any, framework: str, device: Any = "cpu", **options: Any
    ) -> safe_open_handle:
        f.fileno  # noqa: B018 - it must be a file
        made: Any = super().__new__(cls, f.name, framework, device, **options)
        return made  # type: ignore[no-any-return]
