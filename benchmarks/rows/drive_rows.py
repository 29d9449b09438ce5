"""The rows of compare.py that need no torch: the library against fio and against itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.jobs.job import GIB, MIB, Sample, fio_queue, fio_together, size_text
from benchmarks.rows.bench import CALLS, Bench
from benchmarks.rows.pairs import Target
from benchmarks.rows.row import Row, call, call_less_open, cpu, speed

Job = Callable[[], Sample]
QUEUE_COUNT = 50_000


def large_rows(bench: Bench) -> list[Row]:
    names = {"read": "read", "write": "overwrite", "new": "write of a new file"}
    rows = []

    def add(name: str, target: Target | None, ours: Job, other: Job) -> None:
        rows.append(Row(name, "GB/s", target, ours, other, speed))

    def pinned(kind: str, size: int, *options: str) -> Job:
        return partial(bench.pinned, kind, size, *options)

    def of_memory(kind: str, size: int, memory: str) -> Job:
        return pinned(kind, size, "--memory", memory)

    for kind, name in names.items():
        for size in bench.sizes:
            what = f"page-locked {name}, {size_text(size)} / fio"
            fio = partial(bench.fio_best, kind, size)
            add(what, Target(0.98, at_least=True), pinned(kind, size), fio)
    # fio may be fastest with few buffers, which stay in the cache; a tensor does not.
    for kind in ("read", "write"):
        what = f"page-locked {names[kind]}, {size_text(bench.large)} / fio"
        fio = partial(bench.fio_like_ours, kind)
        add(f"{what} with our blocks and depth", None, pinned(kind, bench.large), fio)
    # Both sides allocate blocks while the clock runs.
    new = bench.large
    what = f"page-locked {names['new']}, {size_text(new)} / fio that does not preallocate"

    def fio_without() -> Sample:
        return bench.fio_new(new, bench.best_point("new", new), preallocate=False)

    add(what, None, pinned("new", new), fio_without)
    for kind in ("read", "write"):
        for size in bench.sizes:
            what = f"ordinary memory {names[kind]}, {size_text(size)} / page-locked"
            ordinary = of_memory(kind, size, "ordinary")
            add(what, Target(0.90, at_least=True), ordinary, pinned(kind, size))
    # The limit of ordinary memory: page-locked transfers beside the same copies.
    for kind in ("read", "write"):
        size = bench.large
        what = f"ordinary memory {names[kind]}, {size_text(size)} / page-locked"
        beside = pinned(kind, size, "--beside-copies")
        ordinary = of_memory(kind, size, "ordinary")
        add(f"{what} while another thread copies as much", None, ordinary, beside)
    for memory, name in (("pinned", "page-locked"), ("ordinary", "reused")):
        for size in bench.sizes:
            fresh = of_memory("read", size, "fresh")
            what = f"fresh memory read, {size_text(size)} / {name}"
            add(what, None, fresh, of_memory("read", size, memory))
    return rows


def call_rows(bench: Bench) -> list[Row]:
    rows = []
    # Larger calls go to the engine; they have no target.
    target = {size: Target(1.25, at_least=False) for size in CALLS if size <= MIB}
    # As several requests at once, which is faster than one; fio makes one.
    target_split = Target(0.67, at_least=False)
    for memory, name in (("pinned", "page-locked"), ("ordinary", "ordinary memory")):
        for size in CALLS:
            rows.append(
                Row(
                    f"synchronous read on a File, {name}, {size_text(size)} / fio psync",
                    "us",
                    target_split if (memory, size) == ("pinned", MIB) else target.get(size),
                    partial(bench.calls, "sync", size, memory),
                    partial(bench.psync, size),
                    call,
                )
            )
    for size in CALLS:
        rows.append(
            Row(
                f"synchronous read by path less open and close, {size_text(size)} / fio psync",
                "us",
                target.get(size),
                partial(bench.calls, "path", size, "pinned"),
                partial(bench.psync, size),
                call_less_open,
            )
        )
    return rows


def cpu_rows(bench: Bench) -> list[Row]:
    """fio with fixed buffers: at its fastest settings, and with our blocks and depth."""
    fio_alternatives = (
        ("at its fastest", bench.fio_best_cpu),
        ("with our blocks", bench.fio_like_ours_cpu),
    )
    return [
        Row(
            f"CPU time, {kind}, page-locked {size_text(bench.large)} / fio {name}",
            "ms/GB",
            Target(1.1, at_least=False),
            partial(bench.ferry.large, bench.file(kind), kind, bench.large, bench.cpu_passes),
            partial(other, kind),
            cpu,
        )
        for kind in ("read", "write")
        for name, other in fio_alternatives
    ]


def engine_rows(bench: Bench) -> list[Row]:
    return [
        Row(
            f"{engine} {kind}, page-locked {size_text(bench.large)} / io_uring",
            "GB/s",
            Target(target, at_least=True),
            partial(bench.pinned, kind, bench.large, "--engine", engine),
            partial(bench.pinned, kind, bench.large, "--engine", "io_uring"),
            speed,
        )
        for engine, target in (("libaio", 0.9), ("threads", 0.8))
        for kind in ("read", "write")
    ]


def other_engine_rows(bench: Bench) -> list[Row]:
    """fio with its other engines, each at its best block size and depth."""
    return [
        Row(
            f"page-locked {name}, {size_text(bench.large)} / fio {engine}",
            "GB/s",
            None,
            partial(bench.pinned, kind, bench.large),
            partial(bench.fio_best, kind, bench.large, engine),
            speed,
        )
        for engine in ("libaio", "psync")
        for kind, name in (("read", "read"), ("write", "overwrite"))
    ]


def together_rows(bench: Bench) -> list[Row]:
    """Two threads with one Handle, and two processes with one each; fio has a ring for each."""
    half = bench.large // 2

    def ours(kind: str, how: str) -> Sample:
        file = bench.file(kind)
        if how == "processes":
            return bench.ferry.processes(file, kind, half, 4)
        return bench.ferry.large(file, kind, half, 4, "--threads", "2")

    def fio(kind: str, how: str) -> Sample:
        best = bench.best_point(kind, bench.large)
        return fio_together(bench.file(kind), best, kind, half, 4, how)

    return [
        Row(
            f"two {how}, {name} of {size_text(half)} each / fio with two",
            "GB/s",
            None,
            partial(ours, kind, how),
            partial(fio, kind, how),
            speed,
        )
        for how in ("threads", "processes")
        for kind, name in (("read", "read"), ("write", "overwrite"))
    ]


def shape_rows(bench: Bench) -> list[Row]:
    """Odd sizes at odd offsets, and many small operations at a time."""
    size = 256 * MIB
    odd = ("--offset", "7", "--memory", "ordinary")

    def queue() -> Sample:
        bench.seed += 1
        report = bench.ferry.queue(bench.read_file, GIB, QUEUE_COUNT, 1, bench.seed)
        return Sample(gb_per_second=report["gb_per_second"])

    rows = [
        Row(
            f"ordinary memory, {name} of 13 bytes less than 256 MiB at offset 7 / whole blocks",
            "GB/s",
            None,
            partial(bench.ferry.large, bench.file(kind), kind, size - 13, 8, *odd),
            partial(bench.ferry.large, bench.file(kind), kind, size, 8, "--memory", "ordinary"),
            speed,
        )
        for kind, name in (("read", "read"), ("write", "overwrite"))
    ]
    rows.append(
        Row(
            "operations of 4 KiB, 64 at a time, random reads / fio",
            "GB/s",
            Target(0.95, at_least=True),
            queue,
            partial(fio_queue, bench.read_file, GIB, QUEUE_COUNT),
            speed,
        )
    )
    return rows


def drive_rows(bench: Bench) -> list[Row]:
    return [
        *large_rows(bench),
        *([] if bench.quick else other_engine_rows(bench)),
        *call_rows(bench),
        *cpu_rows(bench),
        *engine_rows(bench),
        *together_rows(bench),
        *shape_rows(bench),
    ]
