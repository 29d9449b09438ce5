"""The files, the programs and fio's calibrated settings that the rows of compare.py share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks.jobs.job import (
    GIB,
    MIB,
    Ferry,
    FioPoint,
    JobFailed,
    Sample,
    fio_calls,
    fio_large,
    fio_mixed,
    fio_new_files,
    size_text,
)
from benchmarks.jobs.progress import Progress

CALL_FILE_BYTES = GIB
# Enough passes to make fio's rounding to a millisecond small.
PASSES = {256 * MIB: 8, GIB: 2}
NEW_FILES = {256 * MIB: 4, GIB: 1}
CPU_BYTES = 8 * GIB
CALLS = {4 << 10: 4000, 64 << 10: 3000, MIB: 1000, 8 * MIB: 200}
# With more, fio spends its time on filling buffers and gains nothing.
IN_FLIGHT_BYTES_MAX = 128 * MIB


def grid(kibs: tuple[int, ...], depths: tuple[int, ...], fixed: tuple[bool, ...]) -> list[FioPoint]:
    points = (FioPoint(k << 10, depth, f) for k in kibs for depth in depths for f in fixed)
    small = (point for point in points if point.block_bytes * point.depth <= IN_FLIGHT_BYTES_MAX)
    return list(dict.fromkeys(small))


FULL_GRID = grid((128, 256, 512, 1024, 2048, 4096), (8, 16, 32, 64), (True, False))
QUICK_GRID = grid((512, 1024, 4096), (16, 32, 64), (True,))
# For fio's other engines, which have no fixed buffers.
OTHER_GRIDS = {
    "psync": [FioPoint(block, 1, False) for block in (MIB, 2 * MIB, 4 * MIB)],
    "libaio": [FioPoint(block, depth, False) for block in (MIB, 4 * MIB) for depth in (16, 32)],
}


def drive_differs(then: float, now: float) -> bool:
    """Whether fio's speed changed so much that the drive, or the load on it, is another."""
    return not 0.7 <= now / then <= 1 / 0.7


