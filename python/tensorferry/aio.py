"""DeepSpeed's async_io over tensorferry.Handle: the same names, argument orders, returns, defaults.

Every failure raises an OSError. Only the functions that make tensors import torch.
"""

from __future__ import annotations

import errno
import operator
import os
import threading
import time

from . import _core
from ._core import File, Handle, InvalidArgument
from ._notes import add_note

TYPE_CHECKING = False  # as in typing, which takes long to import
if TYPE_CHECKING:
    from typing import Any

    import torch

    from ._core import Operation, _File, _Path

__all__ = ["aio_handle", "aio_read", "aio_write", "deepspeed_memcpy", "gds_handle", "pin_handle"]

# Only the user can open a new file, as with DeepSpeed.
_PERMISSIONS = 0o600

_OFFSET_MOST = (1 << 63) - 1

# The upper limits of a Handle's settings, under DeepSpeed's names.
MOST = {"block_size": 1 << 30, "queue_depth": 4096, "intra_op_parallelism": 256}


def _failure(
    kind: type[OSError],
    code: int,
    operation: str,
    hint: str,
    filename: _File | None = None,
    offset: int | None = None,
    length: int | None = None,
) -> OSError:
    """Makes an error with the attributes that the errors of a Handle have."""
    error = kind(code, f"{operation}: {hint}", *(() if filename is None else (filename,)))
    vars(error).update(operation=operation, hint=hint, offset=offset, length=length)
    return error


def _check_setting(name: str, value: int) -> None:
    if not 1 <= operator.index(value) <= MOST[name]:
        hint = f"{name} is {value}; it must be from 1 to {MOST[name]}"
        raise _failure(InvalidArgument, errno.EINVAL, "open handle", hint)


def _settings(
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    intra_op_parallelism: int = 1,
) -> dict[str, Any]:
    _check_setting("block_size", block_size)
    _check_setting("queue_depth", queue_depth)
    _check_setting("intra_op_parallelism", intra_op_parallelism)
    return dict(
        block_bytes=block_size,
        queue_depth=queue_depth,
        workers=intra_op_parallelism,
        submit="single" if single_submit else "batch",
        overlap=bool(overlap_events),
    )


def _report(start: float, transferred: float, verbose: bool) -> None:
    if verbose:
        call = time.perf_counter() - start
        aio = transferred - start
        print(f"Elapsed time(usec): aio = {aio * 1e6} call = {call * 1e6}", flush=True)


def _check_validation(file: _File, validate: bool) -> None:
    if validate and isinstance(file, int):
        raise TypeError("validation opens the file again: give its name, not a descriptor")


def _wrong_size(filename: _Path, size: int, wanted: int) -> OSError:
    hint = (
        f"the file holds {size} bytes and the buffer {wanted}; they must be equal; "
        "use Handle.read() for a part of a file"
    )
    return _failure(InvalidArgument, errno.EINVAL, "read", hint, filename, 0, wanted)


def _wrong_offset(operation: str, file: _File, file_offset: int) -> OSError:
    hint = f"file_offset is {file_offset}; it must be from 0 to {_OFFSET_MOST}"
    return _failure(InvalidArgument, errno.EINVAL, operation, hint, file)


def aio_read(
    buffer: object,
    filename: _Path,
    block_size: int = 1048576,
    queue_depth: int = 128,
    single_submit: bool = False,
    overlap_events: bool = True,
    validate: bool = False,
    *,
    verbose: bool = False,
) -> int:
    """Fills the buffer from a file of exactly its size and returns 0.

    validate=True compares the buffer with an ordinary read of the file and raises at the first
    offset that differs. verbose=True prints how long the transfer and the whole call took.
    """
    start = time.perf_counter()
    with (
        Handle(**_settings(block_size, queue_depth, single_submit, overlap_events)) as handle,
        File(filename) as file,
    ):
        size, wanted = file.size, _core.byte_count(buffer)
        if size != wanted:
            raise _wrong_size(filename, size, wanted)
        handle.read_now(buffer, file)
    transferred = time.perf_counter()
    if validate:
        _core.validate(buffer, filename)
    _report(start, transferred, verbose)
    return 0


