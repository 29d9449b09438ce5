#!/usr/bin/env python3
"""What moments in 8 bits cost a model that learns: `make moments-figures`, ten minutes.

Trains a small language model twice on the bytes of this repository's documents, with the same
beginning and the same batches: with moments in fp32 and in 8 bits. Prints the loss of both at the
end, the mean of 100 batches that neither has seen, and their ratio. Then it says how fast moments
become 8 bits and back.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from pathlib import Path

import tensorferry.optim
import torch
from tensorferry.optim.quantized_moments import NAMES, PACKED, pack_moments, unpack_moments
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
WIDTH, HEADS, LAYERS, LENGTH, BATCH = 96, 4, 3, 128, 16
EVALUATED = 100  # batches
WARM_UP = 100  # steps
RATE = 2e-3
TARGET = 0.01  # the share by which the losses may differ
ELEMENTS = 1 << 24  # whose speed is told


class Block(nn.Module):
    """Attention to what came before, then a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        mixed = self.mixed(self.norms[0](x)).view(rows, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.perceptron(self.norms[1](x))


class Bytes(nn.Module):
    """Tells the next byte from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(text) + self.places))


def documents() -> tuple[Tensor, Tensor]:
    """(bytes to learn from, bytes to be asked about)"""
    paths = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.cc")])
    text = torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in paths)), dtype=torch.uint8)
    learned = text.numel() * 9 // 10
    return text[:learned].long(), text[learned:].long()


def loss_of(model: nn.Module, text: Tensor, generator: torch.Generator) -> Tensor:
    starts = torch.randint(text.numel() - LENGTH - 1, (BATCH, 1), generator=generator)
    part = text[starts + torch.arange(LENGTH + 1)]
    told = model(part[:, :-1])
    return nn.functional.cross_entropy(told.flatten(0, 1), part[:, 1:].flatten())


def rate_at(step: int, steps: int) -> float:
    """The share of the learning rate: it rises for a while, then falls to a tenth."""
    fallen = 0.55 + 0.45 * math.cos(math.pi * step / steps)
    return min((step + 1) / WARM_UP, 1.0) * fallen


def trained(moments: str, steps: int, folder: Path) -> float:
    """The loss of a model at its end. Prints how it came there."""
    torch.manual_seed(0)
    model = Bytes()
    learned, asked = documents()
    optimizer = tensorferry.optim.AdamW(
        model.parameters(), lr=RATE, nvme_path=folder, moments=moments
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: rate_at(at, steps))
    generator = torch.Generator().manual_seed(1)
    begin = time.monotonic()
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss = loss_of(model, learned, generator)
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % (steps // 10 or 1) == 0:
            took = time.monotonic() - begin
            print(f"  {moments}: step {step:5}, loss {loss.item():.4f}, {took:.0f} s", flush=True)
    moved = optimizer.stats()["written_bytes_per_parameter"]
    optimizer.close()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        losses = [loss_of(model, asked, generator).item() for _ in range(EVALUATED)]
    mean = sum(losses) / EVALUATED
    count = sum(param.numel() for param in model.parameters())
    print(
        f"{moments}: {count} parameters, {steps} steps, {moved:.2f} bytes per parameter and way: "
        f"loss {mean:.4f}",
        flush=True,
    )
    return mean


def print_speeds() -> None:
    """Elements per second of both moments together, by as many threads as torch has."""
    whole = {name: torch.rand(ELEMENTS) ** 4 for name in NAMES}
    states = dict(whole)
    pack_moments(states)
    packed = states[PACKED]
    for words, work in (
        ("to 8 bits", lambda: pack_moments(dict(whole), packed)),
        ("back to fp32", lambda: unpack_moments(packed, whole)),
    ):
        best = math.inf
        for _ in range(10):
            begin = time.perf_counter()
            work()
            best = min(best, time.perf_counter() - begin)
        speed = len(NAMES) * ELEMENTS / best / 1e9
        print(f"{words}: {speed:.2f} G elements/s, {torch.get_num_threads()} threads")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path("build"), help="where the states go")
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    print_speeds()
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        losses = {
            moments: trained(moments, options.steps, Path(name)) for moments in ("fp32", "int8")
        }
    ratio = losses["int8"] / losses["fp32"]
    verdict = "holds" if abs(ratio - 1) <= TARGET else "misses"
    print(f"loss with moments in 8 bits / in fp32: {ratio:.4f} (within {TARGET:.0%}: {verdict})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
