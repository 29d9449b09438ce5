"""Saves and loads tensors as one peer does, or as we do, for compare.py (see job_lines.py).

The first argument names the peer, in whose environment this runs.

A save ends when the bytes are on the drive (fsync). A load starts with a cold page cache and ends
when every byte is in memory. If the peer only maps the file, the load touches every page, and the
time of touching pages that are already in memory is subtracted.
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

with contextlib.suppress(ImportError):  # the environments of NumPy and kvikio have no torch
    import torch

PAGE_BYTES = 4096


def touch(tensors: Any) -> None:
    """Makes mapped pages come from the drive."""
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


def header_of(sizes: list[int]) -> bytes:
    """The header of a safetensors file, with its length in front, padded to a whole page."""
    at, entries = 0, {}
    for number, size in enumerate(sizes):
        entries[str(number)] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % PAGE_BYTES)
    return len(text).to_bytes(8, "little") + text


class TensorferryRaw:
    """The bytes alone, into new ordinary tensors, with the default settings."""

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

    def load(self, path: str, sizes: list[int]) -> Any:
        with self.ferry.File(path) as file:
            at, transfers = 0, []
            for size in sizes:
                transfers.append((torch.empty(size, dtype=torch.uint8), file, at))
                at += size
            self.handle.read_many(transfers).wait()


class Tensorferry(TensorferryRaw):
    """A safetensors file, written and read as in docs/guides/checkpoints.md."""

    def save(self, path: str, tensors: list[Any]) -> None:
        header = header_of([tensor.nbytes for tensor in tensors])
        with self.ferry.File(path, "write") as file:
            at, transfers = len(header), [(header, file, 0)]
            for tensor in tensors:
                transfers.append((tensor, file, at))
                at += tensor.nbytes
            self.handle.write_many(transfers, durability="full").wait()

    def load(self, path: str, _sizes: list[int]) -> dict[str, Any]:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(length))
        tensors = {
            name: torch.empty(entry["shape"], dtype=torch.uint8) for name, entry in entries.items()
        }
        with self.ferry.File(path) as file:
            self.handle.read_many(
                [
                    (tensor, file, 8 + length + entries[name]["data_offsets"][0])
                    for name, tensor in tensors.items()
                ]
            ).wait()
        return tensors


class Torch:
    """torch.save and torch.load."""

    maps = False

    def __init__(self, _path: str) -> None:
        pass

    def save(self, path: str, tensors: list[Any]) -> None:
        torch.save({str(i): tensor for i, tensor in enumerate(tensors)}, path)
        fsync(path)

    def load(self, path: str, _sizes: list[int]) -> dict[str, Any]:
        return torch.load(path, mmap=self.maps, weights_only=True)


class TorchMmap(Torch):
    maps = True


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
    maps = True
    backend = "mmap"

    def __init__(self, _path: str) -> None:
        import safetensors.torch

        self.safetensors = safetensors.torch

    def save(self, path: str, tensors: list[Any]) -> None:
        self.safetensors.save_file({str(i): tensor for i, tensor in enumerate(tensors)}, path)
        fsync(path)

    def load(self, path: str, _sizes: list[int]) -> dict[str, Any]:
        return self.safetensors.load_file(path, backend=self.backend)


class SafetensorsPread(Safetensors):
    maps = False
    backend = "pread"


class LoadsSafetensors:
    """Peers that only load: we write the file for them, untimed."""

    def save(self, path: str, tensors: list[Any]) -> None:
        with open(path, "wb") as file:
            file.write(header_of([tensor.nbytes for tensor in tensors]))
            for tensor in tensors:
                tensor.numpy().tofile(file)
        fsync(path)


class Fastsafetensors(LoadsSafetensors):
    def __init__(self, _path: str) -> None:
        import fastsafetensors

        self.open = fastsafetensors.fastsafe_open

    def load(self, path: str, _sizes: list[int]) -> None:
        with self.open(filenames=[path], nogds=True, device="cpu") as file:
            for key in file.keys():  # noqa: SIM118, not a dict
                file.get_tensor(key)


class RunaiModelStreamer(LoadsSafetensors):
    def __init__(self, _path: str) -> None:
        import runai_model_streamer

        self.streamer = runai_model_streamer.SafetensorsStreamer

    def load(self, path: str, _sizes: list[int]) -> None:
        with self.streamer() as streamer:
            streamer.stream_file(path)
            for _tensor in streamer.get_tensors():
                pass


class Tensornvme:
    """Keeps its own file and knows tensors by their identity. A tensor gives up its memory when it
    is written and gets new memory when it is read."""

    def __init__(self, _path: str) -> None:
        import tensornvme

        self.make = tensornvme.DiskOffloader
        self.offloaders: dict[str, Any] = {}
        self.tensors: dict[str, list[Any]] = {}

    def before_save(self, path: str) -> None:
        """Starts a new file: tensors that nobody reads again would stay in the old one. The old
        file goes with its offloader."""
        self.offloaders.pop(path, None)
        self.tensors.pop(path, None)
        folder = f"{path}.tensornvme"
        self.offloaders[path] = self.make(folder, n_entries=64, backend="uring")

    def save(self, path: str, tensors: list[Any]) -> None:
        self.tensors[path] = tensors
        for tensor in tensors:
            self.offloaders[path].async_write(tensor)
        self.offloaders[path].synchronize()
        for file in self.files(path):
            fsync(file)

    def load(self, path: str, _sizes: list[int]) -> None:
        for tensor in self.tensors[path]:
            self.offloaders[path].async_read(tensor)
        self.offloaders[path].synchronize()

    def after_load(self, path: str) -> None:
        self.save(path, self.tensors[path])

    def files(self, path: str) -> list[str]:
        folder = f"{path}.tensornvme"
        return [os.path.join(folder, name) for name in os.listdir(folder)]


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
    "tensorferry raw": TensorferryRaw,
    "torch": Torch,
    "torch mmap": TorchMmap,
    "NumPy": NumPy,
    "safetensors": Safetensors,
    "safetensors pread": SafetensorsPread,
    "fastsafetensors": Fastsafetensors,
    "runai-model-streamer": RunaiModelStreamer,
    "tensornvme": Tensornvme,
    "kvikio": Kvikio,
}


def sizes_of(count: int, size: int) -> list[int]:
    """One tensor of `size` bytes, or `count` tensors of 4 to 64 KiB."""
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
        """Saves to a new file: overwriting would be another measurement."""
        path, sizes = f"{self.path}.{count}", sizes_of(count, size)
        tensors = self.tensors(sizes)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        getattr(self.side, "before_save", lambda _path: None)(path)
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
        maps = getattr(self.side, "maps", False)
        files = getattr(self.side, "files", lambda path: [path])
        for file in files(path):
            drop_from_cache(file)
        start = time.perf_counter()
        loaded = self.side.load(path, sizes)
        if maps:
            touch(loaded.values())
        seconds = time.perf_counter() - start
        if maps:
            start = time.perf_counter()
            touch(loaded.values())
            seconds -= time.perf_counter() - start
        getattr(self.side, "after_load", lambda _path: None)(path)
        return {"repetition_seconds": seconds, "gb_per_second": sum(sizes) / 1e9 / seconds}


if __name__ == "__main__":
    serve(lambda: Jobs(sys.argv[1], sys.argv[2]))