class Bench:
    """The files, the programs and fio's calibrated settings."""

    def __init__(self, folder: Path, program: Path, quick: bool, say: Progress) -> None:
        self.quick = quick
        self.grid = QUICK_GRID if quick else FULL_GRID
        self.passes = {size: count // (2 if quick else 1) for size, count in PASSES.items()}
        self.sizes = [256 * MIB] if quick else [256 * MIB, GIB]
        self.large = self.sizes[-1]
        self.cpu_passes = (GIB if quick else CPU_BYTES) // self.large
        self.calls_share = 4 if quick else 1
        self.ferry = Ferry(program)
        self.read_file = folder / "read.bin"
        self.write_file = folder / "write.bin"
        self.new_file = folder / "new.bin"
        self.say = say
        self.stored: dict[str, tuple[FioPoint, float]] = {}  # of an earlier run, with GB/s
        self.calibration: dict[str, FioPoint] = {}
        self.calibration_speeds: dict[str, dict[str, float]] = {}
        self.our_points: dict[str, FioPoint] = {}
        self.at_end: list[Callable[[], None]] = []
        self.seed = 0

    def prepare(self) -> None:
        for file in (self.read_file, self.write_file):
            self.ferry.large(file, "write", GIB, 1, "--warm-up", "0")

    def file(self, direction: str) -> Path:
        return self.read_file if direction == "read" else self.write_file

    def fio(self, kind: str, size: int, point: FioPoint, engine: str = "io_uring") -> Sample:
        """`kind` is read, write (over an existing file), mix (of these two) or new."""
        if kind == "new":
            return self.fio_new(size, point, preallocate=True)
        if kind == "mix":
            return fio_mixed(self.write_file, point, size, 2 * self.passes[size])
        return fio_large(self.file(kind), point, kind, size, self.passes[size], engine=engine)

    def fio_new(self, size: int, point: FioPoint, preallocate: bool) -> Sample:
        names = [self.new_file.with_suffix(f".{i}") for i in range(NEW_FILES[size])]
        return fio_new_files(names, point, size, preallocate)

    def best_point(self, kind: str, size: int, engine: str = "io_uring") -> FioPoint:
        """Tries all points once and the best few three times more, and takes the best median. With
        --quick new files use the best settings for overwriting."""
        if kind == "new" and self.quick:
            kind = "write"
        cell = f"{kind} {size_text(size)}" + ("" if engine == "io_uring" else f", {engine}")
        grid = OTHER_GRIDS.get(engine, self.grid)
        if cell not in self.calibration and not self.take_over(cell, kind, size, engine):
            once = []
            refusal: JobFailed | None = None
            for number, point in enumerate(grid, 1):
                self.say(f"calibrating fio: {cell}, {number} of {len(grid)}")
                try:
                    once.append((self.fio(kind, size, point, engine).gb_per_second, point))
                except JobFailed as error:  # fixed buffers need lockable memory
                    refusal = error
            if not once:
                raise refusal or JobFailed("fio has no settings to try")
            once.sort(key=lambda pair: -pair[0])
            again = {point: [seen] for seen, point in once[: max(3, len(once) // 6)]}
            for _ in range(3):
                for point, seen in again.items():
                    seen.append(self.fio(kind, size, point, engine).gb_per_second)
            # The first sample selected them, so it does not count.
            speeds = {point: median(seen[1:]) for point, seen in again.items()}
            self.calibration[cell] = max(speeds, key=lambda point: speeds[point])
            self.calibration_speeds[cell] = {str(p): round(v, 3) for p, v in speeds.items()}
        return self.calibration[cell]

    def take_over(self, cell: str, kind: str, size: int, engine: str) -> bool:
        """Takes the settings of an earlier run if the drive is as fast with them as it was then,
        and returns whether it did. Nothing else tells two virtual disks apart."""
        if cell not in self.stored:
            return False
        point, then = self.stored[cell]
        now = median(self.fio(kind, size, point, engine).gb_per_second for _ in range(3))
        if drive_differs(then, now):
            self.say.step(f"{cell}: {now:.1f} GB/s, but it was {then:.1f}; calibrating fio again")
            return False
        self.calibration[cell] = point
        self.calibration_speeds[cell] = {str(point): round(now, 3)}
        return True

    def settle(self) -> None:
        """Calibrates for --quick before the first pair, so that no pair waits for it."""
        for kind in ("read", "write"):
            self.best_point(kind, self.large)
            self.our_point(kind)

    def fio_best(self, kind: str, size: int, engine: str = "io_uring") -> Sample:
        return self.fio(kind, size, self.best_point(kind, size, engine), engine)

    def fio_best_cpu(self, kind: str) -> Sample:
        best = self.best_point(kind, self.large)
        return self.fio_cpu(kind, FioPoint(best.block_bytes, best.depth, True))

    def our_point(self, kind: str) -> FioPoint:
        """Our block size and queue depth."""
        if kind not in self.our_points:
            ours = self.pinned(kind, self.large)
            whole = ours.request_bytes // 4096 * 4096
            self.our_points[kind] = FioPoint(whole, ours.queue_depth, True)
        return self.our_points[kind]

    def fio_like_ours(self, kind: str) -> Sample:
        return self.fio(kind, self.large, self.our_point(kind))

    def fio_like_ours_cpu(self, kind: str) -> Sample:
        return self.fio_cpu(kind, self.our_point(kind))

    def fio_cpu(self, kind: str, point: FioPoint) -> Sample:
        return fio_large(self.file(kind), point, kind, self.large, self.cpu_passes, continuous=True)

    def pinned(self, kind: str, size: int, *options: str) -> Sample:
        if kind == "new":
            return self.ferry.new_files(self.new_file, size, NEW_FILES[size])
        return self.ferry.large(self.file(kind), kind, size, self.passes[size], *options)

    def calls(self, mode: str, size: int, memory: str) -> Sample:
        self.seed += 1
        return self.ferry.calls(
            self.read_file, mode, size, CALL_FILE_BYTES, self.count(size), memory, self.seed
        )

    def count(self, size: int) -> int:
        return CALLS[size] // self.calls_share

    def psync(self, size: int) -> Sample:
        return fio_calls(self.read_file, size, CALL_FILE_BYTES, self.count(size))
