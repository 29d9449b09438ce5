"""The extension behind tensorferry; import that instead."""

from collections.abc import Callable
import os


from collections.abc import Callable, Generator, Iterable
from typing import Literal

_Path = str | bytes | os.PathLike
_File = str | bytes | os.PathLike | "File" | int

class InvalidArgument(OSError, ValueError):
    """
    An argument that cannot be honoured: an OSError with errno EINVAL, and a ValueError.
    """

class File:
    """
    An open file: direct (O_DIRECT) and buffered, as needed.

    A missing file is made when it may be written, with `permissions` less the umask; an existing one
    is never cut. Opening once saves the opening at every transfer.

    >>> import tensorferry
    >>> with tensorferry.File("weights.bin", "read_write") as file, tensorferry.Handle() as handle:
    ...     handle.write_now(b"layer 0", file)
    ...     file.size
    7
    """

    def __init__(self, path: str | bytes | os.PathLike, access: Literal['read', 'write', 'read_write'] = 'read', *, permissions: int = 0o666) -> None: ...

    @staticmethod
    def borrow(descriptor: int) -> File:
        """
        Uses a descriptor that the caller keeps and may close at any time. It may be O_DIRECT and of any access; O_APPEND, which ignores offsets, is refused.
        """

    def close(self) -> None:
        """Operations in flight keep the file open by themselves."""

    def __enter__(self) -> File: ...

    def __exit__(self, *args: object) -> None: ...

    def resize(self, bytes: int) -> None:
        """Cuts the file or extends it with zeros."""

    @property
    def closed(self) -> bool: ...

    @property
    def path(self) -> str: ...

    @property
    def size(self) -> int:
        """In bytes, as of now."""

    @property
    def direct(self) -> bool:
        """Whether bytes bypass the page cache."""

    @property
    def direct_reason(self) -> str:
        """Why not, if not."""

    @property
    def memory_alignment(self) -> int:
        """What a transfer in place needs; any other goes through a slot."""

    @property
    def offset_alignment(self) -> int: ...

    @property
    def block_bytes(self) -> int:
        """The request size that suits the device."""

    def __repr__(self) -> str: ...

class PinnedBuffer:
    """
    Page-locked memory, exactly as much as asked, in whole pages.

    It has the buffer protocol: give it to NumPy or torch, whose views keep it alive. In a process that
    uses CUDA it becomes known to CUDA, so that copies to and from GPUs do not wait; known_to_cuda=False
    leaves that to others.

    After a fork it is the parent's alone: a child does not get the memory, so that no fork has to copy
    it. In a child its views cannot be made (BufferError) or moved (OSError), and whoever touches a view
    or tensor from before the fork ends with SIGSEGV. Make what a child uses in the child.

    >>> import tensorferry
    >>> buffer = tensorferry.PinnedBuffer(1 << 20)
    >>> memoryview(buffer)[:4].tolist()
    [0, 0, 0, 0]
    """

    def __init__(self, bytes: int, *, known_to_cuda: bool = True) -> None: ...

    def free(self) -> None:
        """
        Gives the memory back now. BufferError while views of it are alive; operations in flight keep it by themselves.
        """

    def __len__(self) -> int: ...

    def __enter__(self) -> PinnedBuffer: ...

    def __exit__(self, *args: object) -> None: ...

    @property
    def address(self) -> int: ...

    @property
    def locked(self) -> bool: ...

    @property
    def lock_reason(self) -> str:
        """Why it is not locked, the limit and how to raise it; empty if it is."""

    @property
    def huge_page_reason(self) -> str: ...

    def __repr__(self) -> str: ...

def gds_support() -> tuple[str, str]:
    """
    What of GPUDirect Storage can be had: 'none', 'compat' or 'direct', and why no more.
    """

def gds_counts() -> dict:
    """What this process has asked of cuFile so far."""

def register_gpu_memory(tensor: object | None) -> None:
    """Registers a tensor of a GPU with cuFile."""

def unregister_gpu_memory(tensor: object | None) -> bool:
    """Undoes that. False if it was not registered."""

