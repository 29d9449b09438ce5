"""Saves and loads distributed checkpoints with two ranks, by our Writer and Reader or by torch's.

compare.py gives it the jobs (see job_lines.py).

This process is rank 0 and starts rank 1. Each has half of every tensor. A save ends when both have
synced their files, a load starts with a cold page cache and fills tensors that are there.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from job_lines import serve
from peer_jobs import drop_from_cache
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

RANKS = 2
TENSORS = 32


class Rank:
    """One rank: its halves of the tensors, and how it saves and loads them."""

    def __init__(self, rank: int, side: str, folder: str) -> None:
        self.rank = rank
        self.folder = os.path.join(folder, f"dcp-{side}")
        meeting = os.path.join(folder, f"dcp-{side}-meeting")
        dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=RANKS)
        self.mesh = init_device_mesh("cpu", (RANKS,))
        if side == "tensorferry":
            from tensorferry.dcp import Reader, Writer

            self.writer, self.reader = Writer, Reader
        else:
            self.writer = dcp.FileSystemWriter  # syncs its files by default
            self.reader = dcp.FileSystemReader

    def state(self, size: int, value: int) -> dict[str, Any]:
        shape = (1024, size // TENSORS // RANKS // 1024)
        return {
            f"layers.{index:02}.weight": DTensor.from_local(
                torch.full(shape, value, dtype=torch.uint8), self.mesh, [Shard(0)]
            )
            for index in range(TENSORS)
        }

    def save(self, size: int) -> float:
        state = self.state(size, 1)
        if self.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.sync()
        dist.barrier()
        start = time.perf_counter()
        dcp.save(state, storage_writer=self.writer(self.folder))
        return time.perf_counter() - start

    def load(self, size: int) -> float:
        state = self.state(size, 0)
        if self.rank == 0:
            for name in os.listdir(self.folder):
                drop_from_cache(os.path.join(self.folder, name))
        dist.barrier()
        start = time.perf_counter()
        dcp.load(state, storage_reader=self.reader(self.folder))
        seconds = time.perf_counter() - start
        if any(int(tensor.to_local()[-1, -1]) != 1 for tensor in state.values()):
            raise RuntimeError("it loaded wrong bytes")
        return seconds


def follow(orders: Connection, side: str, folder: str) -> None:
    """Rank 1 does what rank 0 does, until rank 0 is gone."""
    rank = Rank(1, side, folder)
    try:
        while True:
            kind, size = orders.recv()
            getattr(rank, kind)(size)
    except EOFError:
        os._exit(0)  # gloo may abort where a process ends in the usual way


class Jobs:
    def __init__(self, side: str, folder: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        orders, self.orders = spawn.Pipe(duplex=False)
        spawn.Process(target=follow, args=(orders, side, folder), daemon=True).start()
        orders.close()
        self.rank = Rank(0, side, folder)
        self.saved = False

    def both(self, kind: str, size: int) -> dict[str, float]:
        self.orders.send((kind, size))
        seconds = getattr(self.rank, kind)(size)
        return {"repetition_seconds": seconds, "gb_per_second": size / 1e9 / seconds}

    def save(self, size: int) -> dict[str, float]:
        self.saved = True
        return self.both("save", size)

    def load(self, size: int) -> dict[str, float]:
        if not self.saved:
            self.save(size)
        return self.both("load", size)


if __name__ == "__main__":
    serve(lambda: Jobs(sys.argv[1], sys.argv[2]))
    os._exit(0)  # as in follow()
