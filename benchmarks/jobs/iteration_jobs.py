"""Runs whole iterations of training, for compare.py (see job_lines.py): forward, backward, step.

The first argument chooses the side: tensorferry, torch (all in memory) or deepspeed (ZeRO-3 on
NVMe).
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

import torch
from job_lines import serve
from offload_jobs import DeepSpeed as DeepSpeedSteps
from torch import nn

LAYERS, WIDTH = 48, 2048  # 200 M parameters
WEIGHTS_BYTES = 300_000_000  # of memory for weights, where they are on NVMe
UNTIMED = 2  # iterations before the timed ones

# Of the model whose activations go to the drive: little to multiply, or much.
SHAPES = {"little": (24, 256, 16384), "much": (12, 2048, 2048)}  # layers, width, rows


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    with torch.no_grad():
        linear = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    return nn.Sequential(*linear)


class Tensorferry:
    """States on NVMe, with default settings; weights too if asked."""

    def __init__(self, folder: str) -> None:
        import tensorferry.offload  # noqa: F401  # before the first tensor, as programs do

        self.folder = folder
        self.kind: tuple[str, bool] | None = None
        self.optimizer: Any = None
        self.weights: Any = None
        self.model: Any = None
        self.activations: Any = None
        self.shape = ""  # for which their buffers are

    def iterate(
        self, rows: int, repeat: int, overlap: str = "", stores_weights: bool = False
    ) -> dict[str, float]:
        """Iterations with so many rows of input. What the last one leaves is left by the untimed
        ones too, so that the timed ones do the work of as many."""
        if self.kind != (overlap, stores_weights):
            self.start(overlap, stores_weights)
        batch = torch.ones(rows, WIDTH)
        for _ in range(UNTIMED):
            self.once(batch)
        before = self.moved()
        start = time.perf_counter()
        for _ in range(repeat):
            self.once(batch)
        seconds = (time.perf_counter() - start) / repeat
        moved = (self.moved() - before) / repeat
        return {"repetition_seconds": seconds, "gb_per_second": moved / 1e9 / seconds}

    def start(self, overlap: str, stores_weights: bool) -> None:
        import tensorferry.offload
        import tensorferry.optim

        self.release()
        self.model = layers()
        if stores_weights:
            self.weights = tensorferry.offload.parameters(self.model, self.folder, WEIGHTS_BYTES)
        self.optimizer = tensorferry.optim.AdamW(
            self.model.parameters(), nvme_path=self.folder, overlap=overlap or None
        )
        self.kind = (overlap, stores_weights)
        self.once(torch.ones(1, WIDTH))  # its files grow

    def once(self, batch: torch.Tensor) -> None:
        overlap = "" if self.kind is None else self.kind[0]
        nothing = contextlib.nullcontext()
        # States are read ahead from here; what a step has left must be stepped by then.
        with self.optimizer.last_backward() if overlap == "backward" else nothing:
            loss = self.model(batch).mean()
            with self.optimizer.last_backward() if overlap == "iteration" else nothing:
                loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def moved(self) -> int:
        holders = [one for one in (self.optimizer, self.weights) if one is not None]
        stats = [one.stats() for one in holders]
        return sum(one["read_bytes"] + one["written_bytes"] for one in stats)

    def activate(self, shape: str, repeat: int) -> dict[str, float]:
        """Forward and backward passes with what autograd saves on NVMe."""
        import tensorferry.offload

        if self.shape != shape:
            self.release()
            self.activations = tensorferry.offload.activations(self.folder, saved_bytes(shape) // 4)
            self.shape = shape
        stats = self.activations.stats

        def moved() -> int:
            told = stats()
            return int(told["read_bytes"] + told["written_bytes"])

        return passes(shape, repeat, self.activations, moved)

    def release(self) -> dict[str, float]:
        """Frees the memory and the drive."""
        for one in (self.optimizer, self.weights, self.activations):
            if one is not None:
                one.close()
        self.kind = self.optimizer = self.weights = self.activations = self.model = None
        self.shape = ""
        return {}


def saved_bytes(shape: str) -> int:
    """What autograd saves: the input and the output of each activation function."""
    count, width, rows = SHAPES[shape]
    return 2 * count * rows * width * 4


def passes(shape: str, repeat: int, around: Any, moved: Any) -> dict[str, float]:
    count, width, rows = SHAPES[shape]
    torch.manual_seed(0)
    model = nn.Sequential(
        *(part for _ in range(count) for part in (nn.Linear(width, width), nn.GELU()))
    )
    batch = torch.ones(rows, width)

    def once() -> None:
        with around:
            loss = model(batch).mean()
        loss.backward()
        model.zero_grad()

    once()
    before = moved()
    start = time.perf_counter()
    for _ in range(repeat):
        once()
    seconds = (time.perf_counter() - start) / repeat
    gigabytes = (moved() - before) / repeat / 1e9
    return {"repetition_seconds": seconds, "gb_per_second": gigabytes / seconds}


class Torch:
    """The same with everything in memory."""

    def __init__(self, _folder: str) -> None:
        self.model: Any = None
        self.optimizer: Any = None

    def start(self) -> None:
        if self.model is None:
            self.model = layers()

    def iterate(self, rows: int, repeat: int) -> dict[str, float]:
        self.start()
        if self.optimizer is None:  # the forward pass alone needs none
            self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        batch = torch.ones(rows, WIDTH)
        for number in range(-UNTIMED, repeat):
            if number == 0:
                start = time.perf_counter()
            self.model(batch).mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {"repetition_seconds": (time.perf_counter() - start) / repeat}

    def forward(self, rows: int, repeat: int) -> dict[str, float]:
        """The forward pass alone."""
        self.start()
        batch = torch.ones(rows, WIDTH)
        loss = self.model(batch).mean()
        start = time.perf_counter()
        for _ in range(repeat):
            loss = self.model(batch).mean()
        del loss
        return {"repetition_seconds": (time.perf_counter() - start) / repeat}

    def activate(self, shape: str, repeat: int) -> dict[str, float]:
        return passes(shape, repeat, contextlib.nullcontext(), lambda: 0)

    def release(self) -> dict[str, float]:
        self.model = self.optimizer = None
        return {}


class DeepSpeed(DeepSpeedSteps):
    """ZeRO-3 with optimizer states on NVMe."""

    def model(self) -> nn.Module:
        return layers()

    def iterate(self, rows: int, repeat: int) -> dict[str, float]:
        if self.engine is None:
            self.start()
        batch = torch.ones(rows, WIDTH)
        for number in range(-1, repeat):
            if number == 0:
                start = time.perf_counter()
            self.engine.backward(self.engine(batch).mean())
            self.engine.step()
        return {"repetition_seconds": (time.perf_counter() - start) / repeat}


SIDES = {"tensorferry": Tensorferry, "torch": Torch, "deepspeed": DeepSpeed}

if __name__ == "__main__":
    serve(lambda: SIDES[sys.argv[1]](sys.argv[2]))
