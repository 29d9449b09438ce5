"""The extension of tensorferry. Import tensorferry instead."""



import os
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Literal

__version__: str

_Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]
_File = str | bytes | os.PathLike[str] | os.PathLike[bytes] | "File" | int
_Priority = Literal["urgent", "normal", "background"]

def crc32(buffer: object, value: int = 0) -> int:
    """
    Returns the CRC-32 of zip archives, of the bytes that gave `value` followed by the buffer.
    """

class PieceChecksums:
    """The CRC-32 of bytes that pass, and those of their pieces."""

    def __init__(self, piece_bytes: int) -> None: ...

    def add(self, buffer: object) -> None:
        """Takes the bytes that come next. One thread at a time may call this."""

    def end(self) -> None:
        """Ends the piece that is under way, the last one."""

    @property
    def whole(self) -> int:
        """Of all pieces that have ended."""

    @property
    def pieces(self) -> list[int]: ...

def safetensors_checksum(chunk: object) -> int:
    """
    Returns the checksum of 16 MiB of a tensor, or of what is left at its end.
    """

MASTER_BLOCK: int = 16384

def join_masters(master: object, weights: object, low: object, digests: object, listed: bytes, threads: int) -> int:
    """
    Makes masters in fp32 of their weights in bf16 and their lower halves. Blocks whose weights have another digest get their weights as masters. Returns how many.
    """

def cut_masters(master: object, weights: object, low: object, digests: object, threads: int) -> bytes:
    """
    Cuts masters in fp32 that have been rounded to weights in bf16: fills `low` and `digests`. Returns the list of masters that the weights and `low` do not give back.
    """

MOMENT_BLOCK: int = 256

def moment_map(name: str) -> tuple[bytes, bytes]:
    """
    Returns the numbers in fp32 that the codes of a moment stand for, and the largest number that has each code. `name` is exp_avg or exp_avg_sq.
    """

def quantize_moment(name: str, values: object, codes: object, scales: object, threads: int) -> None:
    """
    Fills the codes of a moment in fp32, a byte for each element, and the scales of its blocks.
    """

def dequantize_moment(name: str, values: object, codes: object, scales: object, threads: int) -> None:
    """Fills a moment in fp32 from its codes and the scales of its blocks."""

class InvalidArgument(OSError, ValueError):
    """
    An argument that tensorferry cannot accept: an OSError with errno EINVAL, and a ValueError.
    """

class File:
    """
    An open file. It uses direct I/O (O_DIRECT) and the page cache as needed.

    Opening a file to write makes a missing one, with `permissions` less the umask, and never cuts an
    existing one. A File that stays open saves an open() in every transfer.

    >>> import tensorferry
    >>> with tensorferry.File("weights.bin", "read_write") as file, tensorferry.Handle() as handle:
    ...     handle.write_now(b"layer 0", file)
    ...     file.size
    7
    """

    def __init__(self, path: _Path, access: Literal['read', 'write', 'read_write'] = 'read', *, permissions: int = 0o666) -> None: ...

    @staticmethod
    def borrow(descriptor: int) -> File:
        """
        Uses a descriptor of the caller, who may close it at any time. It may be O_DIRECT and have any access. O_APPEND, which ignores offsets, is refused.
        """

    def close(self) -> None:
        """Closes the file. Operations in flight keep it open until they end."""

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
        """The current size in bytes."""

    @property
    def direct(self) -> bool:
        """Whether transfers bypass the page cache."""

    @property
    def direct_reason(self) -> str:
        """Why transfers use the page cache; empty if they bypass it."""

    @property
    def memory_alignment(self) -> int:
        """The alignment of memory that a transfer needs to avoid a copy."""

    @property
    def offset_alignment(self) -> int: ...

    @property
    def block_bytes(self) -> int:
        """The request size that suits the device."""

    def __repr__(self) -> str: ...

