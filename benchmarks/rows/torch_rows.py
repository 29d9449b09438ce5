"""The rows of compare.py about torch tensors: against DeepSpeed's own op, and against fio."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.jobs.job import GIB, MIB, Sample, size_text
from benchmarks.jobs.job_process import JobProcess
from benchmarks.jobs.peers import Peers
from benchmarks.rows.bench import Bench
from benchmarks.rows.pairs import Target
from benchmarks.rows.row import Row, call, memory, speed

TENSOR_FILE_BYTES = GIB
PASSES = {8 * MIB: 40, 256 * MIB: 4, GIB: 2}
PATH_CALLS = 1500
SMALL_TENSORS = 10_000


def torch_rows(bench: Bench, peers: Peers) -> list[Row]:
    """Rows of both sides on the same file."""
    ours = JobProcess("torch_jobs.py", "tensorferry", peers, "torch")
    theirs = JobProcess("torch_jobs.py", "deepspeed", peers, "DeepSpeed")
    bench.at_end += [ours.end, theirs.end]

    def large(jobs: JobProcess, direction: str, size: int, memory: str) -> Sample:
        file = bench.file(direction)
        return jobs.run(
            "large", file=file, direction=direction, size=size, repeat=PASSES[size], memory=memory
        )

    rows = []
    for kind, name, factor in (("ordinary", "ordinary", 3.0), ("pinned", "page-locked", 1.0)):
        for direction in ("read", "write"):
            for size in PASSES:
                rows.append(
                    Row(
                        f"{name} torch tensor, {direction}, {size_text(size)} / DeepSpeed",
                        "GB/s",
                        Target(factor, at_least=True) if size > 8 * MIB else None,
                        partial(large, ours, direction, size, kind),
                        partial(large, theirs, direction, size, kind),
                        speed,
                        peer="DeepSpeed",
                    )
                )
    # The target is three times DeepSpeed, or 0.9 of fio if the drive allows no more.
    for direction in ("read", "write"):
        for size in bench.sizes:
            rows.append(
                Row(
                    f"ordinary torch tensor, {direction}, {size_text(size)} / fio",
                    "GB/s",
                    Target(0.9, at_least=True),
                    partial(large, ours, direction, size, "ordinary"),
                    partial(bench.fio_best, direction, size),
                    speed,
                    peer="torch",
                )
            )
    return [*rows, *small_rows(bench, ours, theirs), *locked_memory_rows(ours)]


def small_rows(bench: Bench, ours: JobProcess, theirs: JobProcess) -> list[Row]:
    """Small reads: by path, and many in one call."""

    def small(jobs: JobProcess, kind: str, **options: Any) -> Sample:
        bench.seed += 1
        return jobs.run(kind, file=bench.read_file, seed=bench.seed, **options)

    by_path = {"size": 4096, "file_bytes": TENSOR_FILE_BYTES, "count": PATH_CALLS}
    return [
        Row(
            "synchronous read by path from Python, 4 KiB / DeepSpeed",
            "us",
            Target(1 / 3, at_least=False),
            partial(small, ours, "path", **by_path),
            partial(small, theirs, "path", **by_path),
            call,
            peer="DeepSpeed",
        ),
        Row(
            "synchronous read by path from Python, 4 KiB / os.open, os.preadv and os.close",
            "us",
            None,
            partial(small, ours, "path", **by_path),
            partial(small, ours, "path", **by_path, bare=True),
            call,
            peer="torch",
        ),
        Row(
            "10,000 tensors of 4 to 64 KiB, one call / DeepSpeed one by one",
            "GB/s",
            Target(5.0, at_least=True),
            partial(small, ours, "many", count=SMALL_TENSORS),
            partial(small, theirs, "many", count=SMALL_TENSORS),
            speed,
            peer="DeepSpeed",
        ),
    ]


def locked_memory_rows(ours: JobProcess) -> list[Row]:
    """How much memory a page-locked tensor takes beyond its size."""
    return [
        Row(
            f"page-locked memory for {size_text(size)} / asked",
            "MiB",
            Target(1.01, at_least=False),
            partial(ours.run, "locked", size=size),
            partial(Sample, memory_bytes=size),
            memory,
            peer="torch",
        )
        for size in (MIB, 10 * MIB + 1, 256 * MIB)
    ]
