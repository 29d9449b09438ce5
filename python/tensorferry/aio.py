"""The names, orders, returns and defaults of DeepSpeed's async_io, over tensorferry.Handle.

Every failure is an OSError. torch is imported only by what makes tensors.
"""

import errno
import operator
import os
import threading
import time

from . import _core
from ._core import File, Handle, InvalidArgument
from ._notes import add_note

__all__ = [
    "aio_handle",
    "aio_read",
    "aio_write",
    "deepspeed_memcpy",
    "gds_handle",
    "pin_handle",
]


# Files that are made are the user's alone, as DeepSpeed's are.
_PERMISSIONS = 0o600

_OFFSET_MOST = (1 << 63) - 1

# The most of each setting that a Handle takes, by DeepSpeed's names.
MOST = {"block_size": 1 << 30, "queue_depth": 4096, "intra_op_parallelism": 256}


def _failure(kind, code, operation, hint, filename=None, offset=None, length=None):
    """An error as those of a Handle are."""
    error = kind(code, f"{operation}: {hint}", *(() if filename is None else (filename,)))
    error.operation, error.hint, error.offset, error.length = operation, hint, offset, length
    return error


def _check_setting(name, value):
    if not 1 <= operator.index(value) <= MOST[name]:
        hint = f"{name} is {value}; it must be from 1 to {MOST[name]}"
        raise _failure(InvalidArgument, errno.EINVAL, "open handle", hint)


def _settings(block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism=1):
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


def _report(start, transferred, verbose):
    if verbose:
        call = time.perf_counter() - start
        aio = transferred - start
        print(f"Elapsed time(usec): aio = {aio * 1e6} call = {call * 1e6}", flush=True)


def _check_validation(file, validate):
    if validate and isinstance(file, int):
        raise TypeError("validation reads the file anew: give its name, not a descriptor")


def _wrong_size(filename, size, wanted):
    hint = (
        f"the file holds {size} bytes and the buffer {wanted}; they must be equal "
        "(a Handle reads parts)"
    )
    return _failure(InvalidArgument, errno.EINVAL, "read", hint, filename, 0, wanted)


def _wrong_offset(operation, file, file_offset):
    hint = f"file_offset is {file_offset}; it must be from 0 to {_OFFSET_MOST}"
    return _failure(InvalidArgument, errno.EINVAL, operation, hint, file)


def aio_read(
    buffer,
    filename,
    block_size=1048576,
    queue_depth=128,
    single_submit=False,
    overlap_events=True,
    validate=False,
    *,
    verbose=False,
):
    """Fills the buffer from a file of exactly its size and returns 0.

    validate=True compares with an ordinary read and raises at the first offset that differs.
    verbose=True prints how long the transfer and the whole call took.
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
    buffer,
    filename,
    block_size=1048576,
    queue_depth=128,
    single_submit=False,
    overlap_events=True,
    validate=False,
    *,
    verbose=False,
):
    """Leaves a file that holds exactly the buffer and returns 0. See aio_read()."""
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


def deepspeed_memcpy(dest, src):
    """Copies the bytes of src to dest, which must be of the same size. Returns 0."""
    _core.copy(dest, src)
    return 0


class pin_handle:
    """Page-locked tensors, known to every handle of the process.

    >>> import tensorferry, torch
    >>> pin = tensorferry.pin_handle()
    >>> tensor = pin.new_cpu_locked_tensor(1000, torch.empty(0, dtype=torch.bfloat16))
    >>> pin.is_pinned(tensor[10:20])
    True
    """

    _known_to_cuda = False  # DeepSpeed registers what comes from a pin_handle itself

    def new_cpu_locked_tensor(self, num_elem, example_tensor=None, **misspelt):
        """A 1-D CPU tensor of the example's dtype at the start of its own page-locked pages.

        It is freed by free_cpu_locked_tensor() or when it and all its views are gone. A child of a
        fork, such as a DataLoader's worker, does not get its memory: one that touches the tensor
        ends with SIGSEGV.
        """
        import torch

        example = _example("new_cpu_locked_tensor", example_tensor, misspelt)
        num_elem = operator.index(num_elem)
        if num_elem < 0:
            raise ValueError(f"num_elem is {num_elem}; it must not be negative")
        # At least an element, so that an empty tensor has an address of its own too.
        # frombuffer() makes a root, to which DeepSpeed ties a finalizer, whatever the default
        # device is and whichever constructors DeepSpeed has replaced.
        size = max(1, num_elem) * example.dtype.itemsize
        pages = _core.PinnedBuffer(size, known_to_cuda=self._known_to_cuda)
        locked = torch.frombuffer(pages, dtype=example.dtype)
        return locked if num_elem else locked.resize_(0)

    def free_cpu_locked_tensor(self, locked_tensor):
        """True if the tensor begins one of ours that was not freed before, else False.

        The memory goes when operations in flight and views of it are done with it.
        """
        try:
            if not locked_tensor.is_cpu or locked_tensor.storage_offset() != 0:
                return False
            return _core.retire(locked_tensor.untyped_storage().data_ptr())
        except Exception:  # no tensor, or one without memory
            return False

    def free_cpu_locked_tensor_by_ptr(self, address):
        """The same by the tensor's data_ptr()."""
        return _core.retire(address)

    def is_pinned(self, buffer):
        """Whether all of the buffer is page-locked: by any handle of this process, or by torch.

        False, never an error, for an empty tensor and for one on another device.
        """
        return _core.is_pinned(buffer)


