"""Saves and loads checkpoints as one peer does, or as we do, for compare.py (see job_lines.py).

The first argument names the side, in whose environment this runs, the second a folder. All sides
load the same files, which we write.

A save ends when the bytes are on the drive. A load starts with a cold page cache and ends when
every page of every tensor was touched. The time of touching pages that are already in memory is
subtracted, whoever loads.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from checkpoint_tensors import ROWS, check, tensors_of
from job_lines import serve
from peer_jobs import drop_from_cache, fsync, touch


class Ours:
    """tensorferry.safetensors and tensorferry.checkpoint; the name of a file says which."""

    def __init__(self) -> None:
        import tensorferry.checkpoint
        import tensorferry.safetensors.torch
        from torch.utils.serialization import config

        self.checkpoint = tensorferry.checkpoint
        self.safetensors = tensorferry.safetensors
        self.config = config

    def save(self, path: str, tensors: dict[str, torch.Tensor], checksums: bool) -> None:
        if path.endswith(".safetensors"):
            self.safetensors.torch.save_file(tensors, path, checksums=checksums)
            return
        self.config.save.compute_crc32 = checksums
        self.checkpoint.save(tensors, path)

    @contextlib.contextmanager
    def load(self, path: str, verify: bool, one_by_one: bool) -> Iterator[dict[str, torch.Tensor]]:
        if not path.endswith(".safetensors"):
            yield self.checkpoint.load(path, verify=verify)
        elif one_by_one:
            with self.safetensors.safe_open(path, framework="pt", verify=verify) as file:
                yield {name: file.get_tensor(name) for name in file.offset_keys()}
        else:
            yield self.safetensors.torch.load_file(path, verify=verify)

    def every_second(self, path: str) -> dict[str, torch.Tensor]:
        with self.safetensors.safe_open(path, framework="pt") as file:
            return file.get_tensors(file.offset_keys()[::2])

    def half_the_rows(self, path: str) -> dict[str, torch.Tensor]:
        with self.safetensors.safe_open(path, framework="pt") as file:
            return file.get_slices({name: slice(ROWS // 2) for name in file.offset_keys()})


class Torch:
    """torch.save and torch.load(mmap=True)."""

    def save(self, path: str, tensors: dict[str, torch.Tensor], _checksums: bool) -> None:
        torch.save(tensors, path)
        fsync(path)

    @contextlib.contextmanager
    def load(self, path: str, _verify: bool, _one: bool) -> Iterator[dict[str, torch.Tensor]]:
        yield torch.load(path, mmap=True, weights_only=True)


class Safetensors:
    def __init__(self) -> None:
        import safetensors.torch

        self.safetensors = safetensors

    def save(self, path: str, tensors: dict[str, torch.Tensor], _checksums: bool) -> None:
        self.safetensors.torch.save_file(tensors, path)
        fsync(path)

    @contextlib.contextmanager
    def load(self, path: str, _verify: bool, one: bool) -> Iterator[dict[str, torch.Tensor]]:
        if not one:
            yield self.safetensors.torch.load_file(path)
            return
        with self.safetensors.safe_open(path, framework="pt") as file:
            yield {name: file.get_tensor(name) for name in file.offset_keys()}


class Fastsafetensors:
    def __init__(self) -> None:
        import fastsafetensors

        self.open = fastsafetensors.fastsafe_open

    @contextlib.contextmanager
    def load(self, path: str, _verify: bool, _one: bool) -> Iterator[dict[str, torch.Tensor]]:
        with self.open(filenames=[path], nogds=True, device="cpu") as file:
            yield {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


class RunaiModelStreamer:
    def __init__(self) -> None:
        import runai_model_streamer

        self.streamer = runai_model_streamer.SafetensorsStreamer

    @contextlib.contextmanager
    def load(self, path: str, _verify: bool, _one: bool) -> Iterator[dict[str, torch.Tensor]]:
        with self.streamer() as streamer:
            streamer.stream_file(path)
            yield dict(streamer.get_tensors())


SIDES: dict[str, Any] = {
    "tensorferry": Ours,
    "torch": Torch,
    "safetensors": Safetensors,
    "fastsafetensors": Fastsafetensors,
    "runai-model-streamer": RunaiModelStreamer,
}


def drive_bytes() -> int:
    """How many bytes this process has made drives read."""
    with open("/proc/self/io") as counts:
        return next(int(line.split()[1]) for line in counts if line.startswith("read_bytes"))


# Free memory goes back to the host of a virtual machine 2 s after somebody freed some.
REPORTING = "/sys/module/page_reporting"
REPORTING_SECONDS = 2.2


def settle_memory(size: int) -> None:
    """Touches this much memory and frees it, so that a virtual machine has it from its host. Who
    comes first would pay for that otherwise: 1.5 s of CPU time for 1 GiB, instead of 0.1 s.

    Holds it until what others have freed has gone to the host: what is freed here stays for the
    next 2 s."""
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, size, mmap.PAGESIZE):
            memory[at] = 1
        if os.path.exists(REPORTING):
            time.sleep(REPORTING_SECONDS)


def cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system


class Jobs:
    def __init__(self, side: str, folder: str) -> None:
        self.side = SIDES[side]()
        self.name = side
        self.folder = folder

    def file(self, form: str, layout: str, size: int) -> dict[str, str]:
        """The file with `size` bytes in tensors, made if it is not there; `form` is "safetensors"
        (with checksums) or "pt"."""
        path = os.path.join(self.folder, f"{layout}-{size}.{form}")
        if not os.path.exists(path):
            Ours().save(path, tensors_of(layout, size), True)
        return {"path": path}

    def save(self, form: str, layout: str, size: int, checksums: bool = True) -> dict[str, float]:
        """Saves to a new file: overwriting would be another measurement."""
        path = os.path.join(self.folder, f"new-{self.name}.{form}")
        tensors = tensors_of(layout, size)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os.sync()
        settle_memory(size)
        cpu, start = cpu_seconds(), time.perf_counter()
        self.side.save(path, tensors, checksums)
        seconds = time.perf_counter() - start
        cpu = cpu_seconds() - cpu
        os.unlink(path)
        return measured(size, seconds, cpu)

    def load(
        self, form: str, layout: str, size: int, verify: bool = False, one_by_one: bool = False
    ) -> dict[str, float]:
        path = self.file(form, layout, size)["path"]
        drop_from_cache(path)
        settle_memory(size)
        cpu, start = cpu_seconds(), time.perf_counter()
        with self.side.load(path, verify, one_by_one) as tensors:
            touch(tensors.values())
            loaded, cpu_loaded = time.perf_counter(), cpu_seconds()
            touch(tensors.values())
            seconds = 2 * loaded - start - time.perf_counter()
            cpu = 2 * cpu_loaded - cpu - cpu_seconds()
            check(tensors)
        return measured(size, seconds, cpu)

    def part(self, what: str, layout: str, size: int) -> dict[str, float]:
        """Loads every_second tensor of a file, or half_the_rows of each; the speed is that of the
        bytes that were asked for."""
        path = self.file("safetensors", layout, size)["path"]
        drop_from_cache(path)
        settle_memory(size)
        before, cpu, start = drive_bytes(), cpu_seconds(), time.perf_counter()
        tensors = getattr(self.side, what)(path)
        seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu
        moved = drive_bytes() - before
        check(tensors)
        asked = sum(tensor.nbytes for tensor in tensors.values())
        return measured(asked, seconds, cpu) | {"read_bytes": moved, "asked_bytes": asked}


def measured(size: int, seconds: float, cpu: float) -> dict[str, float]:
    gigabytes = size / 1e9
    return {
        "repetition_seconds": seconds,
        "gb_per_second": gigabytes / seconds,
        "cpu_seconds_per_gb": cpu / gigabytes,
    }


if __name__ == "__main__":
    serve(lambda: Jobs(sys.argv[1], sys.argv[2]))
