"""Runs jobs about optimizers and weights on NVMe, for compare.py (see job_lines.py).

The first argument chooses the side: tensorferry, torch (all in memory) or deepspeed (ZeRO-3 on
NVMe).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from job_lines import serve

PARAMETERS = 200  # tensors of a million elements each
LAYERS, WIDTH = 24, 3584  # of the model for inference: 1.2 GB in fp32
CACHE_BYTES = 400_000_000
# Untimed steps or passes before the timed ones.
UNTIMED = 2

# How the states are stored: (dtype of the parameters, options).
FORMS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "8 bytes": (torch.float32, {}),
    "8 bytes, half in memory": (torch.float32, {"max_cpu_bytes": "50%"}),
    "8 bytes in memory": (torch.float32, {"max_cpu_bytes": "100%"}),
    "12 bytes": (torch.float16, {}),  # whole masters
    "10 bytes": (torch.bfloat16, {}),
    "4 bytes": (torch.bfloat16, {"moments": "int8"}),
    "4 bytes, half in memory": (torch.bfloat16, {"moments": "int8", "max_cpu_bytes": "50%"}),
    "4 bytes in memory": (torch.bfloat16, {"moments": "int8", "max_cpu_bytes": "100%"}),
}


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.ones(1000, 1000, dtype=dtype)) for _ in range(PARAMETERS)]
    for param in params:
        param.grad = torch.full_like(param, 0.01)
    return params


def layers() -> torch.nn.Sequential:
    torch.manual_seed(0)
    with torch.no_grad():
        return torch.nn.Sequential(
            *(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        )


class Tensorferry:
    """States and weights on NVMe, with default settings."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.optimizer: Any = None
        self.form = ""
        self.model: Any = None

    def step(self, repeat: int, form: str = "8 bytes") -> dict[str, float]:
        """With parameters and states in a form of FORMS."""
        import tensorferry.optim

        if self.optimizer is None or form != self.form:
            self.release()
            dtype, options = FORMS[form]
            self.optimizer = tensorferry.optim.AdamW(
                parameters(dtype), nvme_path=self.folder, **options
            )
            self.form = form
            self.optimizer.step()  # its files grow
        for _ in range(UNTIMED):
            self.optimizer.step()
        before = self.optimizer.stats()
        start = time.perf_counter()
        for _ in range(repeat):
            self.optimizer.step()
        seconds = (time.perf_counter() - start) / repeat
        moved = self.optimizer.stats()["written_bytes"] - before["written_bytes"]
        return {"repetition_seconds": seconds, "gb_per_second": 2 * moved / repeat / 1e9 / seconds}

    def release(self) -> dict[str, float]:
        """Frees the memory and the drive."""
        if self.optimizer is not None:
            self.optimizer.close()
        self.optimizer = None
        return {}

    def infer(self, rows: int, repeat: int) -> dict[str, float]:
        import tensorferry.offload

        if self.model is None:
            self.model = layers()
            self.weights = tensorferry.offload.parameters(
                self.model, self.folder, max_cpu_bytes=CACHE_BYTES
            )
        batch = torch.ones(rows, WIDTH)
        with torch.no_grad():
            for _ in range(UNTIMED):
                self.model(batch)
            before = self.weights.stats()["read_bytes"]
            start = time.perf_counter()
            for _ in range(repeat):
                self.model(batch)
        seconds = (time.perf_counter() - start) / repeat
        moved = (self.weights.stats()["read_bytes"] - before) / repeat
        return {"repetition_seconds": seconds, "gb_per_second": moved / 1e9 / seconds}


class Torch:
    """The same computations with everything in memory. One starts every
    `every` seconds, or later if it takes longer."""

    def __init__(self, _folder: str) -> None:
        self.optimizer: Any = None
        self.model: Any = None

    def step(self, repeat: int, every: float = 0) -> dict[str, float]:
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(parameters(), fused=True)
            for _ in range(UNTIMED):
                self.optimizer.step()
        return self.paced(self.optimizer.step, repeat, every)

    def infer(self, rows: int, repeat: int, every: float = 0) -> dict[str, float]:
        if self.model is None:
            self.model = layers()
        batch = torch.ones(rows, WIDTH)
        with torch.no_grad():
            self.model(batch)
            return self.paced(lambda: self.model(batch), repeat, every)

    def release(self) -> dict[str, float]:
        """Frees the memory: with that of the other processes it is too much."""
        self.optimizer = self.model = None
        return {}

    def paced(self, compute: Callable[[], Any], repeat: int, every: float) -> dict[str, float]:
        start = time.perf_counter()
        for number in range(1, repeat + 1):
            compute()
            time.sleep(max(0.0, start + number * every - time.perf_counter()))
        return {"repetition_seconds": (time.perf_counter() - start) / repeat}


class DeepSpeed:
    """ZeRO-3 with optimizer states on NVMe, with its own op and one rank. Its default settings take
    a tenth longer than these."""

    def __init__(self, folder: str) -> None:
        os.environ |= {
            "DS_ACCELERATOR": "cpu",
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29555",
        }
        self.folder = folder
        self.engine: Any = None

    def start(self) -> None:
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": 20_000_000,
                "offload_optimizer": {
                    "device": "nvme",
                    "nvme_path": self.folder,
                    "pin_memory": True,
                    "buffer_count": 12,
                    "pipeline_read": True,
                    "pipeline_write": True,
                },
            },
            "aio": {"queue_depth": 128, "block_size": 256 << 10, "overlap_events": True},
        }
        model = self.model()
        deepspeed.init_distributed("gloo")
        self.engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )

    def model(self) -> torch.nn.Module:
        return torch.nn.Sequential(
            *(torch.nn.Linear(1000, 1000, bias=False) for _ in range(PARAMETERS))
        )

    def step(self, repeat: int) -> dict[str, float]:
        if self.engine is None:
            self.start()
        seconds = 0.0
        for number in range(-UNTIMED, repeat):
            self.engine.backward(self.engine(torch.ones(1, 1000)).mean())
            start = time.perf_counter()
            self.engine.step()
            seconds += time.perf_counter() - start if number >= 0 else 0.0
        return {"repetition_seconds": seconds / repeat}


SIDES = {"tensorferry": Tensorferry, "torch": Torch, "deepspeed": DeepSpeed}

if __name__ == "__main__":
    serve(lambda: SIDES[sys.argv[1]](sys.argv[2]))