class PinnedBuffer:
    """
    Page-locked memory of the requested size, in whole pages.

    It has the buffer protocol: NumPy and torch can make views of it, and a view keeps it alive. In a
    process that uses CUDA it is registered with CUDA, so that copies to and from GPUs do not block;
    known_to_cuda=False leaves that to the caller. On a machine with several NUMA nodes, numa_node says
    which one the memory comes from, as long as that has any; None leaves it to the system.

    After a fork only the parent has the memory, so that no fork copies it. In the child, making a view
    raises BufferError and a transfer raises OSError; a child that touches a view or tensor from before
    the fork ends with SIGSEGV. Allocate in the child what the child uses.

    >>> import tensorferry
    >>> buffer = tensorferry.PinnedBuffer(1 << 20)
    >>> memoryview(buffer)[:4].tolist()
    [0, 0, 0, 0]
    """

    def __init__(self, bytes: int, *, known_to_cuda: bool = True, numa_node: int | None = None) -> None: ...

    def free(self) -> None:
        """
        Frees the memory now. Raises BufferError while views of it exist. Operations in flight keep it until they end.
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
        """
        Why the memory is not locked, with the limit and how to raise it; empty if it is locked.
        """

    @property
    def huge_page_reason(self) -> str: ...

    @property
    def numa_reason(self) -> str:
        """Why the system refused to take the memory from numa_node; else empty."""

    def __repr__(self) -> str: ...

    def __buffer__(self, flags: int, /) -> memoryview: ...

def gds_support() -> tuple[str, str]:
    """
    Returns how far GPUDirect Storage works here ('none', 'compat' or 'direct') and the reason.
    """

def gds_counts() -> dict[str, int]:
    """Counts the requests of this process to cuFile so far."""

def register_gpu_memory(tensor: object | None) -> None:
    """Registers a tensor of a GPU with cuFile."""

def unregister_gpu_memory(tensor: object | None) -> bool:
    """
    Undoes register_gpu_memory(). Returns False if the tensor was not registered.
    """

def is_pinned(buffer: object | None) -> bool:
    """
    Returns whether tensorferry or torch has page-locked the whole buffer. Returns False, never an error, for an object without memory.
    """

def retire(address: int) -> bool:
    """
    Gives up the PinnedBuffer that begins at `address`. Its views stay valid.
    """

def pinned_stats() -> dict[str, Any]: ...

def byte_count(buffer: object | None) -> int: ...

def never_fill(type: type, refusal: Callable[[str], Exception]) -> None:
    """Refuses to read into tensors of this class, and raises refusal(what)."""

def copy(to: object, source: object) -> None:
    """
    Copies memory with the widest instructions of the processor. The buffers must not overlap.
    """

class Completions:
    """For tensorferry._callbacks."""

    def __init__(self) -> None: ...

    def fileno(self) -> int: ...

    def watch(self, arg0: Operation, arg1: int, /) -> None: ...

    def take(self) -> list[int]: ...

class Operation:
    """
    A transfer in flight, or several that one call started.

    It ends exactly once: with all its bytes, or with an OSError. It keeps the memory alive until then,
    even if you drop the buffer or give the tensor other memory; only do not resize the storage. You can
    wait for it, poll it, cancel it and await it.

    >>> import tensorferry
    >>> data = bytearray(b"weights")
    >>> with tensorferry.Handle() as handle:
    ...     operation = handle.write(data, "weights.bin")
    ...     operation.wait(timeout=60)
    7
    """

    def wait(self, timeout: float | None = None) -> int:
        """
        Waits until the operation ends, without the GIL, and returns the number of bytes.

        Raises its OSError if it failed or was cancelled (errno.ECANCELED). Raises TimeoutError if `timeout` seconds pass first, and KeyboardInterrupt at Ctrl-C; the operation then goes on.
        """

    def result(self, timeout: float | None = None) -> int:
        """Does the same as wait()."""

    def done(self) -> bool:
        """Returns whether the operation has ended, with success or without."""

    def cancel(self) -> None:
        """
        Asks the operation to end early. Nothing touches the buffer once done() is true.
        """

    def exception(self) -> OSError | None:
        """
        Returns the error of the operation; None before the end and after success.
        """

    def add_done_callback(self, callback: Callable[[Operation], object]) -> None:
        """
        Calls callback(operation) when the operation ends, on a thread that all callbacks share; at once on this thread if it has ended already. A callback that waits for another callback waits for ever.
        """

    def __await__(self) -> Generator[object, None, int]: ...

    def raise_for_waiter(self) -> None:
        """
        Gives the operation the priority of this thread, which is going to await it, if that is higher.
        """

    def check_process(self) -> None:
        """
        Raises ChildProcessError in a forked child if its parent started the operation.
        """

    @property
    def bytes(self) -> int:
        """The number of bytes moved so far."""

    @property
    def engine(self) -> str:
        """
        The engine that moves the bytes. `auto` may choose another one for one file.
        """

    @property
    def engine_reason(self) -> str: ...

    @property
    def seconds(self) -> float | None:
        """The time from the call to the end; None before the end."""

    def __repr__(self) -> str: ...

class PriorityScope:
    """
    Gives what a thread starts, and what it waits for, a priority.

    Inside `with`, operations that this thread starts have the priority, unless their call names
    another; and what this thread waits for is raised to it. Scopes nest.

    >>> import tensorferry
    >>> with tensorferry.Handle() as handle, tensorferry.PriorityScope("background"):
    ...     handle.write(b"a snapshot", "snapshot.bin").wait()
    10
    """

    def __init__(self, priority: _Priority) -> None: ...

    def __enter__(self) -> PriorityScope: ...

    def __exit__(self, type: object, value: object, traceback: object, /) -> None: ...

def set_rate(priority: _Priority, rate: int | None) -> None:
    """
    Lets the operations of a class, of all handles of the process together, move at most `rate` bytes in a second. None takes the limit back.
    """

def rate(priority: _Priority) -> int | None:
    """The rate of a class in bytes per second; None if it has no limit."""

class Handle:
    """
    Moves tensors with an engine, its workers and its limits.

    Any number of threads may call its methods at once. Buffers are torch tensors of the CPU or of a
    GPU, NumPy arrays, bytearrays, memoryviews and all objects with DLPack, of any type, size and
    alignment; files are paths, File objects or descriptors. Settings that are None follow from the
    device.

    A handle finishes the writes that it has accepted: in close(), when an exception leaves `with`, when
    the last reference to it goes, and at the end of the interpreter. cancel_all() gives them up.

    `priority` is that of operations whose call names none, on threads without a PriorityScope. `rate`
    is how many bytes all of its operations together may move in a second, until the handle closes.

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

    def __init__(self, engine: Literal['auto', 'io_uring', 'libaio', 'threads', 'gds'] = 'auto', *, block_bytes: int | None = None, queue_depth: int | None = None, workers: int | None = None, submit: Literal['batch', 'single'] = 'batch', overlap: bool = True, slot_bytes: int | None = None, close_limit_seconds: float = 30.0, polling: Literal['off', 'submission', 'completion'] = 'off', priority: _Priority = 'normal', rate: int | None = None) -> None: ...

    def read(self, buffer: object, file: _File, offset: int = 0, *, priority: _Priority | None = None) -> Operation:
        """
        Starts to fill the buffer from the file and returns at once.

        A read past the end of the file fails.
        """

    def write(self, buffer: object, file: _File, offset: int = 0, durability: Literal['none', 'data', 'full'] = 'none', *, priority: _Priority | None = None) -> Operation:
        """
        Starts to write the buffer and returns at once.

        Makes or extends the file as needed and never cuts it. `durability` says what must be on the drive before the operation ends: nothing, the data, or the data with all metadata and the directory entry.
        """

    def read_now(self, buffer: object, file: _File, offset: int = 0, *, priority: _Priority | None = None) -> None:
        """
        Fills the buffer from the file and returns when it is full. The calling thread itself makes a small read.
        """

    def write_now(self, buffer: object, file: _File, offset: int = 0, durability: Literal['none', 'data', 'full'] = 'none', *, priority: _Priority | None = None) -> None:
        """Writes the buffer and returns when the write is done."""

    def read_many(self, transfers: Iterable[tuple[object, _File] | tuple[object, _File, int]], *, priority: _Priority | None = None) -> Operation:
        """
        Reads many (buffer, file, offset) as one operation. Neighbours in one file become one request.
        """

    def write_many(self, transfers: Iterable[tuple[object, _File] | tuple[object, _File, int]], durability: Literal['none', 'data', 'full'] = 'none', *, priority: _Priority | None = None) -> Operation:
        """
        Writes many (buffer, file, offset) as one operation. The ranges must not overlap.
        """

    def sync(self, file: _File, durability: Literal['data', 'full'] = 'data', *, priority: _Priority | None = None) -> Operation:
        """Makes durable all that finished writes have written to the file."""

    @property
    def engine(self) -> str:
        """
        The engine in use. Before the first transfer the handle knows no drive: this is then the choice without a profile.
        """

    @property
    def engine_reason(self) -> str:
        """Why the handle uses that engine."""

    def cancel_all(self) -> None:
        """Cancels all operations in flight, writes too. The handle stays open."""

    def stats(self) -> dict[str, Any]:
        """
        Counts what the handle has done so far, with every retry and every fallback.
        """

    def __repr__(self) -> str: ...

    def close(self) -> None:
        """
        Waits for all operations and closes the handle. Raises the first failure that the program has not seen.

        If nothing moves for `close_limit_seconds`, it gives up the operations that are left, and raises if one of them is a write. Ctrl-C raises KeyboardInterrupt and the handle goes on closing: call close() again to wait further.
        """

    def __enter__(self) -> Handle: ...

    def __exit__(self, type: object, value: object, traceback: object, /) -> None:
        """
        Does the same as close(). After an exception it finishes writes too and cancels reads; Ctrl-C gives up the writes that are left.
        """

    @property
    def closed(self) -> bool: ...

