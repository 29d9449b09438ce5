"""Writes a safetensors file from tensors that are read as they are written."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable

from .._core import File, NewFile, Operation, make_safetensors_header, safetensors_checksum
from .._shared_handle import shared_handle
from .gathering import source_of
from .safetensors_files import CHECKSUMS, CHUNK_BYTES
from .tensors import Checkpoint, Tensor
from .windows import WINDOW_BYTES, Stream

_WRITES = 4  # under way at a time
_ALIGNMENT = 4096


def write_safetensors(checkpoint: Checkpoint, path: str, passed: Callable[[int], object]) -> None:
    """Replaces the file. `passed` is called with how many bytes have been written since."""
    tensors = checkpoint.tensors
    digests = {tensor.name: [0] * -(-tensor.bytes // CHUNK_BYTES) for tensor in tensors}
    header, order = _header(checkpoint, digests)
    in_order = [tensors[number] for number in order]
    with NewFile(path) as new, _Writes(new.file, passed) as writes:
        stream = Stream(source_of(tensor) for tensor in in_order)
        try:
            _write_tensors(in_order, stream, writes, len(header), digests)
        finally:
            stream.close()
        writes.finish()
        shared_handle().write_now(_header(checkpoint, digests)[0], new.file)
        new.commit()


def _header(checkpoint: Checkpoint, digests: dict[str, list[int]]) -> tuple[bytes, list[int]]:
    """The header. Digests have a fixed width: it is as long with those that are not known yet."""
    rows = [(tensor.name, tensor.dtype, list(tensor.shape)) for tensor in checkpoint.tensors]
    texts = {name: "".join(f"{one:016x}" for one in digests[name]) for name in sorted(digests)}
    metadata = {"format": "pt"}
    if checkpoint.format == "safetensors":
        metadata = dict(checkpoint.metadata)
    metadata[CHECKSUMS] = json.dumps(texts, ensure_ascii=False, separators=(",", ":"))
    return make_safetensors_header(rows, metadata=metadata, alignment=_ALIGNMENT)


def _write_tensors(
    tensors: list[Tensor],
    stream: Stream,
    writes: _Writes,
    offset: int,
    digests: dict[str, list[int]],
) -> None:
    for tensor in tensors:
        for number, begin in enumerate(range(0, tensor.bytes, CHUNK_BYTES)):
            chunk = stream.take(min(CHUNK_BYTES, tensor.bytes - begin))
            digests[tensor.name][number] = safetensors_checksum(chunk)
            writes.add(chunk, offset + begin)
        offset += tensor.bytes


class _Writes:
    """Writes that follow each other, joined into windows. Leaving `with` ends them."""

    def __init__(self, file: File, passed: Callable[[int], object]) -> None:
        self._file = file
        self._passed = passed
        self._window: list[tuple[memoryview, File, int]] = []
        self._window_bytes = 0
        self._under_way: deque[tuple[Operation, int]] = deque()

    def __enter__(self) -> _Writes:
        return self

    def __exit__(self, *args: object) -> None:
        for operation, _ in self._under_way:
            operation.cancel()
        for operation, _ in self._under_way:
            try:
                operation.wait()
            except OSError:
                pass  # cancelled, or failed: the caller has the first failure already

    def add(self, memory: memoryview, offset: int) -> None:
        if self._window_bytes + len(memory) > WINDOW_BYTES:
            self._start()
        self._window.append((memory, self._file, offset))
        self._window_bytes += len(memory)

    def finish(self) -> None:
        """Returns when all has been written."""
        self._start()
        while self._under_way:
            self._finish_oldest()

    def _start(self) -> None:
        if not self._window:
            return
        if len(self._under_way) == _WRITES:
            self._finish_oldest()
        operation = shared_handle().write_many(self._window)
        self._under_way.append((operation, self._window_bytes))
        self._window, self._window_bytes = [], 0

    def _finish_oldest(self) -> None:
        operation, count = self._under_way[0]
        operation.wait()
        self._under_way.popleft()
        self._passed(count)