class aio_handle:
    """DeepSpeed's aio_handle over a tensorferry.Handle.

    Any buffer, size, alignment and offset will do. Calls from many threads are fine; a synchronous
    call completes its own operation only. queue_depth is per worker, of which there are
    intra_op_parallelism. What is being written must not change before wait() has returned, also
    where it is not page-locked: it is written from where it is.

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
        block_size=1048576,
        queue_depth=128,
        single_submit=False,
        overlap_events=False,
        intra_op_parallelism=1,
    ):
        self._open(
            _settings(block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism)
        )
        self._block_size = block_size
        self._queue_depth = queue_depth
        self._single_submit = bool(single_submit)
        self._overlap_events = bool(overlap_events)
        self._intra_op_parallelism = intra_op_parallelism
        self._lock = threading.Lock()
        self._pending = []  # (operation, None or what to validate)

    def __repr__(self):
        try:
            engine = f"engine {self.engine}"
        except OSError as error:  # as in a forked child
            engine = error.hint
        return (
            f"<tensorferry.{type(self).__name__}: block_size={self._block_size}, "
            f"queue_depth={self._queue_depth}, single_submit={self._single_submit}, "
            f"overlap_events={self._overlap_events}, "
            f"intra_op_parallelism={self._intra_op_parallelism}, {len(self._pending)} pending, "
            f"{engine}>"
        )

    def get_block_size(self):
        """As given."""
        return self._block_size

    def get_queue_depth(self):
        """As given."""
        return self._queue_depth

    def get_single_submit(self):
        """As given."""
        return self._single_submit

    def get_overlap_events(self):
        """As given."""
        return self._overlap_events

    def get_intra_op_parallelism(self):
        """As given."""
        return self._intra_op_parallelism

    def get_alignment(self):
        """What DeepSpeed's FastFileWriter rounds to. A hint: any size and offset will do."""
        return 512 * self._intra_op_parallelism

    @property
    def engine(self):
        """The engine in use."""
        return self._handle.engine

    @property
    def engine_reason(self):
        """Why that one."""
        return self._handle.engine_reason

    def stats(self):
        """What it has done so far, and how much page-locked memory the process has."""
        return self._handle.stats() | _core.pinned_stats()

    def read(self, buffer, filename, validate, file_offset=0):
        """Reads and returns 0."""
        self._now("read_now", buffer, filename, validate, file_offset)
        return 0

    def write(self, buffer, filename, validate, file_offset=0):
        """Writes and returns 0. Never cuts the file."""
        self._now("write_now", buffer, filename, validate, file_offset)
        return 0

    def pread(self, buffer, filename, validate, *args, **kwargs):
        """pread(buffer, filename, validate, async, file_offset=0): async: 0; else 1 when done."""
        return self._start_or_now("read", buffer, filename, validate, args, kwargs)

    def pwrite(self, buffer, filename, validate, *args, **kwargs):
        """pwrite(buffer, filename, validate, async, file_offset=0): async: 0; else 1 when done."""
        return self._start_or_now("write", buffer, filename, validate, args, kwargs)

    def sync_pread(self, buffer, filename, file_offset=0):
        """Reads and returns 1."""
        self._transfer("read_now", buffer, filename, file_offset)
        return 1

    def sync_pwrite(self, buffer, filename, file_offset=0):
        """Writes and returns 1."""
        self._transfer("write_now", buffer, filename, file_offset)
        return 1

    def async_pread(self, buffer, filename=None, file_offset=0, *, fd=None):
        """Starts to read and returns 0; wait() counts it. `filename` may be a descriptor."""
        return self._start("read", buffer, _one_of(filename, fd), False, file_offset)

    def async_pwrite(self, buffer, filename=None, file_offset=0, *, fd=None):
        """Starts to write and returns 0; wait() counts it. `filename` may be a descriptor.

        The buffer must stay as it is until then: no copy is taken.
        """
        return self._start("write", buffer, _one_of(filename, fd), False, file_offset)

    def wait(self):
        """Waits for what was started since the last wait() and returns how many that were.

        If some failed, all have ended; the first error is raised and has the others in `.others`.
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
                    if not operation.done():  # it is not its own: a signal's handler has raised it
                        raise
                    failures.append(failure)
        except BaseException:  # as Ctrl-C: all stays pending, so that no failure is lost
            with self._lock:
                self._pending[:0] = pending
            raise
        if failures:
            first = failures[0]
            first.others = tuple(failures[1:])
            for other in first.others:
                add_note(first, f"and: {other}")
            raise first
        return len(pending)

    def new_cpu_locked_tensor(self, num_elem, example_tensor=None, **misspelt):
        """See pin_handle.new_cpu_locked_tensor()."""
        return _pins.new_cpu_locked_tensor(num_elem, example_tensor, **misspelt)

    def free_cpu_locked_tensor(self, tensor):
        """See pin_handle.free_cpu_locked_tensor()."""
        return _pins.free_cpu_locked_tensor(tensor)

    def is_pinned(self, buffer):
        """See pin_handle.is_pinned()."""
        return _core.is_pinned(buffer)

    def _start_or_now(self, name, buffer, filename, validate, args, kwargs):
        is_async, file_offset = _async_and_offset(args, kwargs)
        if is_async:
            return self._start(name, buffer, filename, validate, file_offset)
        self._now(f"{name}_now", buffer, filename, validate, file_offset)
        return 1

    def _now(self, name, buffer, filename, validate, file_offset):
        _check_validation(filename, validate)
        self._transfer(name, buffer, filename, file_offset)
        if validate:
            _core.validate(buffer, filename, file_offset)

    def _start(self, name, buffer, file, validate, file_offset):
        _check_validation(file, validate)
        operation = self._transfer(name, buffer, file, file_offset)
        check = (buffer, file, file_offset) if validate else None
        with self._lock:
            self._pending.append((operation, check))
        return 0

    def _open(self, settings):
        self._handle = Handle(**settings)

    def _transfer(self, name, buffer, file, file_offset):
        """Calls the method of that name of a Handle."""
        if not 0 <= operator.index(file_offset) <= _OFFSET_MOST:
            raise _wrong_offset(name.removesuffix("_now"), file, file_offset)
        if name.startswith("write") and not isinstance(file, (int, File)):
            _core.byte_count(buffer)  # what cannot be written makes no file
            # Closed also after a failure, whose traceback keeps this frame; an operation in flight
            # keeps the file open by itself.
            with File(file, "write", permissions=_PERMISSIONS) as opened:
                return self._move(name, buffer, opened, file_offset)
        return self._move(name, buffer, file, file_offset)

    def _move(self, name, buffer, file, file_offset):
        return getattr(self._handle, name)(buffer, file, file_offset)


class gds_handle(aio_handle):
    """DeepSpeed's gds_handle: tensors of a GPU by GPUDirect Storage where that is to be had.

    Where it is not, they go through page-locked memory of the CPU, at the speed of the drive too;
    engine_reason says why. CPU memory moves as with aio_handle.
    """

    def _open(self, settings):
        super()._open(settings)
        mode, why = _core.gds_support()
        self._reason = f"GPUDirect Storage: {why}"
        # Moves tensors of a GPU.
        self._direct = Handle("gds", **settings) if mode == "direct" else None

    @staticmethod
    def available():
        """Whether there is a GPU whose tensors can be moved. Starts nothing."""
        return os.path.exists("/proc/driver/nvidia/version")

    @property
    def engine(self):
        """The engine that moves tensors of a GPU."""
        return (self._direct or self._handle).engine

    @property
    def engine_reason(self):
        """Why that one."""
        return f"{self._reason}; {(self._direct or self._handle).engine_reason}"

    def get_alignment(self):
        """As in DeepSpeed: 512, whatever the number of workers."""
        return 512

    def new_pinned_device_tensor(self, num_elem, example_tensor=None, **misspelt):
        """A 1-D tensor of the example's dtype on the current CUDA device."""
        import torch

        example = _example("new_pinned_device_tensor", example_tensor, misspelt)
        count = operator.index(num_elem)
        if count < 0:
            raise ValueError(f"num_elem is {count}; it must not be negative")
        if not torch.cuda.is_available():
            hint = "there is no GPU that torch can use"
            raise _failure(OSError, errno.ENODEV, "new_pinned_device_tensor", hint)
        tensor = torch.empty(count, dtype=example.dtype, device="cuda")
        self.pin_device_tensor(tensor)
        return tensor

    def free_pinned_device_tensor(self, tensor):
        """Undoes the registration of new_pinned_device_tensor(); torch frees the memory. True."""
        return self.unpin_device_tensor(tensor)

    def pin_device_tensor(self, tensor):
        """Registers a tensor of a GPU for direct transfers. True.

        Unregister it with unpin_device_tensor() before it goes. Where there is no GPUDirect Storage
        there is nothing to be registered.
        """
        _check_on_gpu(tensor)
        if self._direct is not None and tensor.nbytes:
            _core.register_gpu_memory(tensor)
        return True

    def unpin_device_tensor(self, tensor):
        """Undoes pin_device_tensor(). True."""
        _check_on_gpu(tensor)
        if self._direct is not None and tensor.nbytes:
            _core.unregister_gpu_memory(tensor)
        return True

    def _move(self, name, buffer, file, file_offset):
        if self._direct is not None and getattr(buffer, "is_cuda", False):
            try:
                return getattr(self._direct, name)(buffer, file, file_offset)
            except OSError as refused:
                if getattr(refused, "operation", None) != "use GPUDirect Storage":
                    raise
                self._reason = str(refused)  # not for this file
        return super()._move(name, buffer, file, file_offset)