def is_pinned(buffer: object | None) -> bool:
    """
    Whether all of the buffer is page-locked memory of ours or of torch. False, never an error, for what has no memory.
    """

def retire(address: int) -> bool:
    """Gives up a PinnedBuffer by its first address; views of it stay valid."""

def pinned_stats() -> dict: ...

def byte_count(buffer: object | None) -> int: ...

def never_fill(type: type, refusal: Callable) -> None:
    """
    Refuses to read into tensors of this class, with what refusal(what) returns.
    """

def copy(to: object, source: object) -> None:
    """
    Copies memory with the widest instructions of the processor. The two must not overlap.
    """

class Completions:
    """For tensorferry._callbacks."""

    def __init__(self) -> None: ...

    def fileno(self) -> int: ...

    def watch(self, arg0: Operation, arg1: int, /) -> None: ...

    def take(self) -> list: ...

class Operation:
    """
    One transfer under way, or many made by one call.

    It completes exactly once: with all its bytes, or with an OSError. The memory is kept alive until
    then, also if you let go of the buffer or give a tensor other memory; only do not resize its
    storage. Wait for it, poll it, cancel it, await it.

    >>> import tensorferry
    >>> data = bytearray(b"weights")
    >>> with tensorferry.Handle() as handle:
    ...     operation = handle.write(data, "weights.bin")
    ...     operation.wait(timeout=60)
    7
    """

    def wait(self, timeout: float | None = None) -> int:
        """
        Blocks until the operation is done, with the GIL released, and returns the number of bytes.

        Raises its OSError if it failed or was cancelled (errno.ECANCELED), and TimeoutError if `timeout` seconds pass first; then it goes on. Ctrl-C raises KeyboardInterrupt and the operation goes on.
        """

    def result(self, timeout: float | None = None) -> int:
        """The same as wait()."""

    def done(self) -> bool:
        """Whether it has ended, in whichever way."""

    def cancel(self) -> None:
        """Asks for an early end. The buffer is not touched any more once done()."""

    def exception(self) -> OSError | None:
        """How it failed; None before done() and after success."""

    def add_done_callback(self, callback: Callable[[Operation], object]) -> None:
        """
        Calls callback(operation) when it is done, on a thread kept for callbacks; at once on this one if it is done already. All callbacks share that thread: one that waits for another waits for ever.
        """

    def __await__(self) -> Generator[object, None, int]: ...

    def check_process(self) -> None:
        """
        Raises ChildProcessError for an operation that the parent of a fork has started.
        """

    @property
    def bytes(self) -> int:
        """Moved so far."""

    @property
    def engine(self) -> str:
        """Which engine moves it: `auto` may choose another for one file."""

    @property
    def engine_reason(self) -> str: ...

    @property
    def seconds(self) -> float | None:
        """From the call to the end; None before done()."""

    def __repr__(self) -> str: ...

