"""Saves in the background from a GPU, for gpu_figures.py: how long the call takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import tensorferry.checkpoint
import tensorferry.safetensors.torch
import torch

from benchmarks.figures.paired import row, timed
from benchmarks.rows.pairs import Target

SIZE, COUNT = 4 << 30, 32


def saving_rows(folder: Path, pairs: int) -> None:
    """A call that returns when tensors may be changed, against copying them over PCIe."""
    each = SIZE // COUNT
    tensors = {
        f"layer.{number}": torch.empty(each, dtype=torch.uint8, device="cuda").random_(0, 256)
        for number in range(COUNT)
    }
    locked = torch.empty(SIZE, dtype=torch.uint8, pin_memory=True)

    def pcie() -> None:
        for place, tensor in zip(locked.split(each), tensors.values()):
            place.copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()

    def call(save: Callable[..., Any], path: Path) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        saving = save(tensors, path, wait=False, stage_bytes=2 * SIZE)
        seconds = time.perf_counter() - begin
        saving.wait()
        return seconds

    for name, save in (
        ("model.pt", tensorferry.checkpoint.save),
        ("model.safetensors", tensorferry.safetensors.torch.save_file),
    ):
        path = folder / name
        print(f"{name}: the first call, which locks memory, takes {call(save, path):.3f} s")
        row(
            f"call of save(wait=False), 4 GiB on the GPU to {name} / PCIe",
            partial(call, save, path),
            partial(timed, pcie),
            pairs,
            Target(1 / 1.2, True),
        )
        path.unlink()
    tensorferry.checkpoint.free_stage()
