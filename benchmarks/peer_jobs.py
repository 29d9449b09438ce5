"""Saves and loads tensors as one peer does, or as we do: one process, many jobs.

The first argument says who. A job is a line of JSON on standard input; what it measured is a line
of JSON on standard output. Used by compare.py, in the environment of the peer.

A save ends when the bytes are on the drive (fsync). A load starts with a cold page cache and ends
when every byte is in memory: where the peer only maps the file, every page is touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import time
from typing import Any

import numpy as np
from job_lines import serve

with contextlib.suppress(ImportError):  # NumPy and kvikio have no torch beside them
    import torch

PAGE_BYTES = 4096


def touch(tensors: Any) -> None:
    """What is only mapped has to come from the drive, too."""
    for tensor in tensors:
        tensor.view(torch.uint8).flatten()[::PAGE_BYTES].sum()


def fsync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def drop_from_cache(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


class Tensorferry:
    """Into ordinary tensors that are made for it, with one handle and the default settings."""

    def __init__(self, _path: str) -> None:
        import tensorferry

        self.ferry = tensorferry
        self.handle = tensorferry.Handle()

    def save(self, path: str, tensors: list[Any]) -> None:
        with self.ferry.File(path, "write") as file:
            at, transfers = 0, []
            for tensor in tensors:
                transfers.append((tensor, file, at))
                at += tensor.nbytes
            self.handle.write_many(transfers).wait()
            self.handle.sync(file, "full").wait()

    def load(self, path: str, sizes: list[int]) -> None:
        with self.ferry.File(path) as file:
            at, transfers = 0, []
            for size in sizes:
                transfers.append((torch.empty(size, dtype=torch.uint8), file, at))
                at += size
            self.handle.read_many(transfers).wait()


class Torch:
    """torch.save and torch.load."""

    mmap = False

    def __init__(self, _path: str) -> None:
        pass

    def save(self, path: str, tensors: list[Any]) -> None:
        torch.save({str(i): tensor for i, tensor in enumerate(tensors)}, path)
        fsync(path)

    def load(self, path: str, _sizes: list[int]) -> None:
        loaded = torch.load(path, mmap=self.mmap, weights_only=True)
        if self.mmap:
            touch(loaded.values())


class TorchMmap(Torch):
    mmap = True


class NumPy:
    """ndarray.tofile and numpy.fromfile."""

    def __init__(self, _path: str) -> None:
        pass

    def save(self, path: str, tensors: list[Any]) -> None:
        with open(path, "wb") as file:
            for tensor in tensors:
                tensor.tofile(file)
        fsync(path)

    def load(self, path: str, sizes: list[int]) -> None:
        with open(path, "rb") as file:
            for size in sizes:
                np.fromfile(file, dtype=np.uint8, count=size)


class Safetensors:
    def __init__(self, _path: str) -> None:
        import safetensors.torch

        self.safetensors = safetensors.torch

    def save(self, path: str, tensors: list[Any]) -> None:
        self.safetensors.save_file({str(i): tensor for i, tensor in enumerate(tensors)}, path)
        fsync(path)

    def load(self, path: str, _sizes: list[int]) -> None:
        touch(self.safetensors.load_file(path).values())


class LoadsSafetensors:
    """Those that only load: the file is written by hand, untimed."""

    def save(self, path: str, tensors: list[Any]) -> None:
        at, header = 0, {}
        for number, tensor in enumerate(tensors):
            size = tensor.nbytes
            header[str(number)] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(path, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor in tensors:
                tensor.numpy().tofile(file)
        fsync(path)


class Fastsafetensors(LoadsSafetensors):
    def __init__(self, _path: str) -> None:
        import fastsafetensors

        self.open = fastsafetensors.fastsafe_open

    def load(self, path: str, _sizes: list[int]) -> None:
        with self.open(filenames=[path], nogds=True, device="cpu") as file:
            touch(file.get_tensor(key) for key in file.keys())  # noqa: SIM118, this is no dict


class RunaiModelStreamer(LoadsSafetensors):
    def __init__(self, _path: str) -> None:
        import runai_model_streamer

        self.streamer = runai_model_streamer.SafetensorsStreamer

    def load(self, path: str, _sizes: list[int]) -> None:
        with self.streamer() as streamer:
            streamer.stream_file(path)
            touch(tensor for _name, tensor in streamer.get_tensors())


class Tensornvme:
    """Keeps a file of its own and knows tensors by their identity. What is written gives up its
    memory and gets new when it is read."""

    def __init__(self, path: str) -> None:
        import tensornvme

        self.folder = f"{path}.tensornvme"
        self.offloader = tensornvme.DiskOffloader(self.folder, n_entries=64, backend="uring")
        self.tensors: dict[str, list[Any]] = {}

    def save(self, path: str, tensors: list[Any]) -> None:
        self.tensors[path] = tensors
        for tensor in tensors:
            self.offloader.async_write(tensor)
        self.offloader.synchronize()
        for file in self.files(path):
            fsync(file)

    def load(self, path: str, _sizes: list[int]) -> None:
        for tensor in self.tensors[path]:
            self.offloader.async_read(tensor)
        self.offloader.synchronize()

    def after_load(self, path: str) -> None:
        self.save(path, self.tensors[path])

    def files(self, _path: str) -> list[str]:
        return [os.path.join(self.folder, name) for name in os.listdir(self.folder)]


class Kvikio:
    def __init__(self, _path: str) -> None:
        import kvikio

        self.kvikio = kvikio

    def save(self, path: str, tensors: list[Any]) -> None:
        with self.kvikio.CuFile(path, "w") as file:
            at = 0
            for tensor in tensors:
                file.write(tensor, file_offset=at)
                at += tensor.nbytes
        fsync(path)

    def load(self, path: str, sizes: list[int]) -> None:
        with self.kvikio.CuFile(path, "r") as file:
            at = 0
            for size in sizes:
                file.read(np.empty(size, dtype=np.uint8), file_offset=at)
                at += size


SIDES: dict[str, Any] = {
    "tensorferry": Tensorferry,
    "torch": Torch,
    "torch mmap": TorchMmap,
    "NumPy": NumPy,
    "safetensors": Safetensors,
    "fastsafetensors": Fastsafetensors,
    "runai-model-streamer": RunaiModelStreamer,
    "tensornvme": Tensornvme,
    "kvikio": Kvikio,
}


def sizes_of(count: int, size: int) -> list[int]:
    """One tensor of a size, or many of 4 to 64 KiB."""
    if count == 1:
        return [size]
    dice = random.Random(count)
    return [dice.randrange(4 << 10, (64 << 10) + 1, 512) for _ in range(count)]


class Jobs:
    def __init__(self, side: str, path: str) -> None:
        self.path = path
        self.side = SIDES[side](path)
        self.plain_arrays = side in ("NumPy", "kvikio")
        self.saved: set[str] = set()

    def tensors(self, sizes: list[int]) -> list[Any]:
        if self.plain_arrays:
            return [np.full(size, 1, dtype=np.uint8) for size in sizes]
        return [torch.full((size,), 1, dtype=torch.uint8) for size in sizes]

    def save(self, count: int, size: int) -> dict[str, float]:
        """Into a file that is not there yet: one that is written over is another job."""
        path, sizes = f"{self.path}.{count}", sizes_of(count, size)
        tensors = self.tensors(sizes)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
            os.sync()
        start = time.perf_counter()
        self.side.save(path, tensors)
        seconds = time.perf_counter() - start
        self.saved.add(path)
        return {"repetition_seconds": seconds, "gb_per_second": sum(sizes) / 1e9 / seconds}

    def load(self, count: int, size: int) -> dict[str, float]:
        path, sizes = f"{self.path}.{count}", sizes_of(count, size)
        if path not in self.saved:
            self.save(count, size)
        files = getattr(self.side, "files", lambda path: [path])
        for file in files(path):
            drop_from_cache(file)
        start = time.perf_counter()
        self.side.load(path, sizes)
        seconds = time.perf_counter() - start
        getattr(self.side, "after_load", lambda _path: None)(path)
        return {"repetition_seconds": seconds, "gb_per_second": sum(sizes) / 1e9 / seconds}


if __name__ == "__main__":
    serve(lambda: Jobs(sys.argv[1], sys.argv[2]))
