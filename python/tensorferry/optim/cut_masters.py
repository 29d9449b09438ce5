"""Masters in fp32 of which only the lower half is stored.

A weight in bf16 is its master rounded to nearest. Where the weight is in memory, 16 bits more give
the master back, to the bit; the few that lie exactly between two weights, and NaN, are listed. That
holds only together with the weights that were rounded: a digest of each block of them tells which
ones somebody has changed since, by whatever way. The masters of those blocks begin anew from the
weights."""

from __future__ import annotations

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


@torch.no_grad()
def cut(master: Tensor, weights: Tensor, low: Tensor) -> Cut | None:
    """Cuts a master that has been rounded to `weights`: fills `low`. Returns None if too many of
    its elements would have to be listed."""
    most = int(master.numel() * _MOST_LISTED) + 16
    if master.is_cpu:
        blocks = -(-master.numel() // _BLOCK)
        digests = torch.empty(blocks, dtype=torch.int64)
        listed = _core.cut_masters(
            master, weights.view(torch.int16), low, digests, torch.get_num_threads()
        )
        return Cut(digests, listed) if len(listed) <= 8 * most else None
    positions = []
    for at in range(0, master.numel(), GPU_CHUNK):
        part = slice(at, at + GPU_CHUNK)
        bits = master[part].view(torch.int32)
        low[part].copy_(bits)
        positions.append((_joined(weights[part], low[part]) != bits).nonzero().flatten() + at)
    wrong = torch.cat(positions)
    if len(wrong) > most:
        return None
    return Cut(_digests(weights), (wrong, master.view(torch.int32)[wrong]))


@torch.no_grad()
def join(master: Tensor, weights: Tensor, low: Tensor, known: Cut) -> int:
    """Fills a master. Returns in how many blocks the weights have changed since it was cut."""
    if isinstance(known.listed, bytes):
        return _core.join_masters(
            master,
            weights.view(torch.int16),
            low,
            known.digests,
            known.listed,
            torch.get_num_threads(),
        )
    for at in range(0, master.numel(), GPU_CHUNK):
        part = slice(at, at + GPU_CHUNK)
        master[part].view(torch.int32).copy_(_joined(weights[part], low[part]))
    positions, bits = known.listed
    master.view(torch.int32)[positions] = bits
    changed = (_digests(weights) != known.digests).nonzero().flatten().tolist()
    for block in changed:
        part = slice(block * _BLOCK, (block + 1) * _BLOCK)
        master[part].copy_(weights[part])
    return len(changed)


def _joined(weights: Tensor, low: Tensor) -> Tensor:
    """The bits of the masters of these weights."""
    lower = low.to(torch.int32) & 0xFFFF
    high = weights.view(torch.int16).to(torch.int32) - (lower > 0x8000).to(torch.int32)
    return (high << 16) | lower


def _digests(weights: Tensor) -> Tensor:
    """A number for each block, of all elements and their places in it."""
    # Odd factors: whatever single word changes, so does the sum.
    factors = torch.arange(1, 2 * _WORDS, 2, dtype=torch.int64, device=weights.device)
    factors = factors * _MIX
    digests = []
    for at in range(0, weights.numel(), GPU_CHUNK):
        part = weights[at : at + GPU_CHUNK].view(torch.int16)
        part = torch.nn.functional.pad(part, (0, -part.numel() % _BLOCK))
        digests.append((part.view(torch.int64).view(-1, _WORDS) * factors).sum(1))
    return torch.cat(digests) if digests else torch.empty(0, dtype=torch.int64)
