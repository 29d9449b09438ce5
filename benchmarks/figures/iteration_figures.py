"""Whole iterations of training a GPT on a GPU, states on the drive: the section "iteration" of
`make gpu-figures`.

- `overlap="iteration"` and `"backward"` against the slower of the computation alone (all in the
  memory of the GPU) and the drive alone (raw io_uring, reads and writes at once), with so many
  tokens that both take about as long; with a quarter of them, and with twice as many;
- the same with weights on the drive too;
- against no overlap;
- with what autograd saves on the drive, against the memory of the GPU.
DeepSpeed's ZeRO-3 with NVMe needs its op, which must be compiled: run it where that is possible,
by `make compare ARGS="--rows ZeRO-3"`.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import tensorferry
import tensorferry.offload
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.figures.paired import row, timed
from benchmarks.rows.pairs import Target

WIDTH, LAYERS, HEADS, VOCABULARY, LENGTH = 2048, 16, 16, 8192, 1024  # 0.84 billion parameters
PIECE = 8  # sequences whose loss is computed at a time
TOO_MANY = 512  # sequences: more do not fit


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count, length, _ = x.shape
        parts = self.attention(self.first(x)).view(count, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(count, length, WIDTH))
        hidden: torch.Tensor = self.wide(self.second(x))
        return x + self.narrow(nn.functional.gelu(hidden))


class Gpt(nn.Module):
    """Keeps only the input of each block for the backward pass, unless `keeps`."""

    def __init__(self, keeps: bool = False) -> None:
        super().__init__()
        self.keeps = keeps
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(LENGTH, device=tokens.device))
        for block in self.blocks:
            x = block(x) if self.keeps else checkpoint(block, x, use_reentrant=False)
        x = self.norm(x)
        pieces = [
            self.loss(part, own) if self.keeps else checkpoint(
                self.loss, part, own, use_reentrant=False)
            for part, own in zip(x.split(PIECE), tokens.split(PIECE), strict=True)
        ]  # fmt: skip
        return torch.stack(pieces).mean()

    def loss(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(x[:, :-1]).flatten(0, 1)
        return nn.functional.cross_entropy(logits.float(), tokens[:, 1:].flatten())


def made(keeps: bool = False) -> Gpt:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return Gpt(keeps).to(torch.bfloat16)


def batch_of(sequences: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (sequences, LENGTH), device="cuda")


class Training:
    """A model and an optimizer that are iterated. `seconds` is for one iteration of three, which
    begin and end with as much left to step."""

    def __init__(
        self, folder: Path, overlap: str | None, weights_bytes: int = 0, **options: Any
    ) -> None:
        self.model = made()
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.weights: Any = None
        if weights_bytes > 0:
            self.weights = tensorferry.offload.parameters(
                self.model, folder, weights_bytes, max_gpu_bytes=weights_bytes
            )
        self.optimizer = tensorferry.optim.AdamW(
            self.model.parameters(), 1e-4, nvme_path=folder, overlap=overlap, **options
        )
        self.overlap = overlap

    def once(self, batch: torch.Tensor) -> None:
        nothing = contextlib.nullcontext()
        # States are read ahead from here; what a step has left must be stepped by then.
        with self.optimizer.last_backward() if self.overlap == "backward" else nothing:
            loss = self.model(batch)
            with self.optimizer.last_backward() if self.overlap == "iteration" else nothing:
                loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def seconds(self, batch: torch.Tensor, count: int = 3) -> float:
        self.once(batch)
        torch.cuda.synchronize()

        def work() -> None:
            for _ in range(count):
                self.once(batch)
            torch.cuda.synchronize()

        return timed(work) / count

    def moved(self) -> tuple[int, int]:
        """Bytes read and written so far."""
        holders = [one.stats() for one in (self.optimizer, self.weights) if one is not None]
        read = sum(one["read_bytes"] for one in holders)
        return read, sum(one["written_bytes"] for one in holders)

    def end(self) -> None:
        self.optimizer.close()
        if self.weights is not None:
            self.weights.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        torch.cuda.empty_cache()


def iteration_rows(folder: Path, raw_ring: Callable[[str, Path, int], float], pairs: int) -> None:
    """`raw_ring(verb, path, bytes)` moves bytes and returns the seconds."""
    alone = Training(folder / "alone", None, max_gpu_bytes="100%")
    count = sum(param.numel() for param in alone.model.parameters())
    files = {"read": folder / "read.bin", "write": folder / "write.bin"}

    def drive(read: int, written: int) -> float:
        sizes = {"read": read, "write": written}
        with ThreadPoolExecutor(2) as pool:
            return max(pool.map(lambda way: raw_ring(way, files[way], sizes[way]), files))

    late = Training(folder / "late", "iteration")
    late.seconds(batch_of(8))
    before = late.moved()
    late.seconds(batch_of(8), count=2)
    read, written = ((now - then) // 3 // (1 << 20) << 20
                     for now, then in zip(late.moved(), before, strict=True))  # fmt: skip
    for path in files.values():
        raw_ring("write", path, 2 * max(read, written))
    took = drive(read, written)
    each = alone.seconds(batch_of(32)) / 32
    balanced = min(max(int(took / each) // PIECE * PIECE, PIECE), TOO_MANY)
    print(f"{count / 1e9:.2f} billion parameters, {read / 1e9:.2f} GB read and "
          f"{written / 1e9:.2f} GB written in an iteration: {took:.2f} s; one sequence of {LENGTH} "
          f"tokens: {each:.4f} s; balanced with {balanced} sequences")  # fmt: skip

    def limit(batch: torch.Tensor) -> Callable[[], float]:
        return lambda: max(drive(read, written), alone.seconds(batch))

    for words, share, least in (
        ("", 1.0, 1.10), (", the drive is the limit", 0.25, 1.05), (", the GPU is", 2.0, 1.05)
    ):  # fmt: skip
        size = min(max(int(balanced * share) // PIECE * PIECE, PIECE), TOO_MANY)
        batch = batch_of(size)
        row(
            f'iteration, overlap="iteration"{words} / drive or GPU',
            partial(late.seconds, batch),
            limit(batch),
            pairs,
            Target(1 / least, True),
        )
    batch = batch_of(balanced)
    for overlap in ("backward", None):
        other = Training(folder / "other", overlap)
        row(
            f'iteration, overlap="iteration" / overlap={overlap!r}',
            partial(late.seconds, batch),
            partial(other.seconds, batch),
            pairs,
            None,
        )
        if overlap is not None:
            row(
                'iteration, overlap="backward" / drive or GPU',
                partial(other.seconds, batch),
                limit(batch),
                pairs,
                None,
            )
        other.end()
    late.end()
    stored_row(folder, drive, alone, batch, pairs)
    alone.end()
    for path in files.values():
        path.unlink()
    activation_row(folder, pairs)


def stored_row(
    folder: Path,
    drive: Callable[[int, int], float],
    alone: Training,
    batch: torch.Tensor,
    pairs: int,
) -> None:
    """Weights on the drive too, a third of them in the memory of the GPU at a time."""
    third = sum(param.nbytes for param in alone.model.parameters()) // 3
    stored = Training(folder / "stored", "iteration", weights_bytes=third)
    stored.seconds(batch)
    before = stored.moved()
    stored.seconds(batch, count=2)
    moved = [(now - then) // 3 // (1 << 20) << 20
             for now, then in zip(stored.moved(), before, strict=True)]  # fmt: skip
    row(
        "iteration, states and weights on NVMe / drive or GPU",
        partial(stored.seconds, batch),
        lambda: max(drive(*moved), alone.seconds(batch)),
        pairs,
        Target(1 / 1.15, True),
    )
    stored.end()


def activation_row(folder: Path, pairs: int) -> None:
    """Forward and backward without checkpointing, what autograd saves on the drive."""
    model, batch = made(keeps=True), batch_of(16)

    def passes(around: contextlib.AbstractContextManager[Any]) -> float:
        def once() -> None:
            with around:
                loss = model(batch)
            loss.backward()
            model.zero_grad()
            torch.cuda.synchronize()

        return timed(once)

    activations = tensorferry.offload.activations(folder, 8 << 30)
    row(
        "forward and backward, saved activations on NVMe / on the GPU",
        lambda: passes(activations),
        lambda: passes(contextlib.nullcontext()),
        pairs,
        None,
    )
    print(f"saved: {activations.stats()['saved_bytes'] / 1e9:.1f} GB in all passes")
    activations.close()