def aio_write(
    buffer: object,
    filename: _Path,
    block_size: int = 1048576,
    queue_depth: int = 128,
    single_submit: bool = False,
    overlap_events: bool = True,
    validate: bool = False,
    *,
    verbose: bool = False,
) -> int:
    """Writes the buffer to a file, cuts the file to its size and returns 0. See aio_read()."""
    start = time.perf_counter()
    size = _core.byte_count(buffer)
    with (
        Handle(**_settings(block_size, queue_depth, single_submit, overlap_events)) as handle,
        File(filename, "write", permissions=_PERMISSIONS) as file,
    ):
        handle.write_now(buffer, file)
        if file.size > size:
            file.resize(size)
    transferred = time.perf_counter()
    if validate:
        _core.validate(buffer, filename)
    _report(start, transferred, verbose)
    return 0


def deepspeed_memcpy(dest: object, src: object) -> int:
    """Copies the bytes of src to dest, which must have the same size. Returns 0."""
    _core.copy(dest, src)
    return 0


class pin_handle:
    """Makes page-locked tensors. Every handle of the process recognizes them.

    >>> import tensorferry, torch
    >>> pin = tensorferry.pin_handle()
    >>> tensor = pin.new_cpu_locked_tensor(1000, torch.empty(0, dtype=torch.bfloat16))
    >>> pin.is_pinned(tensor[10:20])
    True
    """

    _known_to_cuda = False  # DeepSpeed itself registers the tensors of a pin_handle with CUDA

    def new_cpu_locked_tensor(
        self, num_elem: int, example_tensor: torch.Tensor | None = None, **misspelt: torch.Tensor
    ) -> torch.Tensor:
        """Returns a 1-D CPU tensor of the example's dtype that begins its own page-locked pages.

        free_cpu_locked_tensor() frees it, and so does Python when the tensor and all its views are
        gone. A forked child, such as a worker of a DataLoader, does not inherit the memory: a child
        that touches the tensor ends with SIGSEGV.
        """
        import torch

        example = _example("new_cpu_locked_tensor", example_tensor, misspelt)
        num_elem = operator.index(num_elem)
        if num_elem < 0:
            raise ValueError(f"num_elem is {num_elem}; it must not be negative")
        # At least one element, so that an empty tensor has an address of its own too.
        # frombuffer() ignores the default device, DeepSpeed does not replace it, and it makes a
        # root tensor, to which DeepSpeed can tie a finalizer.
        size = max(1, num_elem) * example.dtype.itemsize
        pages = _core.PinnedBuffer(size, known_to_cuda=self._known_to_cuda)
        locked = torch.frombuffer(pages, dtype=example.dtype)
        return locked if num_elem else locked.resize_(0)

    def free_cpu_locked_tensor(self, locked_tensor: torch.Tensor) -> bool:
        """Frees a tensor of new_cpu_locked_tensor(). Returns False for any other tensor, for a
        part of one, and the second time.

        The memory stays until the operations and views that use it end.
        """
        try:
            if not locked_tensor.is_cpu or locked_tensor.storage_offset() != 0:
                return False
            return _core.retire(locked_tensor.untyped_storage().data_ptr())
        except Exception:  # not a tensor, or a tensor without memory
            return False

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        """Does the same for the tensor whose data_ptr() is `address`."""
        return _core.retire(address)

    def is_pinned(self, buffer: object) -> bool:
        """Returns whether any handle of this process, or torch, has page-locked the whole buffer.

        An empty tensor and a tensor on another device give False, never an error.
        """
        return _core.is_pinned(buffer)


