"""Runs jobs on a model of transformers in a checkpoint, for compare.py (see job_lines.py).

The first argument chooses the side: tensorferry (from its files, or with keys and values on NVMe),
transformers (all in memory) or accelerate (its disk_offload).
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from job_lines import serve

# 1.1 GB in fp32, of which the layers are nearly all.
MODEL = dict(
    vocab_size=1000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=22,
    num_attention_heads=8, num_key_value_heads=8,
)  # fmt: skip
SHARE = 4  # of the weights in memory, one in so many
# The model with the long prompt: 1.07 GB of keys and values.
PAST = 16384
LONG = dict(
    vocab_size=1000, hidden_size=512, intermediate_size=1024, num_hidden_layers=16,
    num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=2 * PAST,
)  # fmt: skip
PAST_BYTES = 16 * 2 * PAST * 512 * 4
UNTIMED = 2


def resident_bytes() -> int:
    """Without pages of files: those of libraries come and go."""
    with open("/proc/self/status") as status:
        found = dict(line.split(":", 1) for line in status)
    return sum(int(found[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


def uncache(folder: Path) -> None:
    """Takes files out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def timed(compute: Callable[[], object], repeat: int, untimed: int = UNTIMED) -> float:
    for _ in range(untimed):
        compute()
    start = time.perf_counter()
    for _ in range(repeat):
        compute()
    return (time.perf_counter() - start) / max(repeat, 1)


class Model:
    """What all sides share: the checkpoint, and how often a pass is repeated."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder) / "model"
        self.model: Any = None
        self.kind = transformers.LlamaForCausalLM  # imports what it needs
        torch.set_grad_enabled(False)

    def checkpoint(self) -> dict[str, float]:
        """Writes the checkpoint, if it is not there. Its bytes are `memory_bytes`."""
        if not (self.folder / "model.safetensors").exists():
            torch.manual_seed(0)
            model = self.kind(transformers.LlamaConfig(**MODEL))
            model.save_pretrained(self.folder, max_shard_size="8GB")
        return {"memory_bytes": (self.folder / "model.safetensors").stat().st_size}

    def load(self, memory: int) -> Any:
        raise NotImplementedError

    def forward(self, tokens: int, repeat: int) -> dict[str, float]:
        """Passes over the model, with a quarter of its weights in memory where they can be
        elsewhere."""
        size = int(self.checkpoint()["memory_bytes"])
        if self.model is None:
            self.before = resident_bytes()
            self.model = self.load(size // SHARE)
        words = torch.ones(1, tokens, dtype=torch.long)
        moved = self.moved()
        passes = repeat + UNTIMED
        seconds = timed(lambda: self.model(words, use_cache=False), repeat)
        read = (self.moved() - moved) / passes
        return {
            "repetition_seconds": seconds,
            "gb_per_second": read / 1e9 / seconds if repeat else 0.0,
            "memory_bytes": resident_bytes() - self.before,
        }

    def moved(self) -> float:
        return 0.0

    def first_token(self) -> dict[str, float]:
        """From cold files to the first token, with room for the whole model."""
        size = int(self.checkpoint()["memory_bytes"])
        self.release()
        uncache(self.folder)
        start = time.perf_counter()
        model = self.load(2 * size)
        model(torch.ones(1, 1, dtype=torch.long), use_cache=False)
        seconds = time.perf_counter() - start
        self.model = model
        self.release()
        return {"repetition_seconds": seconds}

    def release(self) -> dict[str, float]:
        self.model = None
        gc.collect()
        return {}


class Tensorferry(Model):
    """From the files, as they lie."""

    def __init__(self, folder: str) -> None:
        import tensorferry.transformers

        super().__init__(folder)
        self.ferry = tensorferry.transformers

    def load(self, memory: int) -> Any:
        return self.ferry.from_pretrained(self.folder, memory)

    def moved(self) -> float:
        return float(self.ferry.weights_of(self.model).stats()["read_bytes"])

    def release(self) -> dict[str, float]:
        if self.model is not None:
            self.ferry.weights_of(self.model).close()
        return super().release()

    def generate(self, share: float, repeat: int) -> dict[str, float]:
        """Tokens after a long prompt, with this share of its keys and values in memory."""
        config = transformers.LlamaConfig(**LONG)
        torch.manual_seed(0)
        model = self.kind(config).eval()
        limit = int(PAST_BYTES * share)
        made = self.ferry.NvmeCache(config, self.folder.parent, limit)
        with contextlib.closing(made) as cache:
            for layer in range(config.num_hidden_layers):
                states = torch.randn(2, 1, 8, PAST, 64)
                cache.update(states[0], states[1], layer)
            word = torch.ones(1, 1, dtype=torch.long)
            before = cache.stats()["read_bytes"]
            seconds = timed(lambda: model(word, past_key_values=cache), repeat)
            moved = (cache.stats()["read_bytes"] - before) / (repeat + UNTIMED)
            memory = cache.stats()["resident_bytes"]
        return {
            "repetition_seconds": seconds,
            "gb_per_second": moved / 1e9 / seconds,
            "memory_bytes": memory,
        }


class InMemory(Model):
    """transformers alone."""

    def load(self, memory: int) -> Any:
        return self.kind.from_pretrained(self.folder)


class Accelerate(Model):
    """accelerate's disk_offload, which writes the weights to files of its own."""

    def load(self, memory: int) -> Any:
        import accelerate

        model = self.kind.from_pretrained(self.folder)
        self.files = self.folder.parent / "accelerate"
        accelerate.disk_offload(model, self.files, execution_device="cpu")
        uncache(self.files)  # nothing of it is written while others are measured
        return model

    def forward(self, tokens: int, repeat: int, cold: bool = False) -> dict[str, float]:
        found = super().forward(tokens, 0)
        words = torch.ones(1, tokens, dtype=torch.long)
        total = 0.0
        for _ in range(repeat):
            if cold:
                uncache(self.files)
            start = time.perf_counter()
            self.model(words, use_cache=False)
            total += time.perf_counter() - start
        return found | {"repetition_seconds": total / repeat}


SIDES = {"tensorferry": Tensorferry, "transformers": InMemory, "accelerate": Accelerate}

if __name__ == "__main__":
    serve(lambda: SIDES[sys.argv[1]](sys.argv[2]))