class Handle:
    """
    What moves tensors: an engine, its workers, its limits.

    All methods may be called from any number of threads at once. Buffers are torch tensors of the CPU
    or of a GPU, NumPy arrays, bytearrays, memoryviews and whatever has DLPack, of any type, size and
    alignment; files are paths, File objects or descriptors. Settings that are None follow from the
    device.

    A handle that ends finishes the writes it has accepted: in close(), when an exception leaves `with`,
    when nobody holds it any more, at the end of the interpreter. cancel_all() gives them up.

    >>> import tensorferry
    >>> with tensorferry.Handle() as handle:
    ...     handle.write_now(b"0123456789", "data.bin")
    ...     part = bytearray(4)
    ...     operation = handle.read(part, "data.bin", offset=3)   # returns at once
    ...     operation.wait()
    4
    >>> bytes(part)
    b'3456'
    """

    def __init__(self, engine: Literal['auto', 'io_uring', 'libaio', 'threads', 'gds'] = 'auto', *, block_bytes: int | None = None, queue_depth: int | None = None, workers: int | None = None, submit: Literal['batch', 'single'] = 'batch', overlap: bool = True, slot_bytes: int | None = None, close_limit_seconds: float = 30.0) -> None: ...

    def read(self, buffer: object, file: _File, offset: int = 0) -> Operation:
        """
        Starts to fill the buffer from the file and returns at once.

        Reading past the end of the file is an error.
        """

    def write(self, buffer: object, file: _File, offset: int = 0, durability: Literal['none', 'data', 'full'] = 'none') -> Operation:
        """
        Starts to write the buffer and returns at once.

        The file is made or extended as needed, never cut. `durability` says what must have reached the drive before it is done: nothing, the data, or the data with all metadata and the directory entry.
        """

    def read_now(self, buffer: object, file: _File, offset: int = 0) -> None:
        """
        Fills the buffer and returns when that is done. A small read is made by the calling thread itself.
        """

    def write_now(self, buffer: object, file: _File, offset: int = 0, durability: Literal['none', 'data', 'full'] = 'none') -> None:
        """Writes the buffer and returns when that is done."""

    def read_many(self, transfers: Iterable[tuple[object, _File] | tuple[object, _File, int]]) -> Operation:
        """
        Reads many (buffer, file, offset) as one operation; neighbours in one file become one request.
        """

    def write_many(self, transfers: Iterable[tuple[object, _File] | tuple[object, _File, int]], durability: Literal['none', 'data', 'full'] = 'none') -> Operation:
        """
        Writes many (buffer, file, offset) as one operation. They must not overlap.
        """

    def sync(self, file: _File, durability: Literal['data', 'full'] = 'data') -> Operation:
        """Makes durable what writes that are done have written to the file."""

    @property
    def engine(self) -> str:
        """
        The engine in use. Before anything is queued: what it would be without a profile, as no drive is known yet.
        """

    @property
    def engine_reason(self) -> str:
        """Why that one."""

    def cancel_all(self) -> None:
        """Gives up all that is in flight, writes too. The handle stays open."""

    def stats(self) -> dict:
        """What it has done so far: every retry and every fallback is counted."""

    def __repr__(self) -> str: ...

    def close(self) -> None:
        """
        Waits for all operations and ends. Raises the first failure that nobody has seen.

        When nothing has moved for `close_limit_seconds`, gives up what is left, and raises for writes. Ctrl-C raises KeyboardInterrupt, and the handle goes on closing: call close() again to wait on.
        """

    def __enter__(self) -> Handle: ...

    def __exit__(self, type: object, value: object, traceback: object, /) -> None:
        """
        As close(). After an exception writes are finished too, and reads are cancelled; Ctrl-C gives up the writes that are left.
        """

    @property
    def closed(self) -> bool: ...

def close_all() -> None:
    """For the end of the interpreter."""

class SwapBuffer:
    """
    A part of the page-locked buffers of a SwapSpace, in whole pages.

    It has the buffer protocol: torch.frombuffer() and NumPy make tensors of it, which keep it. Its room
    is free again when all of them are gone and no operation uses it. A child of a fork does not get the
    memory, as with PinnedBuffer, also where it is not page-locked.
    """

    def __len__(self) -> int: ...

class SwapView:
    """
    Tensors as they are on the drive, mapped into memory.

    It has the buffer protocol. Pages come as they are touched, and leave when memory gets short; what
    is written to it never reaches the drive. It shows what was there when it was made.
    """

    def __len__(self) -> int: ...

