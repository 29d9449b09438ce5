"""The values of a weight in files that nobody changes: they are read where they lie."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, NoReturn

import torch

from .._core import Handle, Operation
from .layout import PAGE, flat, page_up
from .reading import Reading
from .watched_file import WatchedFile

# torch's memory begins at multiples of this. Elsewhere its kernels may add in another order, and
# give other bits.
_ALIGNMENT = 64
# A weight is read in pieces of this, so that the reads of the next one begin when its first piece
# is there.
_PIECE_BYTES = 8 << 20
# Elements that are converted at a time.
_CONVERTED = 1 << 20


class Stretch(NamedTuple):
    """Bytes of a weight that follow each other in a file."""

    file: WatchedFile
    offset: int
    nbytes: int


class Stored(NamedTuple):
    """A tensor as files have it: its bytes, one stretch after the other."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]  # of elements in its bytes
    stretches: tuple[Stretch, ...]
    # Computes the tensor of the bytes, if they are not simply its elements.
    make: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def nbytes(self) -> int:
        return sum(stretch.nbytes for stretch in self.stretches)


def merged(stretches: Iterable[Stretch]) -> tuple[Stretch, ...]:
    """Makes one of stretches that follow each other in a file."""
    found: list[Stretch] = []
    for file, offset, nbytes in stretches:
        if found and (found[-1].file, found[-1].offset + found[-1].nbytes) == (file, offset):
            found[-1] = found[-1]._replace(nbytes=found[-1].nbytes + nbytes)
        else:
            found.append(Stretch(file, offset, nbytes))
    return tuple(found)


def cut(stretches: Iterable[Stretch], length: int) -> list[list[Stretch]]:
    """Cuts bytes into parts of this length."""
    parts: list[list[Stretch]] = []
    missing = 0
    for file, offset, nbytes in stretches:
        while nbytes:
            if missing == 0:
                parts.append([])
                missing = length
            taken = min(nbytes, missing)
            parts[-1].append(Stretch(file, offset, taken))
            offset, nbytes, missing = offset + taken, nbytes - taken, missing - taken
    return parts


