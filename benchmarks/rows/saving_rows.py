"""The rows of compare.py about saves in the background and snapshots."""

from __future__ import annotations

from functools import partial

from benchmarks.jobs.job import Sample, size_text
from benchmarks.jobs.job_process import JobProcess
from benchmarks.jobs.peers import Peers
from benchmarks.rows.bench import Bench
from benchmarks.rows.pairs import Target
from benchmarks.rows.row import Row, milliseconds, seconds

COMPUTED = 60  # steps
LARGE, SMALL = 200_000_000, 8_000_000  # parameters: 1.6 GB of states, and 64 MB for many steps
STEPS = 1000
TAKE_SECONDS = 0.1


def saving_rows(bench: Bench, peers: Peers) -> list[Row]:
    folder = str(bench.read_file.parent)

    def process(run: str) -> JobProcess:
        made = JobProcess("saving_jobs.py", run, peers, "torch", folder)
        bench.at_end.append(made.end)
        return made

    rows = background_rows(process("saves"), bench.large)
    if bench.quick:
        return rows
    return rows + snapshot_rows(*map(process, ("fresh", "aged", "checked", "plain")))


def background_rows(saves: JobProcess, size: int) -> list[Row]:
    compute = partial(saves.run, "compute", size=size, repeat=COMPUTED)
    return [
        Row(
            f"compute-bound step beside a checkpoint of {size_text(size)} written all the time / "
            "alone",
            "ms",
            Target(1.05, at_least=False),
            partial(compute, saved=True),
            partial(compute, saved=False),
            milliseconds,
            peer="torch",
        ),
        Row(
            f"call of checkpoint.save(wait=False), {size_text(size)} / copying the bytes",
            "ms",
            Target(1.2, at_least=False),
            partial(saves.run, "call", size=size),
            partial(saves.run, "copy", size=size),
            milliseconds,
            peer="torch",
        ),
    ]


def snapshot_rows(
    fresh: JobProcess, aged: JobProcess, checked: JobProcess, plain: JobProcess
) -> list[Row]:
    def step(process: JobProcess, **options: bool) -> Sample:
        """A step; then the process gives its memory back, which is too much for all of them."""
        sample = process.run("train", parameters=LARGE, repeat=3, **options)
        process.run("release")
        return sample

    def take() -> Sample:
        sample = plain.run("take", parameters=LARGE)
        plain.run("release")
        return sample

    return [
        Row(
            f"step after {STEPS} steps with a snapshot every 10 / of a new run",
            "ms",
            Target(1 / 0.97, at_least=False),
            partial(aged.run, "train_on", parameters=SMALL, repeat=40, steps=STEPS),
            partial(fresh.run, "train", parameters=SMALL, repeat=40),
            milliseconds,
            peer="torch",
        ),
        Row(
            f"snapshot.take, 1.6 GB of states on NVMe / {TAKE_SECONDS} s",
            "ms",
            Target(1.0, at_least=False),
            take,
            lambda: Sample(repetition_seconds=TAKE_SECONDS),
            milliseconds,
            peer="torch",
        ),
        Row(
            "AdamW step, 200 M parameters, states on NVMe, with checksums / without",
            "s",
            Target(1.03, at_least=False),
            partial(step, checked, checksums=True),
            partial(step, plain),
            seconds,
            peer="torch",
        ),
    ]