def close_all() -> None:
    """Closes all handles at the end of the interpreter."""

class SwapBuffer:
    """
    A part of the page-locked buffers of a SwapSpace, in whole pages.

    It has the buffer protocol: torch.frombuffer() and NumPy make tensors of it, which keep it alive.
    The space uses its memory again when all of them are gone and no operation needs it. As with
    PinnedBuffer, a forked child does not inherit the memory, whether it is page-locked or not.
    """

    def __len__(self) -> int: ...

    def __buffer__(self, flags: int, /) -> memoryview: ...

class SwapView:
    """
    Tensors on the drive, mapped into memory.

    It has the buffer protocol. The kernel loads pages when they are touched and drops them when memory
    gets short. Writes to it never reach the drive. It shows the bytes from the time it was made.
    """

    def __len__(self) -> int: ...

    def __buffer__(self, flags: int, /) -> memoryview: ...

class SwapSpace:
    """
    Keeps tensors by name, on one or several drives.

    It makes a directory of its own in each of the given ones and removes it at the end. It stripes
    tensors over all directories, by the speed of their drives. take(), fetch() and prefetch() share
    `buffer_bytes` of memory, which is all that the space uses: a call that finds no room waits. The
    memory is page-locked, unless pin_memory=False. `run` and `rank` name the directory. With
    checksums=True each put computes a checksum, by which snapshot() finds bytes that have changed.

    It belongs to the process that opened it: a forked child that uses it gets a ChildProcessError.

    >>> import tensorferry
    >>> with tensorferry.SwapSpace(".", buffer_bytes=1 << 20) as space:
    ...     operation = space.put("layer 0", b"weights")   # returns at once
    ...     back = bytearray(7)
    ...     _ = space.get("layer 0", back).wait()
    ...     back.decode()
    'weights'
    """

    def __init__(self, directories: _Path | Iterable[_Path], *, buffer_bytes: int = 268435456, run: str = '', rank: int = 0, engine: Literal['auto', 'io_uring', 'libaio', 'threads'] = 'auto', block_bytes: int | None = None, queue_depth: int | None = None, workers: int | None = None, submit: Literal['batch', 'single'] = 'batch', overlap: bool = True, pin_memory: bool = True, checksums: bool = False) -> None: ...

    def put(self, key: str, buffer: object) -> Operation:
        """
        Starts to write a tensor under a name and returns at once.

        Do not change the memory before the operation ends: until then readers get the tensor from it. Another put of the same name replaces the tensor as a whole: readers get the old bytes or the new ones, and a put that fails changes nothing. A full drive raises OSError (ENOSPC) with the bytes needed and free.
        """

    def get(self, key: str, buffer: object, offset: int = 0) -> Operation:
        """
        Starts to fill the buffer with a tensor, or with a part of it from `offset` on, and returns at once.
        """

    def prefetch(self, key: str) -> bool:
        """
        Begins to read a tensor into the buffers, for the next fetch() or get() of it. It is a hint: returns False if the buffers have no room now or there is nothing to read.
        """

    def fetch(self, key: str, timeout: float | None = None) -> tuple[SwapBuffer, Operation]:
        """
        Returns a tensor in one of the buffers and the operation that reads it. Waits for room, not for the bytes; raises TimeoutError if `timeout` seconds pass first.
        """

    def take(self, bytes: int, timeout: float | None = None, *, until: Operation | None = None) -> SwapBuffer:
        """
        Returns memory of the buffers, with unknown content, to fill and to put. Waits for room; raises TimeoutError if `timeout` seconds pass or the operation `until` ends first.
        """

    def drop(self, key: str) -> bool:
        """Forgets a tensor. Returns False if no tensor has that name."""

    def view(self, parts: Iterable[tuple[str, int, int]]) -> SwapView:
        """
        Maps parts (key, offset, bytes) of tensors from the drive as one stretch of memory. Offsets, and all sizes but the last, must be whole pages (mmap.PAGESIZE).
        """

    def size(self, key: str) -> int | None:
        """
        Returns the size of a tensor in bytes; None if no tensor has that name.
        """

    def __contains__(self, key: str) -> bool: ...

    def reserve(self, bytes: int) -> None:
        """
        Reserves space on the drives ahead of need. Raises OSError (ENOSPC) if they have less.
        """

    def stats(self) -> dict[str, Any]:
        """Counts what the space holds and what it has moved."""

    @property
    def directories(self) -> list[str]:
        """The directories of this space, one in each of the given ones."""

    @property
    def notes(self) -> list[str]:
        """
        What the user should know: a directory in memory, another live run, leftovers removed.
        """

    @property
    def engine_reason(self) -> str:
        """Which engine moves the bytes, and why."""

    def __repr__(self) -> str: ...

    def snapshot(self, name: str, keys: Sequence[str], replaced: Sequence[str] = ...) -> tuple[list[str], list[tuple[str, int, list[tuple[int, int, int]], int | None]]]:
        """
        Keeps the tensors of these keys as they are now, without a copy, also when the process has ended.

        Returns (files, tensors), what attach() takes: a tensor is (key, bytes, [(number of the file, offset, bytes), ...], checksum). All bytes are durable then. Makes room first, so that the tensors can be put again; what the snapshots `replaced` keep counts as free. Raises OSError (ENOSPC) if the drives have less; nothing has changed then. tensorferry.snapshot makes whole snapshots of this.
        """

    def drop_snapshot(self, name: str) -> bool:
        """
        Lets the space use again what only this snapshot keeps. Removes no file. Returns False if this space has taken no snapshot of that name.
        """

    def snapshots(self) -> list[str]:
        """Returns the names of the snapshots that keep tensors of this space."""

    def attach(self, files: Iterable[_Path], tensors: Sequence[tuple[str, int, list[tuple[int, int, int]], int | None]]) -> None:
        """
        Takes over the tensors of a snapshot under their keys, without reading them. The files are never written to. The first read of a whole tensor compares its checksum and raises OSError (EBADMSG) if that is wrong.
        """

    def close(self) -> None:
        """
        Waits for all operations and closes the space. Raises the first failure that the program has not seen.
        """

    def __enter__(self) -> SwapSpace: ...

    def __exit__(self, type: object, value: object, traceback: object, /) -> None:
        """
        Does the same as close(). After an exception it cancels the operations in flight: their files go anyway.
        """

    @property
    def closed(self) -> bool: ...

