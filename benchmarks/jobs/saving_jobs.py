"""Saves in the background and snapshots, for compare.py (see job_lines.py).

The first argument names the run, the second its folder: runs of one kind differ in what they have
done before, and each is a process.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import tensorferry.checkpoint
import tensorferry.optim
import tensorferry.snapshot
import torch
from checkpoint_tensors import tensors_of
from job_lines import serve

ROWS, WIDTH = 512, 1024  # a step of these takes about as long as many a kernel of a large model
EVERY = 10  # steps from snapshot to snapshot


def stage_bytes(size: int) -> int:
    """All of it, and the odd ends of windows."""
    return size + (64 << 20)


class Jobs:
    def __init__(self, run: str, folder: str) -> None:
        self.folder = os.path.join(folder, f"saving-{run}")
        os.makedirs(self.folder, exist_ok=True)
        self.tensors: dict[str, torch.Tensor] = {}
        self.optimizer: Any = None
        self.params: list[torch.nn.Parameter] = []
        self.steps = 0

    def compute(self, size: int, repeat: int, saved: bool) -> dict[str, float]:
        """Steps that only compute, on all processors but one, which is what a save needs. With
        `saved`, a checkpoint is written all the time: the next save begins when one has ended. The
        calls that begin saves are not part of the steps."""
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))
        tensors = self.state(size)
        left, right = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH)
        path = os.path.join(self.folder, "beside.pt")
        saving = None
        seconds = 0.0
        for number in range(-5, repeat):
            if saved and (saving is None or saving.done()):
                saving = tensorferry.checkpoint.save(
                    tensors, path, wait=False, stage_bytes=stage_bytes(size)
                )
            begin = time.perf_counter()
            for _ in range(20):
                torch.mm(left, right)
            if number >= 0:
                seconds += time.perf_counter() - begin
        if saving is not None:
            saving.wait()
            os.unlink(path)
        return {"repetition_seconds": seconds / repeat}

    def call(self, size: int) -> dict[str, float]:
        """How long a call takes that saves in the background, when the memory is there."""
        tensors = self.state(size)
        path = os.path.join(self.folder, "call.pt")
        save = tensorferry.checkpoint.save
        save(tensors, path, wait=False, stage_bytes=stage_bytes(size)).wait()
        begin = time.perf_counter()
        saving = save(tensors, path, wait=False, stage_bytes=stage_bytes(size))
        seconds = time.perf_counter() - begin
        saving.wait()
        os.unlink(path)
        return {"repetition_seconds": seconds}

    def copy(self, size: int) -> dict[str, float]:
        """torch copies as many bytes to memory that is there."""
        tensors = self.state(size)
        places = [tensor.clone() for tensor in tensors.values()]
        begin = time.perf_counter()
        for place, tensor in zip(places, tensors.values()):
            place.copy_(tensor)
        return {"repetition_seconds": time.perf_counter() - begin}

    def state(self, size: int) -> dict[str, torch.Tensor]:
        if not self.tensors:
            self.tensors = tensors_of("32", size)
        return self.tensors

    def train(self, parameters: int, repeat: int, checksums: bool = False) -> dict[str, float]:
        """Steps of AdamW with states on NVMe; the mean of `repeat`."""
        optimizer = self.opened(parameters, checksums)
        for _ in range(2):
            optimizer.step()
        begin = time.perf_counter()
        for _ in range(repeat):
            optimizer.step()
        return {"repetition_seconds": (time.perf_counter() - begin) / repeat}

    def train_on(self, parameters: int, repeat: int, steps: int) -> dict[str, float]:
        """Steps until there were so many in this process, with a snapshot after every tenth; then
        those that are timed."""
        optimizer = self.opened(parameters, False)
        while self.steps < steps:
            optimizer.step()
            self.steps += 1
            if self.steps % EVERY == 0:
                self.taken()
        return self.train(parameters, repeat)

    def take(self, parameters: int) -> dict[str, float]:
        """A snapshot of states that are on the drive, after a step whose writes have ended."""
        optimizer = self.opened(parameters, False)
        optimizer.step()
        optimizer.state_dict()  # waits for the writes
        begin = time.perf_counter()
        self.taken()
        return {"repetition_seconds": time.perf_counter() - begin}

    def taken(self) -> None:
        path = os.path.join(self.folder, "snapshots")
        tensorferry.snapshot.take(path, optimizer=self.optimizer, keep=2)

    def opened(self, parameters: int, checksums: bool) -> Any:
        if self.optimizer is None:
            count, each = 8, parameters // 8
            self.params = [torch.nn.Parameter(torch.ones(each)) for _ in range(count)]
            for param in self.params:
                param.grad = torch.full_like(param, 0.01)
            self.optimizer = tensorferry.optim.AdamW(
                self.params, nvme_path=self.folder, checksums=checksums
            )
            self.optimizer.step()  # its files grow
        return self.optimizer

    def release(self) -> dict[str, float]:
        """Frees the memory and the drive."""
        if self.optimizer is not None:
            self.optimizer.close()
        for one in tensorferry.snapshot.find(os.path.join(self.folder, "snapshots")):
            tensorferry.snapshot.drop(os.path.dirname(one.path), one.name)
        self.optimizer, self.params, self.tensors, self.steps = None, [], {}, 0
        tensorferry.checkpoint.free_stage()
        return {}


if __name__ == "__main__":
    serve(lambda: Jobs(sys.argv[1], sys.argv[2]))
