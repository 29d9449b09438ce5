"""The tensors of the checkpoints that are measured, here and on a GPU."""

from __future__ import annotations

import random

import torch

MIXED = 2000
MIXED_BYTES = (1 << 10, 4 << 20)  # of 1 GiB in MIXED tensors
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
ROWS = 64


def sizes_of(layout: str, total: int) -> list[int]:
    """Bytes of each tensor: `layout` is a number of equal ones, or "mixed"."""
    if layout != "mixed":
        return [total // int(layout)] * int(layout)
    dice = random.Random(MIXED)
    low, high = MIXED_BYTES
    drawn = [low * (high / low) ** dice.random() for _ in range(MIXED)]
    sizes = [max(512, int(size * total / sum(drawn)) // 512 * 512) for size in drawn]
    sizes[sizes.index(max(sizes))] += total - sum(sizes)
    return sizes


def tensors_of(layout: str, total: int) -> dict[str, torch.Tensor]:
    """Every byte of tensor i is i modulo 251."""
    made = {}
    for index, size in enumerate(sizes_of(layout, total)):
        dtype = DTYPES[index % len(DTYPES)] if layout == "mixed" else torch.bfloat16
        memory = torch.full((ROWS, size // ROWS), index % 251, dtype=torch.uint8)
        made[f"layers.{index:04}.weight"] = memory.view(dtype)
    return made


def check(tensors: dict[str, torch.Tensor]) -> None:
    """Raises if a tensor does not hold what tensors_of() gave it. It looks at both ends."""
    for name, tensor in tensors.items():
        memory = tensor.view(torch.uint8)
        for value in (int(memory[0, 0]), int(memory[-1, -1])):
            if value != int(name.split(".")[1]) % 251:
                raise RuntimeError(f"{name} holds wrong bytes")