def _example(function, example_tensor, misspelt):
    # DeepSpeed has published the keyword as example_tenosr.
    example = misspelt.pop("example_tenosr", example_tensor)
    if misspelt or example is None:
        wrong = ", ".join(misspelt) or "none"
        raise TypeError(f"{function}() needs example_tensor; got {wrong}")
    return example


def _check_on_gpu(tensor):
    if not getattr(tensor, "is_cuda", False):
        raise ValueError(
            f"the tensor is on {getattr(tensor, 'device', 'no device')}: only tensors of a GPU can "
            "be pinned for GPUDirect Storage; for the CPU there is new_cpu_locked_tensor()"
        )


class _Pins(pin_handle):
    _known_to_cuda = True


_pins = _Pins()


def _one_of(filename, fd):
    if (filename is None) == (fd is None):
        raise TypeError("give a filename or a descriptor (fd)")
    return filename if fd is None else fd


def _async_and_offset(args, kwargs):
    # `async` is a keyword of Python, so it comes by position or as **{"async": ...}.
    named = dict(zip(("async", "file_offset"), args))
    if len(args) > 2 or named.keys() & kwargs.keys() or kwargs.keys() - {"async", "file_offset"}:
        raise TypeError("the arguments are (buffer, filename, validate, async, file_offset=0)")
    named |= kwargs
    if "async" not in named:
        raise TypeError("the argument 'async' is missing")
    return named["async"], named.get("file_offset", 0)
