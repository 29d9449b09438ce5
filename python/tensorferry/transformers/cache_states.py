"""The keys and values of one layer: in memory, on the drive, or both."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from .._core import File, Handle, Operation
from .._memory.layout import PAGE
from .._memory.watched_file import WatchedFile
from .cache_file import CacheFile

# So many tokens at least go to the drive at a time; as many stay in memory in any case.
_BLOCK_TOKENS = 64
# Room for so many tokens in the file at first. What nobody writes takes no space there.
_FILE_TOKENS = 1 << 16

Transfer = tuple[torch.Tensor, File, int]  # memory, file, offset


class Side(NamedTuple):
    """What one token of one head takes, of keys or of values."""

    width: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.width * self.dtype.itemsize


class Saved(NamedTuple):
    """Tokens of a layer in a file that somebody has saved, keys or values: rows of equal length."""

    file: WatchedFile
    offset: int
    row_bytes: int


class States:
    """The keys and values of one layer, `length` tokens of them. The first `written` tokens are on
    the drive. All of them are in memory, or those that are not on the drive."""

    def __init__(
        self, handle: Handle, file: CacheFile, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """`keys` and `values` are like those to come: [batch, heads, tokens, width]."""
        self.device = keys.device
        self.batch, self.heads = keys.shape[:2]
        self.sides = tuple(Side(one.shape[-1], one.dtype) for one in (keys, values))
        self.block = _block_tokens(self.sides)
        self.length = 0
        self.written = 0
        self.memory: torch.Tensor | None = None  # also while reads fill it
        self.capacity = 0  # tokens of that memory
        self.saved: tuple[Saved, ...] = ()  # where the first `saved_tokens` are, of both sides
        self.saved_tokens = 0
        self._rest = self._empty()  # tokens from `written` on, without memory
        self._handle = handle
        self._file = file
        self._region = 0
        self._file_tokens = 0  # for which the file has room
        self._reads: list[tuple[Operation, Sequence[WatchedFile]]] = []
        self._writes: list[Operation] = []

    def check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Raises ValueError unless these new tokens fit the others, with all their bits."""
        for side, new in zip(self.sides, (keys, values)):
            wanted = (self.batch, self.heads, new.shape[2], side.width)
            fits = new.shape == wanted and new.device == self.device
            if not fits or torch.promote_types(side.dtype, new.dtype) != side.dtype:
                raise ValueError(
                    f"the cache has keys or values of {self.batch} sequences with {self.heads} "
                    f"heads of {side.width} {side.dtype} on {self.device}, and was given some of "
                    f"shape {tuple(new.shape)}, {new.dtype} on {new.device}"
                )

    # --- sizes ---

    def capacity_for(self, tokens: int) -> int:
        """Returns for how many tokens to take memory: the same for all layers of a length, and not
        much more than that."""
        step = self.block
        while step * 16 < tokens:
            step *= 2
        return -(-tokens // step) * step

    def bytes_for(self, capacity: int) -> int:
        """Returns the memory that so many tokens take."""
        return self.batch * self.heads * capacity * sum(side.nbytes for side in self.sides)

    @property
    def nbytes(self) -> int:
        return self.bytes_for(self.length)

    # --- memory ---

    def views(self) -> list[torch.Tensor]:
        """Returns keys and values in memory."""
        return [one[:, :, : self.length] for one in self._whole(self.memory, self.capacity)]

    def _whole(self, memory: torch.Tensor | None, capacity: int) -> Iterator[torch.Tensor]:
        assert memory is not None
        at = 0
        for side in self.sides:
            size = (self.batch, self.heads, capacity, side.width)
            nbytes = math.prod(size) * side.dtype.itemsize
            yield memory[at : at + nbytes].view(side.dtype).view(size)
            at += nbytes

    def _empty(self) -> list[torch.Tensor]:
        size = (self.batch, self.heads, 0)
        return [
            torch.empty(*size, side.width, dtype=side.dtype, device=self.device)
            for side in self.sides
        ]

    def load(self, memory: torch.Tensor, capacity: int) -> None:
        """Starts to read all tokens into this memory."""
        self.wait_written()
        self.memory, self.capacity = memory, capacity
        files = [saved.file for saved in self.saved]
        transfers = list(self._saved_transfers())
        if self.written > self.saved_tokens:
            transfers += self._transfers(self.saved_tokens, self.written)
        if transfers:
            self._reads = [(self._handle.read_many(transfers), files)]

    def wait(self) -> None:
        """Waits until all tokens are in memory."""
        try:
            for read, files in self._reads:
                try:
                    read.wait()
                finally:
                    for file in files:
                        file.check()
        except BaseException:
            self.memory = None
            raise
        finally:
            self._reads = []
        for whole, rest in zip(self._whole(self.memory, self.capacity), self._rest):
            whole[:, :, self.length - rest.shape[2] : self.length].copy_(rest)
        self._rest = self._empty()

    def move(self, memory: torch.Tensor, capacity: int) -> None:
        """Moves all tokens to other memory."""
        for old, new in zip(self.views(), self._whole(memory, capacity)):
            new[:, :, : self.length].copy_(old)
        self.memory, self.capacity = memory, capacity

    def append(self, states: Sequence[torch.Tensor]) -> None:
        """Adds tokens, for which the memory has room."""
        count = states[0].shape[2]
        for whole, new in zip(self._whole(self.memory, self.capacity), states):
            whole[:, :, self.length : self.length + count].copy_(new)
        self.length += count

    def replace(self, states: Sequence[torch.Tensor], memory: torch.Tensor, capacity: int) -> None:
        """Takes these keys and values instead, maybe of another batch size, in this memory."""
        self.forget()
        self.batch, self.length = states[0].shape[0], 0
        self._rest = self._empty()
        self.memory, self.capacity = memory, capacity
        self.append(states)

    def crop(self, length: int) -> None:
        """Keeps so many tokens, the first ones."""
        if self.memory is not None:
            self.wait()
        self.wait_written()
        whole_blocks = length - length % self.block
        if self.memory is None and length < self.written:
            self._rest = self._read_block(whole_blocks, length)
        elif self.memory is None:
            self._rest = [rest[:, :, : length - self.written] for rest in self._rest]
        self.length = length
        self.written = min(self.written, whole_blocks)
        self.saved_tokens = min(self.saved_tokens, whole_blocks)

    def _read_block(self, begin: int, end: int) -> list[torch.Tensor]:
        """Returns tokens from within one block on the drive."""
        memory = torch.empty(self.bytes_for(self.block), dtype=torch.uint8, device=self.device)
        whole = list(self._whole(memory, self.block))
        transfers = []
        for number, (side, one) in enumerate(zip(self.sides, whole)):
            rows = one.view(-1, self.block * side.width).view(torch.uint8)
            for row, part in enumerate(rows):
                if begin < self.saved_tokens:
                    file, offset = self._saved_place(number, row, begin)
                else:
                    file, offset = self._place(number, row, begin)
                transfers.append((part, file, offset))
        self._handle.read_many(transfers).wait()
        for saved in self.saved:
            saved.file.check()
        return [one[:, :, : end - begin].clone() for one in whole]

    # --- the drive ---

    def flush(self) -> None:
        """Starts to write whole blocks of tokens that are not on the drive."""
        whole_blocks = self.length - self.length % self.block
        if whole_blocks <= self.written:
            return
        if whole_blocks > self._file_tokens:
            self._grow_file(whole_blocks)
        transfers = list(self._transfers(self.written, whole_blocks))
        self._writes.append(self._handle.write_many(transfers))
        self.written = whole_blocks

    def drop(self) -> None:
        """Gives up the memory. What is not on the drive goes there, or is kept by itself."""
        self.flush()
        self.wait_written()
        self._rest = [one[:, :, self.written :].clone() for one in self.views()]
        self.memory = None

    def forget(self) -> None:
        """Forgets all tokens."""
        with contextlib.suppress(OSError):  # nobody reads what they wrote
            self.wait_written()
        self._reads = []
        if self._file_tokens:
            self._file.give_back(self._region, self.bytes_for(self._file_tokens))
        self.memory, self._rest = None, self._empty()
        self.length = self.written = self._file_tokens = self.saved_tokens = 0
        self.saved = ()

    def end(self) -> None:
        """Lets go of all memory. Nothing is read or written any more."""
        self.memory, self._rest, self.length = None, self._empty(), 0
        self._reads, self._writes, self.saved = [], [], ()

    def has_written(self) -> bool:
        """Returns whether nothing is to be written, and no write is under way."""
        blocks = self.length - self.length % self.block
        return blocks <= self.written and all(write.done() for write in self._writes)

    def wait_written(self) -> None:
        """Waits for writes, which hold the memory that they come from. After one that failed,
        nothing that was computed counts as written."""
        failure = None
        while self._writes:
            try:
                self._writes[-1].wait()
            except OSError as error:
                failure, self.written = error, self.saved_tokens
            self._writes.pop()
        if failure is not None:
            raise failure

    def hold(self, saved: tuple[Saved, ...], length: int) -> None:
        """Takes the tokens that somebody has saved."""
        self.saved, self.length = saved, length
        self.saved_tokens = self.written = length - length % self.block
        if self.written < length:
            self._rest = self._read_saved_rest(length)

    def _read_saved_rest(self, length: int) -> list[torch.Tensor]:
        # The rows of the file are whole blocks.
        self.saved_tokens += self.block
        try:
            return self._read_block(self.written, length)
        finally:
            self.saved_tokens -= self.block

    def _grow_file(self, tokens: int) -> None:
        """Takes a region with room for more tokens, and moves there what is on the drive: from
        memory, which has all of it."""
        self.wait_written()
        old = (self._region, self._file_tokens)
        more = max(_FILE_TOKENS, 4 * tokens) // self.block * self.block
        self._region, self._file_tokens = self._file.take(self.bytes_for(more)), more
        if old[1]:
            self._file.give_back(old[0], self.bytes_for(old[1]))
        self.written = self.saved_tokens

    def _place(self, side: int, row: int, token: int) -> tuple[File, int]:
        """Returns where a token is in the file."""
        rows = self.batch * self.heads
        row_bytes = [one.nbytes * self._file_tokens for one in self.sides]
        begin = self._region + rows * sum(row_bytes[:side]) + row * row_bytes[side]
        return self._file.file, begin + token * self.sides[side].nbytes

    def _saved_place(self, side: int, row: int, token: int) -> tuple[File, int]:
        saved = self.saved[side]
        offset = saved.offset + row * saved.row_bytes + token * self.sides[side].nbytes
        return saved.file.file, offset

    def _transfers(self, begin: int, end: int) -> Iterator[Transfer]:
        return self._rows(begin, end, self._place)

    def _saved_transfers(self) -> Iterator[Transfer]:
        return self._rows(0, self.saved_tokens, self._saved_place)

    def _rows(
        self, begin: int, end: int, place: Callable[[int, int, int], tuple[File, int]]
    ) -> Iterator[Transfer]:
        """Yields the memory of these tokens, row by row, and where a file has them."""
        assert self.memory is not None
        if begin >= end:
            return
        at = 0
        for number, side in enumerate(self.sides):
            for row in range(self.batch * self.heads):
                first, last = at + begin * side.nbytes, at + end * side.nbytes
                yield self.memory[first:last], *place(number, row, begin)
                at += self.capacity * side.nbytes


def _block_tokens(sides: Sequence[Side]) -> int:
    """Returns how many tokens take whole pages, of keys and of values."""
    tokens = math.lcm(*(PAGE // math.gcd(PAGE, side.nbytes) for side in sides))
    return tokens * -(-_BLOCK_TOKENS // tokens)
