"""safe_open: a file, and its tensors as they are asked for."""

from __future__ import annotations

import errno
import mmap
from itertools import islice

from .. import _core
from .._progress import end, report_of, wait_for
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
from .read_ahead import ReadAhead
from .slices import SafeSlice, selection_of, whole_of

TYPE_CHECKING = False  # as in typing, which takes long to import
if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Any, Literal, NamedTuple, TypeAlias

    from .._core import Operation
    from .._progress import Progress
    from .frameworks import Framework
    from .slices import Selection

    Verify: TypeAlias = bool | Literal["if_present"]

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

# Several selections are read so many bytes at a time, all of them at once.
_WINDOW_BYTES = 64 << 20


class OpenFile:
    """A file and how to make tensors of it. safe_open and its slices share it."""

    def __init__(self, path: str, framework: str, device: Any, verify: Verify) -> None:
        try:
            self._file = _core.SafetensorsFile(path)
        except OSError as error:
            raise _opening_error(error, path) from error
        if device != "cpu" and framework != "pytorch":
            raise SafetensorError(f"Device {device} is not supported for framework {framework}")
        if verify and verify != "if_present" and (unchecked := self._file.unchecked):
            raise SafetensorError(_no_checksums(path, unchecked, len(self._file.tensors)))
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
        verify = self.verify if self.verify == "if_present" else "required"
        return self._file.read(shared_handle(), reads, verify if self.verify else "no")

    def _start_ahead(self, first: int, end: int) -> tuple[list[Any], Operation]:
        infos = [Info(*row) for row in islice(self._rows.values(), first, end)]
        # A short tensor has memory of its own: who keeps it alone must not keep all.
        memories = self._memories(infos, ARENA_BYTES)
        reads = [(info.name, memory) for info, memory in zip(infos, memories) if info.bytes]
        return memories, self._start(reads)

    def _memories(self, wanted: Sequence[Info | Selection], shared_bytes_min: int = 0) -> list[Any]:
        """Returns memory for each of these tensors or selections. They share an arena, without gaps
        for what lies between them in the file; those of fewer bytes than this do not share it."""
        positions, end = [], 0
        for one in wanted:
            if one.bytes >= shared_bytes_min:
                end += (one.offset - end) % mmap.PAGESIZE
                positions.append(end)
                end += one.bytes
            else:
                positions.append(-1)
        place = self._make.place(0, end)
        return [
            self._make.memory(place if position >= 0 else None, position, one.bytes)
            for one, position in zip(wanted, positions)
        ]

    def _whole(self, info: Info) -> Any:
        """Returns memory with the bytes of a tensor."""
        if self._ahead is not None:
            memory = self._ahead.take(self._order[info.name], self._start_ahead)
            if memory is not None:
                return memory
        (memory,) = self._memories([info])
        if info.bytes:
            with damage_is_a_safetensor_error():
                wait_for(self._start([(info.name, memory)]), info.bytes, None)
        return memory

    def tensor(self, info: Info) -> Any:
        """Reads one tensor."""
        return self.read_selection(whole_of(info, self._shape(info), self._make.finished))

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
        selections = [whole_of(info, self._shape(info), self._make.finished) for info in infos]
        return {
            info.name: tensor
            for info, tensor in zip(infos, self.read_selections(selections, report))
        }

    def read_selection(self, selection: Selection) -> Any:
        """Reads what is selected of a tensor."""
        if selection.ranges is not None:
            return self.read_selections([selection], None)[0]
        dtype = self._make.dtype(selection.info.dtype)
        return selection.finish(
            self._make.tensor(self._whole(selection.info), dtype, selection.shape)
        )

    def read_selections(
        self, selections: Sequence[Selection], report: Callable[[int, int], object] | None
    ) -> list[Any]:
        """Reads these selections of tensors in one go. While the drive reads, memory for later ones
        is made, and tensors of earlier ones."""
        dtypes = iter([self._make.dtype(selection.info.dtype) for selection in selections])
        total = sum(selection.bytes for selection in selections)
        under_way: list[tuple[Sequence[Selection], list[Any], Operation]] = []
        found: list[Any] = []
        done = 0

        def tell(done_of_window: int, _: int) -> None:
            if report is not None and total:
                report(done + done_of_window, total)

        try:
            for window in _windows(selections):
                memories = self._memories(window)
                reads = [
                    selection.read_into(memory)
                    for selection, memory in zip(window, memories)
                    if selection.bytes
                ]
                under_way.append((window, memories, self._start(reads)))
            for window, memories, operation in under_way:
                length = sum(selection.bytes for selection in window)
                with damage_is_a_safetensor_error():
                    wait_for(operation, length, tell if report is not None else None)
                done += length
                for index, selection in enumerate(window):
                    tensor = self._make.tensor(memories[index], next(dtypes), selection.shape)
                    memories[index] = None
                    found.append(selection.finish(tensor))
        except BaseException:
            for _, _, operation in under_way:
                end(operation)
            raise
        return found

    def slices(
        self,
        indexes: Mapping[str, Any],
        torch_indexes: bool,
        report: Callable[[int, int], object] | None,
    ) -> dict[str, Any]:
        """Reads an index of each of these tensors, in one go and in the order of the file."""
        selections = [
            selection_of(self, self.info(name), index, torch_indexes)
            for name, index in indexes.items()
        ]
        selections.sort(key=lambda selection: self._order[selection.info.name])
        found = self.read_selections(selections, report)
        return {selection.info.name: tensor for selection, tensor in zip(selections, found)}

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