def trim_snapshot_file(path: _Path, kept: Sequence[tuple[int, int]], names: int) -> bool:
    """
    Frees the space of a file of snapshots that no (offset, bytes) of `kept` covers. Returns False, and changes nothing, if a living SwapSpace may write to the file or if it has not exactly `names` names.
    """

class NewFile:
    """
    A file that takes its name only when it is whole.

    Until commit() its bytes are in a hidden file beside it, and whatever has the name stays as it is.
    commit() makes the file durable and gives it its name; without it, nothing is left.

    >>> import tensorferry
    >>> with tensorferry.NewFile("model.bin") as new, tensorferry.Handle() as handle:
    ...     handle.write_now(b"all bytes", new.file)
    ...     new.commit()
    """

    def __init__(self, path: _Path, *, permissions: int = 0o666) -> None: ...

    @property
    def file(self) -> File:
        """The hidden file, for writing."""

    @property
    def path(self) -> str: ...

    def reserve(self, bytes: int) -> None:
        """
        Takes space for a file of so many bytes, all of which must be written. Several writes to one file are faster then.
        """

    def commit(self) -> None:
        """
        Syncs the file, gives it its name and syncs the directory. All writes must be done.
        """

    def discard(self) -> None:
        """Removes the hidden file, unless it was committed."""

    def __enter__(self) -> NewFile: ...

    def __exit__(self, *args: object) -> None: ...