class SwapSpace:
    """
    Where swapped tensors live: by name, on one or several drives.

    Files are made in a directory of its own below each of the given ones, and removed at the end.
    Tensors are striped over all directories. `buffer_bytes` is all the memory it uses, for take(),
    fetch() and prefetch(): whoever finds no room waits. It is page-locked, unless pin_memory=False.
    `run` and `rank` name the directory.

    It belongs to the process that opened it: in a child of a fork its use is a ChildProcessError.

    >>> import tensorferry
    >>> with tensorferry.SwapSpace(".", buffer_bytes=1 << 20) as space:
    ...     operation = space.put("layer 0", b"weights")   # returns at once
    ...     back = bytearray(7)
    ...     _ = space.get("layer 0", back).wait()
    ...     back.decode()
    'weights'
    """

    def __init__(self, directories: _Path | Iterable[_Path], *, buffer_bytes: int = 268435456, run: str = '', rank: int = 0, engine: Literal['auto', 'io_uring', 'libaio', 'threads'] = 'auto', block_bytes: int | None = None, queue_depth: int | None = None, workers: int | None = None, submit: Literal['batch', 'single'] = 'batch', overlap: bool = True, pin_memory: bool = True) -> None: ...

    def put(self, key: str, buffer: object) -> Operation:
        """
        Starts to write a tensor under a name and returns at once.

        Leave the memory as it is until the operation is done; until then the tensor is read from it. A tensor that is put again is replaced as a whole: readers get old bytes or new ones, and a put that fails changes nothing. A full drive is an OSError (ENOSPC) with the bytes needed and free.
        """

    def get(self, key: str, buffer: object, offset: int = 0) -> Operation:
        """
        Starts to fill the buffer with a tensor, or with a part of it from `offset` on, and returns at once.
        """

    def prefetch(self, key: str) -> bool:
        """
        Begins to read a tensor into the buffers, for the next fetch() or get() of it. A hint: False where there is no room now, or nothing to be read.
        """

    def fetch(self, key: str, timeout: float | None = None) -> tuple[SwapBuffer, Operation]:
        """
        A tensor in one of the buffers, and the operation that brings it. Waits for room, not for the bytes; TimeoutError if `timeout` seconds pass first.
        """

    def take(self, bytes: int, timeout: float | None = None, *, until: Operation | None = None) -> SwapBuffer:
        """
        Room in the buffers, of unknown content, to be filled and put. Waits until there is some; TimeoutError if `timeout` seconds pass first, or if the operation `until` is done first.
        """

    def drop(self, key: str) -> bool:
        """Forgets a tensor. False if there is none of that name."""

    def view(self, parts: Iterable[tuple[str, int, int]]) -> SwapView:
        """
        Parts (key, offset, bytes) of tensors as one stretch of memory, mapped from the drive. Offsets, and all sizes but the last, are whole pages (mmap.PAGESIZE).
        """

    def size(self, key: str) -> int | None:
        """The bytes of a tensor; None if there is none of that name."""

    def __contains__(self, key: str) -> bool: ...

    def reserve(self, bytes: int) -> None:
        """
        Takes so much room on the drives ahead of need. OSError (ENOSPC) if it is not there.
        """

    def stats(self) -> dict:
        """What it holds and what it has moved."""

    @property
    def directories(self) -> list[str]:
        """Its own, one in each of those given."""

    @property
    def notes(self) -> list[str]:
        """
        What to know: a directory in memory, another live run, leftovers removed.
        """

    @property
    def engine_reason(self) -> str:
        """Which engine moves the bytes, and why that one."""

    def __repr__(self) -> str: ...

    def close(self) -> None:
        """
        Waits for all operations and ends. Raises the first failure that nobody has seen.
        """

    def __enter__(self) -> SwapSpace: ...

    def __exit__(self, type: object, value: object, traceback: object, /) -> None:
        """
        As close(); after an exception what is in flight is cancelled instead: its files go with it.
        """

    @property
    def closed(self) -> bool: ...

def privileged() -> bool:
    """
    Whether this program has rights that whoever started it need not have (setuid, setgid, file capabilities). No variable of tensorferry's counts then.
    """

def tracing() -> bool:
    """Whether TENSORFERRY_TRACE asks for a trace."""

def trace_span(name: str, begin_ns: int, end_ns: int) -> None:
    """
    Adds work of this thread to the trace, with times of time.monotonic_ns().
    """

def validate(buffer: object, path: str | bytes | os.PathLike, offset: int = 0) -> None:
    """
    Compares the buffer with an ordinary read of the file. OSError (EBADMSG) with the first offset that differs.
    """