class aio_handle:
    """DeepSpeed's aio_handle over a tensorferry.Handle.

    It takes any buffer, size, alignment and offset. Many threads may call one handle at once; a
    synchronous call completes only its own operation. intra_op_parallelism is the number of
    workers, and each worker has its own queue of queue_depth requests. Do not change a buffer that
    is being written before wait() returns: the handle writes from the buffer itself, whether it is
    page-locked or not.

    >>> import tensorferry
    >>> handle = tensorferry.aio_handle()
    >>> handle.async_pwrite(b"layer 0", "layers.bin")
    0
    >>> handle.async_pwrite(b"layer 1", "layers.bin", 7)
    0
    >>> handle.wait()
    2
    """

    def __init__(
        self,
        block_size: int = 1048576,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        self._open(
            _settings(block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism)
        )
        self._block_size = block_size
        self._queue_depth = queue_depth
        self._single_submit = bool(single_submit)
        self._overlap_events = bool(overlap_events)
        self._intra_op_parallelism = intra_op_parallelism
        self._lock = threading.Lock()
        # Each operation with None, or with the arguments of validate().
        self._pending: list[tuple[Operation, tuple[object, _Path, int] | None]] = []

    def __repr__(self) -> str:
        try:
            engine = f"engine {self.engine}"
        except OSError as error:  # as in a forked child
            engine = getattr(error, "hint", str(error))
        return (
            f"<tensorferry.{type(self).__name__}: block_size={self._block_size}, "
            f"queue_depth={self._queue_depth}, single_submit={self._single_submit}, "
            f"overlap_events={self._overlap_events}, "
            f"intra_op_parallelism={self._intra_op_parallelism}, {len(self._pending)} pending, "
            f"{engine}>"
        )

    def get_block_size(self) -> int:
        """Returns block_size as the constructor got it."""
        return self._block_size

    def get_queue_depth(self) -> int:
        """Returns queue_depth as the constructor got it."""
        return self._queue_depth

    def get_single_submit(self) -> bool:
        """Returns single_submit as the constructor got it."""
        return self._single_submit

    def get_overlap_events(self) -> bool:
        """Returns overlap_events as the constructor got it."""
        return self._overlap_events

    def get_intra_op_parallelism(self) -> int:
        """Returns intra_op_parallelism as the constructor got it."""
        return self._intra_op_parallelism

    def get_alignment(self) -> int:
        """Returns the size that DeepSpeed's FastFileWriter rounds to; any other size works too."""
        return 512 * self._intra_op_parallelism

    @property
    def engine(self) -> str:
        """The engine in use."""
        return self._handle.engine

    @property
    def engine_reason(self) -> str:
        """Why the handle uses that engine."""
        return self._handle.engine_reason

    def stats(self) -> dict[str, Any]:
        """Counts what the handle has done so far, and the page-locked memory of the process."""
        return self._handle.stats() | _core.pinned_stats()

    def read(self, buffer: object, filename: _Path, validate: bool, file_offset: int = 0) -> int:
        """Fills the buffer from the file and returns 0."""
        self._now("read_now", buffer, filename, validate, file_offset)
        return 0

    def write(self, buffer: object, filename: _Path, validate: bool, file_offset: int = 0) -> int:
        """Writes the buffer and returns 0. It never cuts the file."""
        self._now("write_now", buffer, filename, validate, file_offset)
        return 0

    def pread(
        self, buffer: object, filename: _Path, validate: bool, *args: int, **kwargs: int
    ) -> int:
        """pread(buffer, filename, validate, async, file_offset=0) returns 0 at once if async,
        else 1 at the end of the read."""
        return self._start_or_now("read", buffer, filename, validate, args, kwargs)

    def pwrite(
        self, buffer: object, filename: _Path, validate: bool, *args: int, **kwargs: int
    ) -> int:
        """pwrite(buffer, filename, validate, async, file_offset=0) returns 0 at once if async,
        else 1 at the end of the write."""
        return self._start_or_now("write", buffer, filename, validate, args, kwargs)

    def sync_pread(self, buffer: object, filename: _File, file_offset: int = 0) -> int:
        """Fills the buffer from the file and returns 1."""
        self._transfer("read_now", buffer, filename, file_offset)
        return 1

    def sync_pwrite(self, buffer: object, filename: _File, file_offset: int = 0) -> int:
        """Writes the buffer and returns 1."""
        self._transfer("write_now", buffer, filename, file_offset)
        return 1

    def async_pread(
        self,
        buffer: object,
        filename: _File | None = None,
        file_offset: int = 0,
        *,
        fd: int | None = None,
    ) -> int:
        """Starts a read and returns 0; wait() counts it. `filename` may be a descriptor."""
        return self._start("read", buffer, _one_of(filename, fd), False, file_offset)

    def async_pwrite(
        self,
        buffer: object,
        filename: _File | None = None,
        file_offset: int = 0,
        *,
        fd: int | None = None,
    ) -> int:
        """Starts a write and returns 0; wait() counts it. `filename` may be a descriptor.

        Do not change the buffer before wait() returns: the handle takes no copy.
        """
        return self._start("write", buffer, _one_of(filename, fd), False, file_offset)

    def wait(self) -> int:
        """Waits for the operations started since the last wait() and returns their number.

        If some fail, it waits for all and raises the first error, with the others in `.others`.
        """
        with self._lock:
            pending, self._pending = self._pending, []
        failures = []
        try:
            for operation, check in pending:
                try:
                    operation.wait()
                    if check is not None:
                        _core.validate(*check)
                except Exception as failure:
                    if not operation.done():  # not its own failure: a signal handler has raised
                        raise
                    failures.append(failure)
        except BaseException:  # such as Ctrl-C: all stay pending, so that no failure is lost
            with self._lock:
                self._pending[:0] = pending
            raise
        if failures:
            first: Any = failures[0]
            first.others = tuple(failures[1:])
            for other in first.others:
                add_note(first, f"and: {other}")
            raise first
        return len(pending)

    def new_cpu_locked_tensor(
        self, num_elem: int, example_tensor: torch.Tensor | None = None, **misspelt: torch.Tensor
    ) -> torch.Tensor:
        """See pin_handle.new_cpu_locked_tensor()."""
        return _pins.new_cpu_locked_tensor(num_elem, example_tensor, **misspelt)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """See pin_handle.free_cpu_locked_tensor()."""
        return _pins.free_cpu_locked_tensor(tensor)

    def is_pinned(self, buffer: object) -> bool:
        """See pin_handle.is_pinned()."""
        return _core.is_pinned(buffer)

    def _start_or_now(
        self,
        name: str,
        buffer: object,
        filename: _Path,
        validate: bool,
        args: tuple[int, ...],
        kwargs: dict[str, int],
    ) -> int:
        is_async, file_offset = _async_and_offset(args, kwargs)
        if is_async:
            return self._start(name, buffer, filename, validate, file_offset)
        self._now(f"{name}_now", buffer, filename, validate, file_offset)
        return 1

    def _now(
        self, name: str, buffer: object, filename: _Path, validate: bool, file_offset: int
    ) -> None:
        _check_validation(filename, validate)
        self._transfer(name, buffer, filename, file_offset)
        if validate:
            _core.validate(buffer, filename, file_offset)

    def _start(
        self, name: str, buffer: object, file: _File, validate: bool, file_offset: int
    ) -> int:
        _check_validation(file, validate)
        operation = self._transfer(name, buffer, file, file_offset)
        check: Any = (buffer, file, file_offset) if validate else None
        with self._lock:
            self._pending.append((operation, check))
        return 0

    def _open(self, settings: dict[str, Any]) -> None:
        self._handle = Handle(**settings)

    def _transfer(self, name: str, buffer: object, file: _File, file_offset: int) -> Any:
        """Calls the method `name` of a Handle."""
        if not 0 <= operator.index(file_offset) <= _OFFSET_MOST:
            raise _wrong_offset(name.removesuffix("_now"), file, file_offset)
        if name.startswith("write") and not isinstance(file, (int, File)):
            _core.byte_count(buffer)  # raises before a file is made for an object without bytes
            # `with` closes the file after a failure too, whose traceback keeps this frame. An
            # operation in flight keeps the file open by itself.
            with File(file, "write", permissions=_PERMISSIONS) as opened:
                return self._move(name, buffer, opened, file_offset)
        return self._move(name, buffer, file, file_offset)

    def _move(self, name: str, buffer: object, file: _File, file_offset: int) -> Any:
        return getattr(self._handle, name)(buffer, file, file_offset)


class gds_handle(aio_handle):
    """DeepSpeed's gds_handle: moves tensors of a GPU by GPUDirect Storage where it is supported.

    Elsewhere they go through page-locked memory of the CPU, also at the speed of the drive;
    engine_reason says why. CPU memory moves as with aio_handle.
    """

    def _open(self, settings: dict[str, Any]) -> None:
        super()._open(settings)
        mode, why = _core.gds_support()
        self._reason = f"GPUDirect Storage: {why}"
        # Moves tensors of a GPU.
        self._direct = Handle("gds", **settings) if mode == "direct" else None

    @staticmethod
    def available() -> bool:
        """Returns whether this machine has a GPU whose tensors can be moved. Starts nothing."""
        return os.path.exists("/proc/driver/nvidia/version")

    @property
    def engine(self) -> str:
        """The engine that moves tensors of a GPU."""
        return (self._direct or self._handle).engine

    @property
    def engine_reason(self) -> str:
        """Why the handle uses that engine."""
        return f"{self._reason}; {(self._direct or self._handle).engine_reason}"

    def get_alignment(self) -> int:
        """Returns 512 for any number of workers, as DeepSpeed does."""
        return 512

    def new_pinned_device_tensor(
        self, num_elem: int, example_tensor: torch.Tensor | None = None, **misspelt: torch.Tensor
    ) -> torch.Tensor:
        """Returns a 1-D tensor of the example's dtype on the current CUDA device."""
        import torch

        example = _example("new_pinned_device_tensor", example_tensor, misspelt)
        count = operator.index(num_elem)
        if count < 0:
            raise ValueError(f"num_elem is {count}; it must not be negative")
        if not torch.cuda.is_available():
            hint = "torch finds no GPU"
            raise _failure(OSError, errno.ENODEV, "new_pinned_device_tensor", hint)
        tensor = torch.empty(count, dtype=example.dtype, device="cuda")
        self.pin_device_tensor(tensor)
        return tensor

    def free_pinned_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Undoes new_pinned_device_tensor(): torch frees the memory. Returns True."""
        return self.unpin_device_tensor(tensor)

    def pin_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Registers a tensor of a GPU for direct transfers and returns True.

        Call unpin_device_tensor() before torch frees the tensor. Without GPUDirect Storage, both
        calls do nothing.
        """
        _check_on_gpu(tensor)
        if self._direct is not None and tensor.nbytes:
            _core.register_gpu_memory(tensor)
        return True

    def unpin_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Undoes pin_device_tensor() and returns True."""
        _check_on_gpu(tensor)
        if self._direct is not None and tensor.nbytes:
            _core.unregister_gpu_memory(tensor)
        return True

    def _move(self, name: str, buffer: object, file: _File, file_offset: int) -> Any:
        if self._direct is not None and getattr(buffer, "is_cuda", False):
            try:
                return getattr(self._direct, name)(buffer, file, file_offset)
            except OSError as refused:
                if getattr(refused, "operation", None) != "use GPUDirect Storage":
                    raise
                self._reason = str(refused)  # GPUDirect Storage refuses this file
        return super()._move(name, buffer, file, file_offset)


def _example(
    function: str, example_tensor: torch.Tensor | None, misspelt: dict[str, torch.Tensor]
) -> torch.Tensor:
    # DeepSpeed has published the keyword as example_tenosr.
    example = misspelt.pop("example_tenosr", example_tensor)
    if misspelt or example is None:
        wrong = ", ".join(misspelt) or "none"
        raise TypeError(f"{function}() needs example_tensor; got {wrong}")
    return example


def _check_on_gpu(tensor: torch.Tensor) -> None:
    if not getattr(tensor, "is_cuda", False):
        raise ValueError(
            f"the tensor is on {getattr(tensor, 'device', 'no device')}: only tensors of a GPU can "
            "be pinned for GPUDirect Storage; for the CPU use new_cpu_locked_tensor()"
        )


class _Pins(pin_handle):
    _known_to_cuda = True


_pins = _Pins()


def _one_of(filename: _File | None, fd: int | None) -> _File:
    if filename is not None and fd is None:
        return filename
    if fd is not None and filename is None:
        return fd
    raise TypeError("give either a filename or a descriptor (fd)")


def _async_and_offset(args: tuple[int, ...], kwargs: dict[str, int]) -> tuple[int, int]:
    # `async` is a keyword of Python, so it comes by position or as **{"async": ...}.
    named = dict(zip(("async", "file_offset"), args))
    if len(args) > 2 or named.keys() & kwargs.keys() or kwargs.keys() - {"async", "file_offset"}:
        raise TypeError("the arguments are (buffer, filename, validate, async, file_offset=0)")
    named |= kwargs
    if "async" not in named:
        raise TypeError("the argument 'async' is missing")
    return named["async"], named.get("file_offset", 0)
