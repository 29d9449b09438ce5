"""The rows of compare.py about many threads and many drives on one handle, and about what a single
queued operation costs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.jobs.job import (
    GIB,
    MIB,
    FioPoint,
    JobFailed,
    Sample,
    fio_drives,
    fio_threads,
    size_text,
)
from benchmarks.jobs.loop_drives import LoopDrives
from benchmarks.rows.bench import Bench
from benchmarks.rows.pairs import Target
from benchmarks.rows.row import Row, call, speed, switches

SINGLE_CALLS = 4000
THREADS = (2, 4, 8)
THREAD_CALLS = {4 << 10: 24_000, MIB: 2000}  # of all threads together
MB = 10**6
# Of two throttled drives, with bytes in proportion. The kernel throttles in slices of 100 ms, and a
# job ends in one slice or the next: it must take seconds, or that alone is 7 %.
SLOW, FAST = 50 * MB, 200 * MB
SLOW_BYTES, FAST_BYTES = 192 * MIB, 768 * MIB
THROTTLED_POINT = FioPoint(MIB, 16, False)
TENSOR_BYTES = 8 * MIB
SWAP_TENSORS = {"both": 120, "slow": 24, "fast": 96}
MEMORY_DRIVES = 4
MEMORY_BYTES = 256 * MIB
MEMORY_PASSES = 4
MEMORY_GRID = [
    FioPoint(block, depth, fixed)
    for block in (256 << 10, 512 << 10, MIB)
    for depth in (4, 16)
    for fixed in (True, False)
]


def single_rows(bench: Bench) -> list[Row]:
    """A queued operation that the caller awaits before the next one."""

    def queued() -> Sample:
        bench.seed += 1
        words = ("--in-flight", "1")
        count = SINGLE_CALLS // bench.calls_share
        return bench.ferry.calls(
            bench.read_file, "queue", 4096, GIB, count, "pinned", bench.seed, *words
        )

    return [
        Row(
            "queued read, page-locked, 4 KiB, one at a time / synchronous read",
            "us",
            Target(1.15, at_least=False),
            queued,
            partial(bench.calls, "sync", 4096, "pinned"),
            call,
        ),
        Row(
            "context switches of a queued read of 4 KiB, one at a time / one",
            "switches",
            Target(1.5, at_least=False),
            queued,
            partial(Sample, switches=1.0),
            switches,
        ),
    ]


def thread_rows(bench: Bench) -> list[Row]:
    """Threads that call read_now() on one Handle; fio has a process for each."""

    def ours(threads: int, size: int) -> Sample:
        bench.seed += 1
        count = THREAD_CALLS[size] // threads
        words = ("--threads", str(threads))
        return bench.ferry.calls(
            bench.read_file, "sync", size, GIB, count, "pinned", bench.seed, *words
        )

    def fio(threads: int, size: int) -> Sample:
        return fio_threads(bench.read_file, GIB, size, THREAD_CALLS[size] // threads, threads)

    return [
        Row(
            f"{threads} threads, synchronous reads of {size_text(size)}, one handle / fio psync",
            "GB/s",
            Target(0.9, at_least=True),
            partial(ours, threads, size),
            partial(fio, threads, size),
            speed,
        )
        for size in THREAD_CALLS
        for threads in THREADS
    ]


class Drives:
    """The loop devices of the rows below, made at the first job that needs them."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.made: LoopDrives | None = None
        self.refusal: JobFailed | None = None
        self.slow = self.fast = Path()
        self.memory: list[Path] = []
        self.memory_point: FioPoint | None = None

    def get(self) -> LoopDrives:
        """Throws JobFailed; a second call does not try again."""
        if self.refusal:
            raise self.refusal
        if self.made is None:
            try:
                self.made = self.make()
            except JobFailed as error:
                self.refusal = error
                raise
        return self.made

    def make(self) -> LoopDrives:
        drives = LoopDrives(self.bench.read_file.parent / "drives")
        self.bench.at_end.append(drives.remove)
        room = 2 * TENSOR_BYTES * SWAP_TENSORS["both"]
        self.slow = drives.add("slow", SLOW_BYTES + room, SLOW)
        self.fast = drives.add("fast", FAST_BYTES + room, FAST)
        names = (f"memory{number}" for number in range(MEMORY_DRIVES))
        self.memory = [drives.add(name, MEMORY_BYTES) for name in names]
        sizes = {self.slow: SLOW_BYTES, self.fast: FAST_BYTES}
        sizes |= dict.fromkeys(self.memory, MEMORY_BYTES)
        for point, size in sizes.items():
            self.bench.ferry.large(point / "file", "write", size, 1, "--warm-up", "0")
        return drives

    def throttled(self, job: Callable[[], Sample]) -> Sample:
        with self.get().throttled():
            return job()

    def both(self) -> tuple[list[Path], list[int]]:
        return [self.slow / "file", self.fast / "file"], [SLOW_BYTES, FAST_BYTES]

    def read_both(self) -> Sample:
        return self.throttled(lambda: self.bench.ferry.drives(*self.both(), 1, "--warm-up", "1"))

    def fio_both(self) -> Sample:
        return self.throttled(lambda: fio_drives(*self.both(), THROTTLED_POINT, 1))

    def read_fast(self, beside: bool) -> Sample:
        def job() -> Sample:
            words = ("--beside", str(self.slow / "file")) if beside else ()
            files, sizes = [self.fast / "file"], [FAST_BYTES]
            return self.bench.ferry.drives(files, sizes, 1, "--warm-up", "1", *words)

        return self.throttled(job)

    def swap(self, direction: str, which: str) -> Sample:
        def job() -> Sample:
            folders = {"slow": [self.slow], "fast": [self.fast], "both": [self.slow, self.fast]}
            count = SWAP_TENSORS[which]
            return self.bench.ferry.swap(folders[which], direction, TENSOR_BYTES, count, 1)

        return self.throttled(job)

    def swap_alone(self, direction: str) -> Sample:
        alone = [self.swap(direction, which).gb_per_second for which in ("slow", "fast")]
        return Sample(gb_per_second=sum(alone))

    def read_memory(self) -> Sample:
        self.get()
        files = [point / "file" for point in self.memory]
        return self.bench.ferry.drives(files, [MEMORY_BYTES], MEMORY_PASSES)

    def fio_memory(self) -> Sample:
        """fio with the best of some settings."""
        self.get()
        files = [point / "file" for point in self.memory]
        sizes = [MEMORY_BYTES] * len(files)

        def fio(point: FioPoint) -> Sample:
            return fio_drives(files, sizes, point, MEMORY_PASSES)

        if self.memory_point is None:
            speeds = {
                point: median(fio(point).gb_per_second for _ in range(3)) for point in MEMORY_GRID
            }
            self.memory_point = max(speeds, key=lambda point: speeds[point])
            cell = f"{MEMORY_DRIVES} drives in memory"
            self.bench.calibration[cell] = self.memory_point
            self.bench.calibration_speeds[cell] = {
                str(point): round(value, 3) for point, value in speeds.items()
            }
        return fio(self.memory_point)


