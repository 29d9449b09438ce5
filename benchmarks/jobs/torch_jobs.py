"""Runs jobs on torch tensors through an aio_handle, ours or DeepSpeed's, for compare.py (see
job_lines.py).

The two have the same interface, so the same code measures both.
"""

from __future__ import annotations

import mmap
import os
import random
import resource
import statistics
import sys
import time
from typing import Any

import torch
from job_lines import serve

# DeepSpeed's are the fastest of nine that we tried (docs/performance.md); ours are common ones.
SETTINGS = {
    "tensorferry": {"block_size": 1 << 20, "queue_depth": 32},
    "deepspeed": {"block_size": 256 << 10, "queue_depth": 128},
}
SMALL_BYTES = (4 << 10, 64 << 10)  # of the many small tensors, in whole sectors


def load(side: str) -> Any:
    if side == "tensorferry":
        import tensorferry

        return tensorferry
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return AsyncIOBuilder().load(verbose=False)


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


class Jobs:
    def __init__(self, side: str) -> None:
        self.ours = side == "tensorferry"
        self.op = load(side)
        self.tensors: dict[tuple[int, str], torch.Tensor] = {}
        self.handle = self.op.aio_handle(
            **SETTINGS[side], single_submit=False, overlap_events=True, intra_op_parallelism=1
        )
        if self.ours:
            self.many_handle = self.op.Handle()

    def tensor(self, size: int, memory: str) -> torch.Tensor:
        """Kept from job to job, so that its pages exist and the machine knows them."""
        key = (size, memory)
        if key not in self.tensors:
            self.give_back_all_but(memory)
            example = torch.empty(0, dtype=torch.uint8)
            if memory == "pinned":
                self.tensors[key] = self.handle.new_cpu_locked_tensor(size, example)
            else:
                self.tensors[key] = torch.empty(size, dtype=torch.uint8)
            self.tensors[key].fill_(1)
        return self.tensors[key]

    def give_back_all_but(self, memory: str) -> None:
        """Frees tensors: the processes of all peers run at the same time and share the memory."""
        for key in [key for key in self.tensors if key[1] != memory]:
            tensor = self.tensors.pop(key)
            if key[1] == "pinned":
                self.handle.free_cpu_locked_tensor(tensor)

    def large(self, file: str, direction: str, size: int, repeat: int, memory: str) -> dict:
        """Synchronous calls, one after the other, as in fio, after two untimed ones."""
        tensor = self.tensor(size, memory)
        call = self.handle.sync_pread if direction == "read" else self.handle.sync_pwrite
        for _ in range(2):
            call(tensor, file, 0)
        before = resource.getrusage(resource.RUSAGE_SELF)
        start = time.perf_counter()
        for _ in range(repeat):
            call(tensor, file, 0)
        seconds = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        gigabytes = size * repeat / 1e9
        return {"gb_per_second": gigabytes / seconds, "cpu_seconds_per_gb": cpu / gigabytes}

    def locked(self, size: int) -> dict:
        """Resident memory per page-locked tensor of this size, over several: one is noisy."""
        example = torch.empty(0, dtype=torch.uint8)
        count = max(1, (64 << 20) // size)
        before = resident_bytes()
        tensors = [self.handle.new_cpu_locked_tensor(size, example) for _ in range(count)]
        taken = resident_bytes() - before
        for tensor in tensors:
            self.handle.free_cpu_locked_tensor(tensor)
        return {"memory_bytes": taken / count}

    def path(
        self, file: str, size: int, file_bytes: int, count: int, seed: int, bare: bool = False
    ) -> dict:
        """Synchronous reads by path at random offsets. `bare` uses Python's own system calls
        instead, into memory that needs no copy."""
        tensor = torch.empty(size, dtype=torch.uint8)
        pages = mmap.mmap(-1, size)

        def bare_read(offset: int) -> None:
            descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
            os.preadv(descriptor, [pages], offset)
            os.close(descriptor)

        def read(offset: int) -> None:
            self.handle.sync_pread(tensor, file, offset)

        call = bare_read if bare else read
        dice = random.Random(seed)
        offsets = [dice.randrange(file_bytes // size) * size for _ in range(count)]
        times = []
        for offset in offsets:
            start = time.perf_counter_ns()
            call(offset)
            times.append(time.perf_counter_ns() - start)
        return {"call_us_median": statistics.median(times) / 1000}

    def many(self, file: str, count: int, seed: int) -> dict:
        """Many small tensors from one file: we read them in one call, DeepSpeed one by one."""
        dice = random.Random(seed)
        sizes = [dice.randrange(SMALL_BYTES[0], SMALL_BYTES[1] + 1, 512) for _ in range(count)]
        tensors = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        offsets, at = [], 0
        for size in sizes:
            offsets.append(at)
            at += size
        start = time.perf_counter()
        if self.ours:
            handle = self.many_handle
            with self.op.File(file) as opened:
                handle.read_many([(t, opened, o) for t, o in zip(tensors, offsets)]).wait()
        else:
            for tensor, offset in zip(tensors, offsets):
                self.handle.async_pread(tensor, file, offset)
            self.handle.wait()
        seconds = time.perf_counter() - start
        return {"repetition_seconds": seconds, "gb_per_second": at / 1e9 / seconds}


if __name__ == "__main__":
    serve(lambda: Jobs(sys.argv[1]))