class FileValues:
    """The values of a weight in files. If the weight has another dtype or other strides than the
    files, each read converts them."""

    def __init__(
        self,
        name: str,
        stored: Stored,
        handle: Handle,
        dtype: torch.dtype,
        stride: tuple[int, ...],
    ) -> None:
        """`name` is that of the weight in the model, `dtype` and `stride` are how it is used."""
        self.name = name
        self.dtype = dtype
        self.size = stored.size
        self.stride = stride
        self._stored = stored
        self._handle = handle
        self._is_watched = False
        self._converts = (dtype, stride) != (stored.dtype, stored.stride) or stored.make is not None
        nbytes = self.size.numel() * dtype.itemsize
        first = stored.stretches[0] if len(stored.stretches) == 1 else None
        phase = 0 if first is None else first.offset % PAGE
        self.lead = 0
        if self._converts:
            # The bytes of the file lie at the end, so that their conversion begins before them.
            phase = phase if phase % stored.dtype.itemsize == 0 else 0
            self.slot_bytes = page_up(max(nbytes, stored.nbytes)) + 2 * PAGE
            self._bytes_at = self.slot_bytes - page_up(phase + stored.nbytes) + phase
            self.is_in_place = first is not None and phase == first.offset % PAGE
        else:
            # Where the pages of the file around the values may lie so that the values begin well,
            # the drive fills memory in place: everywhere on NVMe drives.
            before = -phase % _ALIGNMENT
            self.is_in_place = first is not None and before % first.file.memory_alignment == 0
            self.lead = self._bytes_at = before + phase if self.is_in_place else 0
            pages = before + page_up(phase + nbytes) if self.is_in_place else nbytes
            self.slot_bytes = page_up(pages)
        # `is_in_place`: whole pages of the file are read to where the drive can put them.

    # --- parts ---

    @property
    def has_rows(self) -> bool:
        """Returns whether rows() can read each index of the first dimension by itself."""
        like = torch.empty(self.size, device="meta")
        return self._stored.make is None and self.stride == self._stored.stride == like.stride()

    def rows(self) -> list[FileValues]:
        """Returns the values of each index of the first dimension."""
        whole, stride = self._stored, self.stride[1:]
        size = torch.Size(self.size[1:])
        parts = cut(whole.stretches, size.numel() * whole.dtype.itemsize)
        return [
            FileValues(
                f"{self.name}[{number}]",
                Stored(whole.dtype, size, stride, merged(part)),
                self._handle,
                self.dtype,
                stride,
            )
            for number, part in enumerate(parts)
        ]

    def describe(self) -> list[list[str | int]]:
        """Where its bytes are, for a snapshot: the path and the size of each file, the offset and
        the number of its bytes there."""
        return [
            [os.path.abspath(stretch.file.path), stretch.file.size, stretch.offset, stretch.nbytes]
            for stretch in self._stored.stretches
        ]

    # --- reading ---

    def get(self, slot: torch.Tensor, begin: int, end: int) -> Iterator[Reading]:
        if (begin, end) != (0, self.size.numel()):
            self.check_writable()
        groups = list(self._groups())
        for number, group in enumerate(groups, 1):
            reads = [(slot[at : at + n], file.file, offset) for at, file, offset, n in group]
            files = {file for _, file, _, _ in group}
            finish = None
            if self._converts and number == len(groups):
                finish = lambda: self._convert(slot)  # noqa: E731
            yield FileReading(self.size, self._handle.read_many(reads), files, finish)

    def _groups(self) -> Iterator[list[tuple[int, WatchedFile, int, int]]]:
        """Yields what is read as one operation: (byte of the slot, file, offset, bytes) of each
        part."""
        group: list[tuple[int, WatchedFile, int, int]] = []
        total = 0
        for at, file, offset, nbytes in self._parts():
            end = offset + nbytes
            while offset < end:
                # Up to a whole piece of the file: its borders are good for direct reads.
                n = min(end - offset, _PIECE_BYTES - offset % _PIECE_BYTES)
                group.append((at, file, offset, n))
                at, offset, total = at + n, offset + n, total + n
                if total >= _PIECE_BYTES:
                    yield group
                    group, total = [], 0
        if group:
            yield group

    def _parts(self) -> Iterator[tuple[int, WatchedFile, int, int]]:
        at = self._bytes_at
        for file, offset, nbytes in self._stored.stretches:
            if self.is_in_place:
                before = offset % PAGE
                after = min(page_up(offset + nbytes), file.size) - offset - nbytes
                yield at - before, file, offset - before, before + nbytes + after
            else:
                yield at, file, offset, nbytes
            at += nbytes

    def _convert(self, slot: torch.Tensor) -> None:
        """Makes the values of the bytes that were read."""
        source = self._stored
        count = self.size.numel()
        read = slot[self._bytes_at : self._bytes_at + source.nbytes]
        target = slot[: count * self.dtype.itemsize].view(self.dtype)
        with torch.no_grad():
            if source.make is not None:
                made = _with_stride(source.make(read.clone()), self.dtype, self.stride)
                target.copy_(flat(made))
                return
            found = read.view(source.dtype)
            if source.stride == self.stride:
                for at in range(0, count, _CONVERTED):
                    end = min(at + _CONVERTED, count)
                    target[at:end] = found[at:end].to(self.dtype, copy=True)
                return
            elements = found.as_strided(source.size, source.stride)
            target.copy_(flat(_with_stride(elements, self.dtype, self.stride)))

    def read_now(self, device: torch.device) -> torch.Tensor:
        """Returns the values, in memory of their own."""
        with torch.inference_mode(False):
            slot = torch.empty(self.slot_bytes + _ALIGNMENT, dtype=torch.uint8, device=device)
            slot = slot[-slot.data_ptr() % _ALIGNMENT :][: self.slot_bytes]
            for reading in list(self.get(slot, 0, self.size.numel())):
                reading.wait()
            values = slot[self.lead :][: self.size.numel() * self.dtype.itemsize]
            return values.view(self.dtype).as_strided(self.size, self.stride).clone()

    # --- what files refuse ---

    def put(self, slot: torch.Tensor, begin: int, end: int) -> Iterator[Operation]:
        self._refuse()

    def check_writable(self) -> None:
        self._refuse()

    def watch(self, param: torch.nn.Parameter) -> None:
        if param.requires_grad and not self._is_watched:
            self._is_watched = True
            param.register_hook(lambda _: self._refuse())

    def _refuse(self) -> NoReturn:
        raise RuntimeError(
            f"{self.name} cannot change: its values are in {self.path}, which is never written. "
            "If it is not to be trained, call requires_grad_(False) on it; else move the weights "
            "with offload.parameters() instead of offload.checkpoint()"
        )

    @property
    def path(self) -> str:
        """The file that has its first values."""
        return self._stored.stretches[0].file.path if self._stored.stretches else "a checkpoint"

    # --- mapped ---

    def view(self) -> torch.Tensor:
        stretches = self._stored.stretches
        misplaced = len(stretches) != 1 or stretches[0].offset % self._stored.dtype.itemsize != 0
        if misplaced or self._stored.make is not None:
            return self.read_now(torch.device("cpu"))
        file, offset, nbytes = stretches[0]
        file.check()
        begin = offset - offset % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(
            file.descriptor,
            offset + nbytes - begin,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
            offset=begin,
        )
        bytes_ = torch.frombuffer(mapped, dtype=torch.uint8)[offset - begin :]
        elements = bytes_.view(self._stored.dtype).as_strided(self.size, self._stored.stride)
        return _with_stride(elements, self.dtype, self.stride)


def _with_stride(tensor: torch.Tensor, dtype: torch.dtype, stride: tuple[int, ...]) -> torch.Tensor:
    """Returns a tensor with this dtype and these strides: the same one, if it has them."""
    if (tensor.dtype, tensor.stride()) == (dtype, stride):
        return tensor
    made = torch.empty_strided(tensor.size(), stride, dtype=dtype, device=tensor.device)
    return made.copy_(tensor)


class FileReading(Reading):
    """A read of a weight from files. It fails if one of them has changed."""

    def __init__(
        self,
        size: torch.Size,
        operation: Operation,
        files: set[WatchedFile],
        finish: Callable[[], None] | None,
    ) -> None:
        """`finish` makes values of the bytes of this read and those before it."""
        super().__init__(size, operation, None)
        self._files = files
        self._finish = finish

    def wait(self) -> None:
        try:
            self.operation.wait()
        except OSError:
            self._check()  # a file that was cut is named as such
            raise
        self._check()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def _check(self) -> None:
        for file in self._files:
            file.check()
        self._files = set()  # what has arrived does not change any more
