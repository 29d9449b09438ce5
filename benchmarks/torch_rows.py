"""The rows of compare.py about torch tensors: against DeepSpeed's own op, and against fio."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from jobs import GIB, MIB, ROOT, JobFailed, Sample
from pairs import Target
from rows import Row, call, speed

TENSOR_FILE_BYTES = GIB
PASSES = {8 * MIB: 40, GIB: 2}
PATH_CALLS = 1500
SMALL_TENSORS = 10_000


class TorchJobs:
    """A torch_jobs.py process, started at its first job."""

    def __init__(self, side: str) -> None:
        self.side = side
        self.process: subprocess.Popen[str] | None = None

    def command(self) -> list[str]:
        return [sys.executable, str(ROOT / "benchmarks" / "torch_jobs.py"), self.side]

    def run(self, kind: str, file: Path | None, **options: Any) -> Sample:
        if self.process is None:
            self.start()
        where = {} if file is None else {"file": str(file)}
        answer = self.ask({"kind": kind, **where, **options})
        if "error" in answer:
            raise JobFailed(f"{self.side}: {kind}: {answer['error']}")
        return Sample(engine=self.side, **answer)

    def start(self) -> None:
        env = os.environ | {
            "PYTHONPATH": str(ROOT / "build" / "release" / "python"),
            # Built once, in five minutes, and kept.
            "TORCH_EXTENSIONS_DIR": str(ROOT / "build" / "deepspeed_op"),
        }
        env.pop("TENSORFERRY_DEEPSPEED", None)
        self.process = subprocess.Popen(
            self.command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=env,
        )
        self.ask(None)

    def ask(self, job: dict[str, Any] | None) -> dict[str, Any]:
        assert self.process and self.process.stdin and self.process.stdout
        if job is not None:
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise JobFailed(
                f"{self.side}: ended with {self.process.wait()}; try by hand: "
                f"{' '.join(self.command())}"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
            self.process.wait(timeout=60)


def torch_rows(bench: Any) -> list[Row]:
    """Ours and DeepSpeed's with the same settings, on the same file."""
    ours, theirs = TorchJobs("tensorferry"), TorchJobs("deepspeed")
    bench.at_end.append(ours.end)
    bench.at_end.append(theirs.end)

    def large(jobs: TorchJobs, direction: str, size: int, memory: str) -> Sample:
        file = bench.file(direction)
        return jobs.run(
            "large", file, direction=direction, size=size, repeat=PASSES[size], memory=memory
        )

    def small(jobs: TorchJobs, kind: str, **options: Any) -> Sample:
        bench.seed += 1
        return jobs.run(kind, bench.read_file, seed=bench.seed // 2, **options)

    rows = []
    for memory, name, factor in (("ordinary", "ordinary", 3.0), ("pinned", "page-locked", 1.0)):
        for direction in ("read", "write"):
            for size, text in ((8 * MIB, "8 MiB"), (GIB, "1 GiB")):
                rows.append(
                    Row(
                        f"{name} torch tensor, {direction}, {text} / DeepSpeed",
                        "GB/s",
                        Target(factor, at_least=True),
                        partial(large, ours, direction, size, memory),
                        partial(large, theirs, direction, size, memory),
                        speed,
                    )
                )
    # Three times DeepSpeed, or 0.9 of fio where the drive allows no more.
    for direction in ("read", "write"):
        for size, text in ((8 * MIB, "8 MiB"), (GIB, "1 GiB")):
            rows.append(
                Row(
                    f"ordinary torch tensor, {direction}, {text} / fio with 1 GiB",
                    "GB/s",
                    Target(0.9, at_least=True),
                    partial(large, ours, direction, size, "ordinary"),
                    partial(bench.fio_best, direction, GIB),
                    speed,
                )
            )
    by_path = {"size": 4096, "file_bytes": TENSOR_FILE_BYTES, "count": PATH_CALLS}
    rows.append(
        Row(
            "synchronous read by path from Python, 4 KiB / DeepSpeed",
            "us",
            Target(1 / 3, at_least=False),
            partial(small, ours, "path", **by_path),
            partial(small, theirs, "path", **by_path),
            call,
        )
    )
    rows.append(
        Row(
            "10,000 tensors of 4 to 64 KiB, one call / DeepSpeed one by one",
            "GB/s",
            Target(5.0, at_least=True),
            partial(small, ours, "many", count=SMALL_TENSORS),
            partial(small, theirs, "many", count=SMALL_TENSORS),
            speed,
        )
    )
    return rows
