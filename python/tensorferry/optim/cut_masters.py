"""Masters in fp32 of which only the lower half is stored.

A weight in bf16 is its master rounded to nearest. Where the weight is in memory, 16 bits more give
the master back, to the bit; the few that lie exactly between two weights, and NaN, are listed. That
holds only together with the weights that were rounded: a digest of each block of them tells which
ones somebody has changed since, by whatever way. The masters of those blocks begin anew from the
weights."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _core
from .masters import GPU_CHUNK

LOW = "master_low"  # the name of the state

_BLOCK = _core.MASTER_BLOCK
_WORDS = _BLOCK // 4  # of eight bytes

_MIX = 0x1E3779B97F4A7C15  # odd, with bits all over

# A list that is longer than this share of the elements is not worth it.
_MOST_LISTED = 1 / 256


@dataclass(frozen=True)
class Cut:
    """What is needed beside a weight and the lower half of its master."""

    digests: Tensor  # of each block of weights
    listed: bytes | tuple[Tensor, Tensor]  # on a GPU (positions, bits)


@dataclass(frozen=True)
class Cutting:
    """A cut of which it is not known yet whether it is worth it: to ask a GPU is to wait for it."""

    cut: Cut  # with room for as many listed elements as may be
    listed: int | Tensor  # how many there are
    most: int

    def end(self, listed: int) -> Cut | None:
        """Returns the cut; None if too many of the elements, `listed`, would have to be listed."""
        if listed > self.most:
            return None
        if isinstance(self.cut.listed, bytes):
            return self.cut
        positions, exact = (part[:listed].clone() for part in self.cut.listed)
        return Cut(self.cut.digests, (positions, exact))


def cut(master: Tensor, weights: Tensor, low: Tensor) -> Cut | None:
    """Cuts a master that has been rounded to `weights`: fills `low`. Returns None if too many of
    its elements would have to be listed."""
    cutting = begin_cut(master, weights, low)
    return cutting.end(int(cutting.listed))


@torch.no_grad()
def begin_cut(master: Tensor, weights: Tensor, low: Tensor) -> Cutting:
    """cut() that does not wait for a GPU."""
    most = int(master.numel() * _MOST_LISTED) + 16
    if master.is_cpu:
        blocks = -(-master.numel() // _BLOCK)
        digests = torch.empty(blocks, dtype=torch.int64)
        listed = _core.cut_masters(
            master, weights.view(torch.int16), low, digests, torch.get_num_threads()
        )
        return Cutting(Cut(digests, listed), len(listed) // 8, most)
    bits = master.view(torch.int32)
    low.copy_(bits)
    wrong = torch.empty_like(bits, dtype=torch.bool)
    for at in range(0, master.numel(), GPU_CHUNK):
        part = slice(at, at + GPU_CHUNK)
        joined = _joined(torch.empty_like(bits[part]), weights[part], low[part])
        torch.ne(joined, bits[part], out=wrong[part])
    positions = _positions(wrong, most)
    return Cutting(
        Cut(_digests(weights), (positions, bits[positions])), wrong.count_nonzero(), most
    )


def _positions(wrong: Tensor, most: int) -> Tensor:
    """Where `wrong` is true: the first `most` places, and then any."""
    try:
        return torch.nonzero_static(wrong, size=most, fill_value=0).flatten()
    except NotImplementedError:  # on a GPU before torch 2.6
        return wrong.nonzero().flatten()


@torch.no_grad()
def join(master: Tensor, weights: Tensor, low: Tensor, known: Cut) -> int | Tensor:
    """Fills a master. Returns in how many blocks the weights have changed since it was cut, on a
    GPU as a tensor there."""
    if isinstance(known.listed, bytes):
        return _core.join_masters(
            master,
            weights.view(torch.int16),
            low,
            known.digests,
            known.listed,
            torch.get_num_threads(),
        )
    bits = _joined(master.view(torch.int32), weights, low)
    positions, exact = known.listed
    bits[positions] = exact
    changed = _digests(weights) != known.digests
    _begin_anew(bits, weights, changed)
    return changed.count_nonzero()


def _begin_anew(bits: Tensor, weights: Tensor, changed: Tensor) -> None:
    """Gives the masters of changed blocks, by their bits, the values of their weights."""
    whole = weights.numel() // _BLOCK * _BLOCK
    own, values = bits[:whole].view(-1, _BLOCK), weights[:whole].view(-1, _BLOCK)
    rows = GPU_CHUNK // _BLOCK
    for part, value, is_new in zip(own.split(rows), values.split(rows), changed.split(rows)):
        part.copy_(torch.where(is_new[: len(part), None], value.float().view(torch.int32), part))
    if whole < weights.numel():
        rest, value = bits[whole:], weights[whole:].float().view(torch.int32)
        rest.copy_(torch.where(changed[-1:], value, rest))


def _joined(bits: Tensor, weights: Tensor, low: Tensor) -> Tensor:
    """Fills in the bits of the masters of these weights. A lower half from 8000 on, which is
    negative, takes one from the upper half: rounding has added it."""
    return bits.copy_(weights.view(torch.int16)).bitwise_left_shift_(16).add_(low)


@functools.cache
def _factors(device: torch.device) -> Tensor:
    """Odd ones: whatever single word changes, so does the sum."""
    return torch.arange(1, 2 * _WORDS, 2, dtype=torch.int64, device=device) * _MIX


def _digests(weights: Tensor) -> Tensor:
    """A number for each block, of all elements and their places in it."""
    whole = weights.numel() // _BLOCK * _BLOCK
    words = weights[:whole].view(torch.int16).view(torch.int64).view(-1, _WORDS)
    factors = _factors(weights.device)
    digests = [(part * factors).sum(1) for part in words.split(GPU_CHUNK // _BLOCK)]
    if whole < weights.numel():
        rest = weights[whole:].view(torch.int16)
        rest = torch.nn.functional.pad(rest, (0, -rest.numel() % _BLOCK))
        digests.append((rest.view(torch.int64) * factors).sum(0, keepdim=True))
    return torch.cat(digests)
