"""Reads the tensors of a snapshot, without the run that took it."""

from __future__ import annotations

import collections
from pathlib import Path
from types import TracebackType

import torch

from .._core import Operation, SwapBuffer, SwapSpace
from .._memory.layout import page_up
from .._memory.values import cuts_of
from .folder import Manifest

_BUFFER_BYTES = 64 << 20
_AHEAD = 4  # tensors that are read at a time


class Reader:
    """The tensors of one rank in a snapshot. Needs no memory for them: they are mapped."""

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
            buffer_bytes=max(_BUFFER_BYTES, _AHEAD * page_up(largest)),
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
        """A weight of the model that is on the drive, mapped."""
        layout = self._manifest.layouts["model"]
        place, kind = layout["stored"][name], layout["tensors"][name]
        dtype: torch.dtype = getattr(torch, kind["dtype"])
        size = torch.Size(kind["size"])
        space = self._manifest.spaces["model"][place["space"]]
        parts = [
            (f"{space.name}/{place['key']}/{first}", 0, (last - first) * dtype.itemsize)
            for first, last in cuts_of(size.numel())
        ]
        if not parts or self._space is None:
            return torch.empty(size, dtype=dtype)
        elements = torch.frombuffer(self._space.view(parts), dtype=dtype)
        return elements.as_strided(size, place["stride"])

    def check(self, part: str | None = None) -> dict[str, int]:
        """Reads all tensors, or those of one part, and compares their checksums. Raises OSError
        (EBADMSG) for one that has changed."""
        spaces = self._manifest.all_spaces if part is None else self._manifest.spaces[part]
        counts = {"tensors": 0, "bytes": 0, "without_checksum": 0}
        running: collections.deque[tuple[SwapBuffer, Operation]] = collections.deque()
        for space in spaces:
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
