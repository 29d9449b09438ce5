"""The rows of compare.py about checkpoints: against other loaders and savers, fio and ourselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.jobs.job import Sample, fio_large, fio_new_files, size_text
from benchmarks.jobs.job_process import JobProcess
from benchmarks.jobs.peers import Peers
from benchmarks.rows.bench import Bench
from benchmarks.rows.pairs import Target
from benchmarks.rows.row import Row, read_bytes, seconds, speed

LAYOUTS = {"32": "32 tensors", "mixed": "2,000 mixed tensors"}
# The way to load, its side in checkpoint_jobs.py, the format. One row each: to be as fast as
# the best of them is to be as fast as each.
LOADERS = [
    ("safetensors", "safetensors", "safetensors"),
    ("torch.load(mmap=True)", "torch", "pt"),
    ("fastsafetensors", "fastsafetensors", "safetensors"),
    ("runai-model-streamer", "runai-model-streamer", "safetensors"),
]
OUR_NAMES = {
    ("save", "safetensors"): "save_file",
    ("save", "pt"): "checkpoint.save",
    ("load", "safetensors"): "load_file",
    ("load", "pt"): "checkpoint.load",
}
PARTS = {"every_second": "every second of", "half_the_rows": "half the rows of"}


class Checkpoints:
    """The processes that save and load, on files of `bench.large` bytes in one folder."""

    def __init__(self, bench: Bench, peers: Peers) -> None:
        self.bench = bench
        self.peers = peers
        self.size = bench.large
        self.folder = bench.read_file.parent
        self.ours = self.process("tensorferry", "torch")

    def process(self, side: str, peer: str, program: str = "checkpoint_jobs.py") -> JobProcess:
        made = JobProcess(program, side, self.peers, peer, str(self.folder))
        self.bench.at_end.append(made.end)
        return made

    def fio_read(self, form: str, layout: str) -> Sample:
        """fio at its best, on the file that the other side loads."""
        file = self.ours.answer("file", form=form, layout=layout, size=self.size)["path"]
        point = self.bench.best_point("read", self.size)
        return fio_large(Path(file), point, "read", self.size, self.bench.passes[self.size])

    def fio_write(self) -> Sample:
        """fio at its best, writing a new file and syncing it."""
        point = self.bench.best_point("new", self.size)
        return fio_new_files([self.bench.new_file], point, self.size, sync=True)


def checkpoint_rows(bench: Bench, peers: Peers) -> list[Row]:
    """All rows; with --quick those of 32 tensors and one process alone."""
    made = Checkpoints(bench, peers)
    layouts = ["32"] if bench.quick else list(LAYOUTS)
    rows = load_rows(made, layouts) + part_rows(made, layouts) + save_rows(made)
    rows += checksum_rows(made)
    return rows if bench.quick else rows + dcp_rows(made)


def load_rows(made: Checkpoints, layouts: list[str]) -> list[Row]:
    rows = []
    sides = {side: made.process(side, side) for _, side, _ in LOADERS}
    for layout in layouts:
        what = f"{size_text(made.size)} in {LAYOUTS[layout]}"
        options = {"layout": layout, "size": made.size}

        def row(
            name: str, form: str, target: float, other: Callable[[], Sample], peer: str, **how: bool
        ) -> Row:
            ours = partial(made.ours.run, "load", form=form, **options, **how)  # noqa: B023
            return Row(name, "GB/s", Target(target, at_least=True), ours, other, speed, peer=peer)

        for name, side, form in LOADERS:
            theirs = partial(sides[side].run, "load", form=form, **options)
            call = OUR_NAMES["load", form]
            rows.append(row(f"{call}, {what} / {name}", form, 1.0, theirs, side))
        one = partial(
            sides["safetensors"].run, "load", form="safetensors", one_by_one=True, **options
        )
        name = f"get_tensor one by one, {what} / safetensors"
        rows.append(row(name, "safetensors", 1.0, one, "safetensors", one_by_one=True))
        for form in ("safetensors", "pt"):
            fio = partial(made.fio_read, form, layout)
            rows.append(row(f"{OUR_NAMES['load', form]}, {what} / fio", form, 0.9, fio, "torch"))
    return rows


def part_rows(made: Checkpoints, layouts: list[str]) -> list[Row]:
    """Parts of a file: how many bytes the drive reads for them, and how fast."""
    rows = []
    for layout in layouts:
        for part, words in PARTS.items():
            what = f"{words} {LAYOUTS[layout]}, {size_text(made.size)}"
            load = partial(made.ours.run, "part", what=part, layout=layout, size=made.size)
            rows += [
                Row(
                    f"bytes read, {what} / asked for",
                    "MiB",
                    Target(1.02, at_least=False),
                    load,
                    Sample,  # the same job says both numbers
                    read_bytes,
                    peer="torch",
                ),
                Row(
                    f"load {what} / fio",
                    "GB/s",
                    Target(0.85, at_least=True),
                    load,
                    partial(made.fio_read, "safetensors", layout),
                    speed,
                    peer="torch",
                ),
            ]
    return rows


def save_rows(made: Checkpoints) -> list[Row]:
    """Durable saves with checksums. torch.save is followed by fsync, as fio is."""
    torch = made.process("torch", "torch")
    options = {"layout": "32", "size": made.size}
    what = f"{size_text(made.size)} in {LAYOUTS['32']}, with checksums"
    rows = []
    for form in ("safetensors", "pt"):
        ours = partial(made.ours.run, "save", form=form, **options)
        theirs = partial(torch.run, "save", form="pt", **options)
        for other, factor, side in (
            ("fio, a new file with fsync", 0.95, made.fio_write),
            ("torch.save and fsync", 4.0, theirs),
        ):
            name = f"{OUR_NAMES['save', form]}, {what} / {other}"
            target = Target(factor, at_least=True)
            rows.append(Row(name, "GB/s", target, ours, side, speed, peer="torch"))
    return rows


def checksum_rows(made: Checkpoints) -> list[Row]:
    rows = []
    for job, option in (("save", "checksums"), ("load", "verify")):
        for form in ("safetensors", "pt"):
            run = partial(made.ours.run, job, form=form, layout="32", size=made.size)
            what = f"{OUR_NAMES[job, form]}, {size_text(made.size)} in {LAYOUTS['32']}"
            rows.append(
                Row(
                    f"{what}, with checksums / without",
                    "s",
                    Target(1.03, at_least=False),
                    partial(run, **{option: True}),
                    partial(run, **{option: False}),
                    seconds,
                    peer="torch",
                )
            )
    return rows


def dcp_rows(made: Checkpoints) -> list[Row]:
    """The target is three times torch, or 0.9 of fio if the drive allows no more."""
    ours = made.process("tensorferry", "torch", "dcp_jobs.py")
    theirs = made.process("torch", "torch", "dcp_jobs.py")
    fio: dict[str, Callable[[], Sample]] = {
        "save": made.fio_write,
        "load": partial(made.fio_read, "safetensors", "32"),
    }
    rows = []
    for job, peer in (("save", "torch's FileSystemWriter"), ("load", "torch's FileSystemReader")):
        sides: list[tuple[str, float, Callable[[], Sample]]] = [
            (peer, 3.0, partial(theirs.run, job, size=made.size)),
            ("fio, a new file with fsync" if job == "save" else "fio", 0.9, fio[job]),
        ]
        for other, factor, side in sides:
            name = f"DCP {job}, 2 ranks, {size_text(made.size)} / {other}"
            mine = partial(ours.run, job, size=made.size)
            target = Target(factor, at_least=True)
            row = Row(name, "GB/s", target, mine, side, speed, peer="torch", kernel_works=True)
            rows.append(row)
    return rows
