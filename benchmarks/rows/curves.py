"""The curves of compare.py: speed and cost by depth, block size, workers, size and number.

A curve has several lines over the same points. Each round measures all points and lines in turn, so
that every point sees the whole span of time. The value of a point is the median of its rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median

from benchmarks.jobs import machine
from benchmarks.jobs.job import GIB, MIB, FioPoint, Sample, fio_calls, fio_large, size_text
from benchmarks.rows.bench import Bench
from benchmarks.rows.pairs import Target
from benchmarks.rows.row import Row, call, descriptors, memory

DEPTHS = (1, 2, 4, 8, 16, 32, 64)
BLOCKS = tuple((64 << 10) << step for step in range(8))  # 64 KiB to 8 MiB
WORKERS = (1, 2, 4)
SIZES = tuple((4 << 10) << (3 * step) for step in range(8))  # 4 KiB to 8 GiB
FILE_BYTES = 256 * MIB
STEPS = 40  # of a million operations; step i of the first half pairs with step i of the second
SHOWN = 10  # points in the picture


@dataclass
class Curve:
    title: str
    x_name: str
    unit: str
    points: tuple[int, ...]
    lines: dict[str, Callable[[int], float]]
    x_text: Callable[[int], str] = str
    taken: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    picture: bool = True  # all lines have the same unit
    left_out: dict[str, str] = field(default_factory=dict)  # points, with the reason

    def measure(self, rounds: int, say: Callable[[str], None]) -> None:
        for number in range(rounds):
            for point in self.points:
                say(f"{self.title}: round {number + 1} of {rounds}, {self.x_text(point)}")
                for name, take in self.lines.items():
                    self.taken.setdefault((name, point), []).append(take(point))

    def value(self, name: str, point: int) -> float:
        return median(self.taken[name, point])

    def table(self) -> tuple[list[str], list[list[str]]]:
        unit = f", {self.unit}" if self.unit else ""
        head = [self.x_name, *(name + unit for name in self.lines)]
        rows = [
            [self.x_text(point), *(f"{self.value(name, point):.3g}" for name in self.lines)]
            for point in self.points
        ]
        return head, rows


def memory_for_one() -> int:
    """The largest tensor to hold in memory here: half of the available memory."""
    return machine.available_memory_bytes() // 2


def passes(size: int) -> int:
    """As many as make half a gigabyte, at most 1000."""
    return max(1, min(1000, GIB // 2 // size))


def curves(bench: Bench) -> list[Curve]:
    return [*setting_curves(bench), size_curve(bench)]


def setting_curves(bench: Bench) -> list[Curve]:
    """Speed by queue depth, block size and number of workers."""
    file = bench.read_file

    def workers(memory: str) -> Callable[[int], float]:
        def take(count: int) -> float:
            words = ("--memory", memory, "--workers", str(count))
            return bench.ferry.large(file, "read", FILE_BYTES, 2, *words).gb_per_second

        return take

    def fio(point: FioPoint) -> float:
        return fio_large(file, point, "read", FILE_BYTES, 4).gb_per_second

    def fixed(name: str, value: int) -> Callable[[int], float]:
        """Our speed with one setting fixed; the point is the other setting."""
        other = "--queue-depth" if name == "--block-bytes" else "--block-bytes"

        def take(point: int) -> float:
            words = (name, str(value), other, str(point))
            return bench.ferry.large(file, "read", FILE_BYTES, 2, *words).gb_per_second

        return take

    return [
        Curve(
            "Queue depth, blocks of 1 MiB, read of 256 MiB",
            "queue depth",
            "GB/s",
            DEPTHS,
            {
                "tensorferry": fixed("--block-bytes", MIB),
                "fio": lambda depth: fio(FioPoint(MIB, depth, True)),
            },
        ),
        Curve(
            "Block size at depth 16, read of 256 MiB",
            "block",
            "GB/s",
            BLOCKS,
            {
                "tensorferry": fixed("--queue-depth", 16),
                "fio": lambda block: fio(FioPoint(block, 16, True)),
            },
            x_text=size_text,
        ),
        Curve(
            "Workers, read of 256 MiB",
            "workers",
            "GB/s",
            WORKERS,
            {
                "page-locked": workers("pinned"),
                "ordinary memory": workers("ordinary"),
            },
        ),
    ]


def size_curve(bench: Bench) -> Curve:
    """Speed by the size of one tensor."""
    file = bench.read_file
    long_file = file.with_name("sizes.bin")  # because the file of the pairs must not change

    def by_size(size: int, memory: str) -> float:
        if size <= MIB:  # at random offsets, one at a time
            sample = bench.ferry.calls(file, "sync", size, GIB, passes(size), memory, 1)
            return size / 1e3 / sample.call_us_mean
        words = ("--memory", memory)
        return bench.ferry.large(long_file, "read", size, passes(size), *words).gb_per_second

    def fio_by_size(size: int) -> float:
        if size <= MIB:
            return size / 1e3 / fio_calls(file, size, GIB, passes(size)).call_us_mean
        best = bench.best_point("read", bench.large)
        point = FioPoint(min(best.block_bytes, size), best.depth, best.fixed_buffers)
        return fio_large(long_file, point, "read", size, passes(size)).gb_per_second

    longest = memory_for_one()
    return Curve(
        "Size of one tensor, one read at a time",
        "bytes",
        "GB/s",
        tuple(size for size in SIZES if size <= longest),
        {
            "page-locked": partial(by_size, memory="pinned"),
            "ordinary memory": partial(by_size, memory="ordinary"),
            "fio, psync up to 1 MiB": fio_by_size,
        },
        x_text=size_text,
        left_out={
            f"one tensor of {size_text(size)}": f"{size_text(2 * size)} of memory must be free"
            for size in SIZES
            if size > longest
        },
    )


def million(bench: Bench, operations: int) -> tuple[Curve, list[Row]]:
    """Reads of 4 KiB, 64 at a time; time, memory and descriptors over the run."""
    step = operations // STEPS
    report = bench.ferry.queue(bench.read_file, GIB, step, STEPS)
    points = tuple(operations // SHOWN * (number + 1) for number in range(SHOWN))
    measured = {
        "us each": [seconds / step * 1e6 for seconds in report["seconds"]],
        "resident MiB": [kib / 1024 for kib in report["resident_kib"]],
        "descriptors": report["descriptors"],
    }
    curve = Curve(
        f"{operations:,} operations of 4 KiB, 64 at a time",
        "operations",
        "",
        points,
        dict.fromkeys(measured, float),
        x_text=lambda point: f"{point:,}",
        picture=False,
    )
    for name, values in measured.items():
        for number, point in enumerate(points):
            curve.taken[name, point] = values[number * STEPS // SHOWN :][: STEPS // SHOWN]
    samples = {
        "us each": ("us", [Sample(call_us_median=us) for us in measured["us each"]], call, 1.05),
        "resident MiB": (
            "MiB",
            [Sample(memory_bytes=kib * 1024) for kib in report["resident_kib"]],
            memory,
            1.01,
        ),
        "descriptors": (
            "",
            [Sample(descriptors=count) for count in report["descriptors"]],
            descriptors,
            1.0,
        ),
    }
    rows = []
    half = STEPS // 2
    for name, (unit, taken, value, limit) in samples.items():
        title = f"{operations:,} operations, {name}: second half / first half"
        target = Target(limit, at_least=False)
        row = Row(title, unit, target, Sample, Sample, value)
        row.pairs = list(zip(taken[half:], taken[:half], strict=True))
        rows.append(row)
    return curve, rows