class SafetensorsFile:
    """The tensors of a safetensors file, or of a set that an index names."""

    def __init__(self, path: _Path) -> None: ...

    @property
    def tensors(self) -> list[tuple[str, str, list[int], int, int, int]]:
        """
        (name, dtype, shape, index of the file, offset, bytes) of each tensor, by offset.
        """

    @property
    def metadata(self) -> dict[str, str] | None: ...

    @property
    def has_checksums(self) -> bool: ...

    @property
    def unchecked(self) -> list[str]:
        """The names of the tensors that have bytes and no checksum."""

    @property
    def checksums_problem(self) -> str:
        """Why the checksums of a file are of no use; else empty."""

    @property
    def files(self) -> list[File]: ...

    def read(self, handle: Handle, tensors: Iterable[tuple[str, object] | tuple[str, object, Iterable[tuple[int, int]]]], verify: Literal['no', 'if_present', 'required'] = 'no') -> Operation:
        """
        Starts to fill the buffers of (name, buffer) or (name, buffer, ranges).
        """

def save_safetensors(handle: Handle, path: _Path, tensors: Iterable[tuple[str, str, Sequence[int], object]], *, metadata: dict[str, str] | None = None, checksums: bool = True, alignment: int = 4096, permissions: int = 0o666, progress: Callable[[int, int], object] | None = None) -> None:
    """
    Writes (name, dtype, shape, buffer) to a new file that replaces `path`.
    """

