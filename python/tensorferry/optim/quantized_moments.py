"""Moments of Adam in 8 bits.

Each block of 256 elements has a scale in fp32, its element that is furthest from zero. An element
is stored as the code of the number nearest to it, divided by the scale, in a map of 256 numbers:
the dynamic maps of bitsandbytes, the signed one for exp_avg, the one without negative numbers for
exp_avg_sq. Three things are defined here that bitsandbytes leaves open or does otherwise:

- The scale keeps its sign. So the largest element of a block comes back to the bit, and quantizing
  what was dequantized gives the same codes and scales: a checkpoint loses nothing.
- A second moment that is not zero never becomes zero: the step would divide by its root.
- A block with a NaN is NaN, one with an infinity is infinite; one whose elements are all subnormal
  is zero.

python/src/moments.cc does it on the CPU and torch's operations on a GPU, with the same bits.
bitsandbytes itself and torchao are not used: they would bring triton and torch.compile, for a table
and a search, and bitsandbytes' optimizers step only what is on a GPU."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .. import _core
from .masters import GPU_CHUNK

CHOICES = ("fp32", "int8")  # of the forms that moments may have on the drive
# The name of the state, the scales and codes of both: no optimizer calls one of its own so.
PACKED = "moments in 8 bits"
NAMES = ("exp_avg", "exp_avg_sq")

BLOCK = _core.MOMENT_BLOCK
ELEMENT_BYTES = len(NAMES) * (1 + 4 / BLOCK)

_INFINITY = 0x7F800000  # the bits of these numbers
_LEAST_NORMAL = 0x00800000
_LAST_CODE = 255


def packed_bytes(count: int) -> int:
    """Bytes that the moments of so many elements take."""
    return len(NAMES) * (4 * _blocks(count) + count)


@torch.no_grad()
def pack_moments(states: dict[str, Tensor], packed: Tensor | None = None) -> None:
    """Replaces the two moments in `states` by what they are in 8 bits, in the memory `packed` if
    there is some."""
    if packed is None:
        first = states[NAMES[0]]
        packed = first.new_empty(packed_bytes(first.numel()), dtype=torch.uint8)
    for name in NAMES:
        values = states.pop(name).reshape(-1)
        codes, scales = _parts(packed, name, values.numel())
        if values.is_cpu:
            _core.quantize_moment(name, values.contiguous(), codes, scales, torch.get_num_threads())
        else:
            quantize_by_torch(name, values, codes, scales)
    states[PACKED] = packed


@torch.no_grad()
def unpack_moments(packed: Tensor, moments: dict[str, Tensor]) -> None:
    """Fills both moments, in fp32, from what they are in 8 bits."""
    for name, values in moments.items():
        codes, scales = _parts(packed, name, values.numel())
        if values.is_cpu:
            _core.dequantize_moment(name, values, codes, scales, torch.get_num_threads())
        else:
            dequantize_by_torch(name, values, codes, scales)


def quantize_by_torch(name: str, values: Tensor, codes: Tensor, scales: Tensor) -> None:
    """_core.quantize_moment by torch's operations, for elements on any device."""
    for at in range(0, values.numel(), GPU_CHUNK):
        part = values[at : at + GPU_CHUNK]
        block = slice(at // BLOCK, at // BLOCK + _blocks(part.numel()))
        whole = part.numel() // BLOCK * BLOCK
        own = codes[at : at + GPU_CHUNK]
        scales[block][: whole // BLOCK] = _quantize_blocks(name, part[:whole], own[:whole])
        if whole < part.numel():
            rest = torch.nn.functional.pad(part[whole:], (0, -part.numel() % BLOCK))
            coded = torch.empty_like(rest, dtype=torch.uint8)
            scales[block][whole // BLOCK :] = _quantize_blocks(name, rest, coded)
            own[whole:] = coded[: part.numel() - whole]


def dequantize_by_torch(name: str, values: Tensor, codes: Tensor, scales: Tensor) -> None:
    """_core.dequantize_moment by torch's operations, for elements on any device."""
    numbers, _ = _map(name, values.device)
    for at in range(0, values.numel(), GPU_CHUNK):
        part = values[at : at + GPU_CHUNK]
        torch.index_select(numbers, 0, codes[at : at + GPU_CHUNK].int(), out=part)
        own = scales[at // BLOCK : at // BLOCK + _blocks(part.numel())]
        whole = part.numel() // BLOCK * BLOCK
        part[:whole].view(-1, BLOCK).mul_(own[: whole // BLOCK, None])
        part[whole:].mul_(own[whole // BLOCK :])


def _quantize_blocks(name: str, values: Tensor, codes: Tensor) -> Tensor:
    """Fills the codes of whole blocks. Returns their scales."""
    if values.numel() == 0:
        return values
    blocks = values.view(-1, BLOCK)
    scales = _scales(name, blocks.view(torch.int32))
    is_plain = scales.isfinite() & (scales != 0)
    quotients = blocks / torch.where(is_plain, scales, 1)[:, None]
    # All of a block is what its scale is, if that is not a plain number.
    quotients = torch.where(is_plain[:, None], quotients, (scales != 0).float()[:, None])
    _, bounds = _map(name, values.device)
    codes.copy_(torch.bucketize(quotients, bounds, out_int32=True).view(-1))
    return scales


def _scales(name: str, bits: Tensor) -> Tensor:
    """Of each block: its element that is furthest from zero."""
    highest = bits.amax(1)
    magnitude = bits.bitwise_and(0x7FFFFFFF).amax(1)
    is_nan = magnitude > _INFINITY
    if name == "exp_avg_sq":
        magnitude = torch.where(magnitude < _INFINITY, highest.clamp(min=0), magnitude)
    size = torch.where(magnitude < _LEAST_NORMAL, 0, magnitude).view(torch.float32)
    # Not -0.0, as a subnormal element below zero would give.
    signed = torch.where((highest == magnitude) | (size == 0), size, -size)
    return torch.where(is_nan, float("nan"), signed)


@functools.cache
def _map(name: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """(the numbers that codes stand for, the largest number of each code but the last)"""
    numbers, bounds = (
        torch.frombuffer(bytearray(one), dtype=torch.float32) for one in _core.moment_map(name)
    )
    return numbers.to(device), bounds[:_LAST_CODE].to(device)


def _parts(packed: Tensor, name: str, count: int) -> tuple[Tensor, Tensor]:
    """(codes, scales) of a moment. The scales of both come first: they must be aligned."""
    number = NAMES.index(name)
    scale_bytes = 4 * _blocks(count)
    at = len(NAMES) * scale_bytes + number * count
    scales = packed[number * scale_bytes : (number + 1) * scale_bytes]
    return packed[at : at + count], scales.view(torch.float32)


def _blocks(count: int) -> int:
    return -(-count // BLOCK)
