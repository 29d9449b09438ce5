"""The rows of compare.py about copies in memory: copy() against memcpy, by size."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from benchmarks.jobs.job import MIB, ROOT, Sample, run, size_text
from benchmarks.rows.pairs import Target
from benchmarks.rows.row import Row, speed

PROGRAM = ROOT / "build" / "release" / "benchmarks" / "copy_benchmark"
REPETITIONS = 5
# From, to, the hint for copy(), sizes. Only streaming must be faster than memcpy; the others must
# not be slower: 1 lies within the interval.
SITUATIONS = [
    ("hot", "cold", "cold", (64 << 10, 256 << 10, MIB, 4 * MIB)),
    ("cold", "cold", "cold", (64 << 10, MIB, 64 * MIB)),
    ("hot", "hot", "any", (4 << 10, 64 << 10, MIB)),
    ("hot", "cold", "any", (4 << 10, 64 << 10, MIB)),
    ("cold", "cold", "any", (4 << 10, 64 << 10, MIB, 64 * MIB)),
]
SLOT = ("hot", "cold", "cold", MIB)


@dataclass
class CopyRow(Row):
    """A pair holds the medians of one run of copy_benchmark, which alternates the two itself."""

    arguments: tuple[str, ...] = ()
    size: int = 0

    def take(self, ours_first: bool) -> None:
        taken = run([str(PROGRAM), str(REPETITIONS), *self.arguments])
        ours, other = (
            Sample(gb_per_second=self.size / 1e9 / median(taken[name]))
            for name in ("copy", "other")
        )
        self.pairs.append((ours, other))


def nothing() -> Sample:
    return Sample()


def copy_rows() -> list[Row]:
    rows: list[Row] = [
        CopyRow(
            "copy 1 MiB, hot to cold, told that it is cold / streaming stores that read nothing",
            "GB/s",
            None,
            nothing,
            nothing,
            speed,
            arguments=("hot", "cold", "cold", str(MIB), "stores"),
            size=MIB,
        )
    ]
    for source, destination, told, sizes in SITUATIONS:
        for size in sizes:
            streamed = (source, destination, told, size) == SLOT
            advice = ", told that it is cold" if told == "cold" else ""
            rows.append(
                CopyRow(
                    f"copy {size_text(size)}, {source} to {destination}{advice} / memcpy",
                    "GB/s",
                    Target(1.5, at_least=True) if streamed else Target(1.0, at_least=True),
                    nothing,
                    nothing,
                    speed,
                    arguments=(source, destination, told, str(size)),
                    size=size,
                )
            )
    return rows