def make_safetensors_header(tensors: Iterable[tuple[str, str, Sequence[int]]], *, metadata: dict[str, str] | None = None, alignment: int = 8, pieces: Iterable[object] | None = None) -> tuple[bytes, list[int]]:
    """
    Returns the header of a file with these tensors and their order in it. `pieces` has, for each tensor, the checksums of all its pieces.
    """

def checksums_of_pieces(buffer: object) -> bytes:
    """
    Returns the checksums, of 8 bytes, of the pieces of a tensor: of each 64 KiB.
    """

def parse_safetensors(data: object) -> tuple[list[tuple[str, str, list[int], int, int, int]], dict[str, str] | None]:
    """Returns the tensors and the metadata of a file that is in memory."""

def privileged() -> bool:
    """
    Returns whether this program has rights that its user may lack (setuid, setgid, file capabilities). If so, tensorferry ignores its variables of the environment.
    """

def tracing() -> bool:
    """Returns whether TENSORFERRY_TRACE asks for a trace."""

def trace_span(name: str, begin_ns: int, end_ns: int) -> None:
    """
    Adds work of this thread to the trace. The times are those of time.monotonic_ns().
    """

def validate(buffer: object, path: _Path, offset: int = 0) -> None:
    """
    Compares the buffer with an ordinary read of the file. Raises OSError (EBADMSG) with the first offset that differs.
    """
