"""Models of transformers on a GPU, from checkpoints larger than the memory that they get: a section
of gpu_figures.py."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import tensorferry.safetensors
import tensorferry.transformers
import torch

from benchmarks.figures.paired import row, timed
from benchmarks.rows.pairs import Target

PASSES = 4
PAST = 65536  # tokens, of the model with the long prompt: 8.6 GB of keys and values
WHOLE = 1.3  # of keys and values in memory: all of them, with room to grow


def model_config(layers: int = 19, **options: Any) -> Any:
    """A Llama of 8.3 GB in bf16."""
    import transformers

    return transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        **options,
    )


def made(config: Any) -> Any:
    import transformers

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return transformers.LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def uncache(folder: Path) -> None:
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def ring_seconds(program: Path, path: Path, nbytes: float) -> float:
    """How long io_uring with fixed buffers takes to read so many bytes."""
    size = path.stat().st_size >> 20 << 20
    command = [str(program), "read", str(path), str(size), str(1 << 20), "32"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout) * nbytes / size


def model_rows(folder: Path, program: Path, pairs: int) -> None:
    try:
        import transformers
    except ImportError as error:
        print(f"no rows about models: {error}")
        return
    torch.set_grad_enabled(False)
    place = folder / "model"
    made(model_config()).save_pretrained(place, max_shard_size="100GB")
    file = place / "model.safetensors"
    word = torch.ones(1, 1, dtype=torch.long, device="cuda")

    def load() -> None:
        uncache(place)
        tensorferry.safetensors.enable()
        try:
            transformers.LlamaForCausalLM.from_pretrained(place, device_map={"": 0}, dtype="auto")
            torch.cuda.synchronize()
        finally:
            tensorferry.safetensors.disable()

    whole = file.stat().st_size
    row(
        f"from_pretrained, enable(), {whole / 1e9:.1f} GB, cold, GPU / raw io_uring",
        lambda: timed(load),
        lambda: ring_seconds(program, file, whole),
        pairs,
        Target(0.80, True),
    )
    model = tensorferry.transformers.from_pretrained(place, device="cuda", max_gpu_bytes=whole // 4)
    weights = tensorferry.transformers.weights_of(model)
    moved: dict[str, float] = {}

    def forward() -> float:
        model(word, use_cache=False)
        before = weights.stats()["read_bytes"]
        seconds = timed(lambda: _repeat(lambda: model(word, use_cache=False)))
        moved["pass"] = (weights.stats()["read_bytes"] - before) / PASSES
        return seconds / PASSES

    forward()
    row(
        "one token, weights 4x the memory of the GPU / raw io_uring",
        forward,
        lambda: ring_seconds(program, file, moved["pass"]),
        pairs,
        Target(1 / 1.10, True),
    )
    weights.close()
    _cache_row(folder, program, file, pairs)


def _cache_row(folder: Path, program: Path, file: Path, pairs: int) -> None:
    """Tokens after a long prompt, half of it on the drive."""
    config = model_config(layers=32, max_position_embeddings=2 * PAST)
    config.intermediate_size = 1024
    model = made(config)
    total = 32 * 2 * PAST * 1024 * 2
    moved: dict[float, float] = {}
    word = torch.ones(1, 1, dtype=torch.long, device="cuda")

    def generate(share: float) -> float:
        with tensorferry.transformers.NvmeCache(config, folder, int(total * share)) as cache:
            for layer in range(config.num_hidden_layers):
                size = (2, 1, 8, PAST, 128)
                states = torch.randn(size, device="cuda", dtype=torch.bfloat16)
                cache.update(states[0], states[1], layer)
            _repeat(lambda: model(word, past_key_values=cache))
            before = cache.stats()["read_bytes"]
            seconds = timed(lambda: _repeat(lambda: model(word, past_key_values=cache)))
            moved[share] = (cache.stats()["read_bytes"] - before) / PASSES
        return seconds / PASSES

    def limit() -> float:
        return max(ring_seconds(program, file, moved[0.5]), generate(WHOLE))

    generate(0.5)
    row(
        "one token, half of 8.6 GB of keys and values on NVMe / drive or GPU",
        lambda: generate(0.5),
        limit,
        pairs,
        Target(1 / 1.10, True),
    )


def _repeat(compute: Any) -> None:
    for _ in range(PASSES):
        compute()
    torch.cuda.synchronize()