def _windows(selections: Sequence[Selection]) -> Iterator[Sequence[Selection]]:
    """Yields runs of selections, each of so many bytes or little more."""
    first, length = 0, 0
    for index, selection in enumerate(selections):
        length += selection.bytes
        if length >= _WINDOW_BYTES:
            yield selections[first : index + 1]
            first, length = index + 1, 0
    if first < len(selections):
        yield selections[first:]


def _no_checksums(path: str, unchecked: list[str], tensors: int) -> str:
    if len(unchecked) == tensors:
        lacking = f"{path} has no checksums to verify"
    else:
        more = f" and {len(unchecked) - 1} more" if len(unchecked) > 1 else ""
        lacking = f"{path} has no checksum of tensor {unchecked[0]}{more}"
    return (
        f"{lacking}: save it with checksums=True, load it without verify, or check those that it "
        'has with verify="if_present"'
    )


def _opening_error(error: OSError, path: str) -> Exception:
    if error.errno == errno.EBADMSG:
        return header_error(error, "Error while deserializing header")
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG):
        return FileNotFoundError(f"No such file or directory: {path}")
    return error


class safe_open:  # noqa: N801
    """Opens a safetensors file; tensors are read as they are asked for.

    `framework` is "pt" or "np" ("tf", "flax", "mlx" and "paddle" go to the package safetensors).
    `device` is a device of torch. Tensors are in memory of their own and outlive the file.

    Beyond safetensors: `verify=True` checks the checksums of a file that was saved with them, and
    raises SafetensorError if a tensor has none; `verify="if_present"` checks those that are there;
    `progress` is True for a bar in get_tensors() and get_slices(), or a function of (done bytes,
    total bytes); `mapping=True` maps the file, as the package safetensors does.
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
        verify: Verify = False,
        progress: Progress = None,
        mapping: bool = False,
    ) -> safe_open:
        if verify not in (True, False, "if_present"):
            raise ValueError(f"verify is {verify!r}; it must be True, False or 'if_present'")
        if verify and mapping:
            raise ValueError("verify needs mapping=False: safetensors compares no checksums")
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

    def get_slices(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Reads parts of tensors, an index by name, as one read in the order of the file.

        >>> file.get_slices({"embedding": slice(100, 200), "head": (slice(None), slice(0, 32))})
        """
        opened = self._opened()
        return opened.slices(parts, self._torch_indexes, self._report)

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
