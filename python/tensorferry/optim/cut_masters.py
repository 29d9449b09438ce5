"""Masters in fp32 of which only the lower half is stored.

A weight in bf16 is its master rounded to nearest. Where the weight is in memory, 16 bits more give
the master back, to the bit; the few that lie exactly between two weights, and NaN, are listed. That
holds only together with the weights that were rounded: a digest of each block of them tells which
ones somebody has changed since, in whatever way. The masters of those blocks begin anew from the
weights."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _core
from .masters import GPU_CHUNK

LOW = "master_low"  # the name of the state

MASTER_BLOCK = _core.MASTER_BLOCK  # elements that share a digest
_PIECE = GPU_CHUNK // 2 // MASTER_BLOCK  # blocks at a time: an element takes eight bytes

# A list that is longer than this share of the elements is not worth it.
_MOST_LISTED = 1 / 256


@dataclass(frozen=True)
class Cut:
    """What is needed beside a weight and the lower half of its master."""

    digests: Tensor  # of each block of weights
    listed: bytes | tuple[Tensor, Tensor]  # on a GPU (positions, what there is to add to weights)


@dataclass(frozen=True)
class Cutting:
    """A cut of which it is not known yet whether it is worth it: to ask a GPU is to wait for it."""

    cut: Cut
    excess: int | Tensor  # more than zero if too many elements would have to be listed

    def end(self, excess: int) -> Cut | None:
        """Returns the cut; None if too many elements would have to be listed."""
        return self.cut if excess == 0 else None


def cut(master: Tensor, weights: Tensor, low: Tensor) -> Cut | None:
    """Cuts a master that has been rounded to `weights`: fills `low`. Returns None if too many of
    its elements would have to be listed."""
    cutting = begin_cut(master, weights, low)
    return cutting.end(int(cutting.excess))


@torch.no_grad()
def begin_cut(master: Tensor, weights: Tensor, low: Tensor) -> Cutting:
    """cut() that does not wait for a GPU."""
    if not master.is_cpu:
        return begin_cut_by_torch(master, weights, low)
    digests = torch.empty(-(-master.numel() // MASTER_BLOCK), dtype=torch.int64)
    listed = _core.cut_masters(
        master, weights.view(torch.int16), low, digests, torch.get_num_threads()
    )
    excess = len(listed) // 8 - _most_listed(master)
    return Cutting(Cut(digests, listed), max(excess, 0))


@torch.no_grad()
def join(master: Tensor, weights: Tensor, low: Tensor, known: Cut) -> int | Tensor:
    """Fills a master. Returns in how many blocks the weights have changed since it was cut, on a
    GPU as a tensor there."""
    if not isinstance(known.listed, bytes):
        return join_by_torch(master, weights, low, known)
    if not master.is_cpu:  # a snapshot has been taken on the CPU
        here = [tensor.cpu() for tensor in (master, weights, low)]
        changed = join(*here, known)
        master.copy_(here[0])
        return changed
    return _core.join_masters(
        master,
        weights.view(torch.int16),
        low,
        known.digests,
        known.listed,
        torch.get_num_threads(),
    )


# By torch's operations, for a GPU. Each of them takes the processor as long as the GPU takes for
# megabytes, so there are few.


def begin_cut_by_torch(master: Tensor, weights: Tensor, low: Tensor) -> Cutting:
    """begin_cut() for elements on any device."""
    # What there is to add to the weights: the lower half, but for those that are listed.
    rest = torch.add(master.view(torch.int32), weights.view(torch.int16), alpha=-(1 << 16))
    low.copy_(rest)
    positions, excess = _positions(rest != low, _most_listed(master))
    return Cutting(Cut(digests_by_torch(weights), (positions, rest.gather(0, positions))), excess)


def join_by_torch(master: Tensor, weights: Tensor, low: Tensor, known: Cut) -> Tensor:
    """join() for elements on any device."""
    assert not isinstance(known.listed, bytes)
    bits = master.view(torch.int32).copy_(low)
    bits.scatter_(0, *known.listed)
    is_same = digests_by_torch(weights) == known.digests
    whole = bits.numel() // MASTER_BLOCK * MASTER_BLOCK
    bits[:whole].view(-1, MASTER_BLOCK).mul_(is_same[: whole // MASTER_BLOCK, None])
    if whole < bits.numel():
        bits[whole:].mul_(is_same[-1:])
    # A rest below zero takes one from the upper half: rounding has added it.
    bits.add_(weights.view(torch.int16), alpha=1 << 16)
    return is_same.numel() - is_same.sum()


def _most_listed(master: Tensor) -> int:
    return int(master.numel() * _MOST_LISTED) + 16


def _positions(is_listed: Tensor, most: int) -> tuple[Tensor, int | Tensor]:
    """(`most` positions: those that are listed, and then the first one as often as it takes; more
    than zero if that is not enough)"""
    try:
        found = torch.nonzero_static(is_listed, size=most + 1, fill_value=0).flatten()
    except NotImplementedError:  # on a GPU before torch 2.6
        found = is_listed.nonzero().flatten()
        return found[:most], max(found.numel() - most, 0)
    return found[:most], found[most]


def digests_by_torch(weights: Tensor) -> Tensor:
    """A number for each block: the sum of the bits of each element, times the factor of its place,
    modulo 2 ** 64."""
    bits = weights.view(torch.int16)
    factors = _factors(weights.device)
    whole = bits.numel() // MASTER_BLOCK * MASTER_BLOCK
    pieces = bits[:whole].view(-1, MASTER_BLOCK).split(_PIECE)
    digests = [(piece * factors).sum(1) for piece in pieces]
    if whole < bits.numel():
        rest = bits[whole:]
        digests.append((rest * factors[: rest.numel()]).sum(0, keepdim=True))
    return digests[0] if len(digests) == 1 else torch.cat(digests)


@functools.cache
def _factors(device: torch.device) -> Tensor:
    """Odd ones: whatever single element changes, so does the sum. They are random in all their
    bits, so that changes do not cancel each other: not even those of signs, which are 2 ** 15 times
    the factor, so that only its lower bits count. Snapshots have the sums, so these stay."""
    data = hashlib.shake_256(b"tensorferry").digest(8 * MASTER_BLOCK)
    return (torch.frombuffer(bytearray(data), dtype=torch.int64) | 1).to(device)