def loop_rows(bench: Bench) -> list[Row]:
    """Several drives at once, on loop devices over memory."""
    drives = Drives(bench)
    slow, fast = SLOW // MB, FAST // MB
    rows: list[Row] = []

    def add(
        name: str, target: float, ours: Callable[[], Sample], other: Callable[[], Sample]
    ) -> None:
        at_least = Target(target, at_least=True)
        rows.append(Row(name, "GB/s", at_least, ours, other, speed, kernel_works=True))

    add(
        f"drives of {slow} and {fast} MB/s, read with one handle / fio",
        0.95,
        drives.read_both,
        drives.fio_both,
    )
    add(
        f"drive of {fast} MB/s, while the handle reads one of {slow} MB/s / alone",
        0.95,
        partial(drives.read_fast, beside=True),
        partial(drives.read_fast, beside=False),
    )
    for direction, name in (("write", "put"), ("read", "get")):
        add(
            f"SwapSpace over drives of {slow} and {fast} MB/s, {name} / the sum of each alone",
            0.95,
            partial(drives.swap, direction, "both"),
            partial(drives.swap_alone, direction),
        )
    add(
        f"{MEMORY_DRIVES} drives in memory, read with one handle / fio",
        0.9,
        drives.read_memory,
        drives.fio_memory,
    )
    return rows


def scale_rows(bench: Bench) -> list[Row]:
    if bench.quick:
        return single_rows(bench)
    return [*single_rows(bench), *thread_rows(bench), *loop_rows(bench)]
