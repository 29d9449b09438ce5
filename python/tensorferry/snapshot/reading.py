"""Reads the tensors of a snapshot, without the run that took it."""

from __future__ import annotations

import collections
import math
from pathlib import Path
from types import TracebackType

import torch

from .._core import Operation, SwapBuffer, SwapSpace
from .._memory.layout import page_up
from .._memory.values import cuts_of
from .folder import Manifest

_BUFFER_BYTES = 64 << 20
_AHEAD = 3  # tensors that are read at a time


class WeightBytes:
    """The bytes of a weight, which have to be asked for from front to back, each once."""

    def __init__(self, space: SwapSpace, parts: list[tuple[str, int]]) -> None:
        self._space = space
        self._parts = collections.deque(parts)
        self._running: collections.deque[tuple[SwapBuffer, Operation, int]] = collections.deque()
        self._left: memoryview | None = None

    def fill(self, begin: int, memory: memoryview) -> None:
        """Fills the memory with the bytes from the given one on."""
        at = 0
        while at < len(memory):
            left = self._left if self._left is not None else self._next()
            count = min(len(left), len(memory) - at)
            memory[at : at + count] = left[:count]
            at += count
            self._left = left[count:] if count < len(left) else None  # else it needs its buffer

    def _next(self) -> memoryview:
        while self._parts and len(self._running) < _AHEAD:
            key, nbytes = self._parts.popleft()
            self._running.append((*self._space.fetch(key), nbytes))
        buffer, operation, nbytes = self._running.popleft()
        operation.wait()
        return memoryview(buffer)[:nbytes]


class Reader:
    """The tensors of one rank in a snapshot. Each is read once, and its checksum compared."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._space: SwapSpace | None = None
        spaces = manifest.all_spaces
        files = [file for space in spaces for file in space.files]
        if not files:
            return
        largest = max(tensor[1] for space in spaces for tensor in space.tensors)
        self._space = SwapSpace(
            Path(files[0]).parents[1],
            buffer_bytes=max(_BUFFER_BYTES, (_AHEAD + 1) * page_up(largest)),
            pin_memory=False,
        )
        try:
            for space in spaces:
                tensors = [(f"{space.name}/{t[0]}", *t[1:]) for t in space.tensors]
                self._space.attach(space.files, tensors)
        except BaseException:
            self._space.close()
            raise

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._space is not None:
            self._space.close()

    def weight(self, name: str) -> torch.Tensor:
        """A weight of the model that is on the drive, in memory of its own."""
        layout = self._manifest.layouts["model"]
        place, kind = layout["stored"][name], layout["tensors"][name]
        elements = torch.empty(math.prod(kind["size"]), dtype=getattr(torch, kind["dtype"]))
        if elements.nbytes:
            self.bytes_of(name).fill(0, memoryview(elements.view(torch.uint8).numpy()))
        return elements.as_strided(kind["size"], place["stride"])

    def bytes_of(self, name: str) -> WeightBytes:
        """The bytes of a weight of the model, in the order in which they are on the drive."""
        layout = self._manifest.layouts["model"]
        place, kind = layout["stored"][name], layout["tensors"][name]
        item_bytes = getattr(torch, kind["dtype"]).itemsize
        space = self._manifest.spaces["model"][place["space"]]
        parts = [
            (f"{space.name}/{place['key']}/{first}", (last - first) * item_bytes)
            for first, last in cuts_of(math.prod(kind["size"]))
        ]
        assert self._space is not None
        return WeightBytes(self._space, parts)

    def check(self) -> dict[str, int]:
        """Reads all tensors and compares their checksums. Raises OSError (EBADMSG) for one that has
        changed."""
        counts = {"tensors": 0, "bytes": 0, "without_checksum": 0}
        running: collections.deque[tuple[SwapBuffer, Operation]] = collections.deque()
        for space in self._manifest.all_spaces:
            for key, nbytes, _, checksum in space.tensors:
                assert self._space is not None
                if len(running) == _AHEAD:
                    running.popleft()[1].wait()
                running.append(self._space.fetch(f"{space.name}/{key}"))
                counts["tensors"] += 1
                counts["bytes"] += nbytes
                counts["without_checksum"] += checksum is None
        for _, operation in running:
            operation.wait()
        return counts
