"""The rows of compare.py about optimizers and weights on NVMe."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from benchmarks.jobs.job import GIB, FioPoint, Sample, fio_large
from benchmarks.jobs.job_process import JobProcess
from benchmarks.jobs.peers import Peers
from benchmarks.rows.bench import Bench
from benchmarks.rows.pairs import Target
from benchmarks.rows.row import Row, seconds

STEP_BYTES = 1_600_000_000  # moments of 200 M parameters in fp32, each way
INT8_BYTES = 806_250_000  # lower halves of masters and moments in 8 bits of as many in bf16
STEPS = 3
PASSES = 8  # a pass takes a fifth of a second: fewer would measure the drive's swings


def fio_pass(bench: Bench, kind: str, size: int, point: FioPoint | None = None) -> Sample:
    """How long fio takes to move `size` bytes, at `point` or at its best settings, in one of many
    passes that do not drain the queue between them."""
    point = point or bench.best_point(kind, GIB)
    if kind == "read":
        drive = fio_large(bench.read_file, point, kind, GIB, PASSES, continuous=True)
    else:
        drive = bench.fio(kind, GIB, point)
    return Sample(repetition_seconds=size / 1e9 / drive.gb_per_second, engine="fio")


def slower(drive: Sample, compute: Sample) -> Sample:
    return max(drive, compute, key=lambda sample: sample.repetition_seconds)


def beside(
    bench: Bench, memory: JobProcess, kind: str, size: int, job: str, **options: Any
) -> Sample:
    """fio, while torch computes once for every `size` bytes that fio moves. fio uses our blocks and
    depth: buffers that stay in the cache would leave the memory bandwidth to torch."""
    point = bench.our_point("read")
    begin = time.monotonic()
    alone = fio_pass(bench, kind, size, point).repetition_seconds
    count = 1 + int((time.monotonic() - begin) / alone)  # as long as fio runs
    memory.run(job, repeat=1, **options)
    with ThreadPoolExecutor(1) as pool:
        computing = pool.submit(memory.run, job, repeat=count, every=alone, **options)
        drive = fio_pass(bench, kind, size, point)
        computing.result()
    memory.run("release")
    return drive


def offload_rows(bench: Bench, peers: Peers) -> list[Row]:
    folder = str(bench.read_file.parent)
    ours = JobProcess("offload_jobs.py", "tensorferry", peers, "torch", folder)
    memory = JobProcess("offload_jobs.py", "torch", peers, "torch", folder)
    theirs = JobProcess("offload_jobs.py", "deepspeed", peers, "DeepSpeed", folder)
    others = JobProcess("offload_jobs.py", "tensorferry", peers, "torch", folder)
    bench.at_end += [ours.end, memory.end, theirs.end, others.end]
    return [
        *step_rows(bench, ours, memory, theirs),
        *kept_rows(ours, others, memory),
        *cut_rows(ours, others),
        *int8_rows(bench, ours, others),
        *inference_rows(bench, ours, memory),
    ]


def step_rows(bench: Bench, ours: JobProcess, memory: JobProcess, theirs: JobProcess) -> list[Row]:
    def limit() -> Sample:
        """The slower of the drive alone and the computation alone."""
        drive = fio_pass(bench, "mix", 2 * STEP_BYTES)
        compute = memory.run("step", repeat=STEPS)
        memory.run("release")
        return slower(drive, compute)

    step = partial(ours.run, "step", repeat=STEPS)
    return [
        Row(
            "AdamW step, 200 M parameters in fp32, states on NVMe / the drive or torch alone",
            "s",
            Target(1.10, at_least=False),
            step,
            limit,
            seconds,
            peer="torch",
        ),
        Row(
            "AdamW step, 200 M parameters in fp32, states on NVMe / fio beside torch",
            "s",
            None,
            step,
            partial(beside, bench, memory, "mix", 2 * STEP_BYTES, "step"),
            seconds,
            peer="torch",
        ),
        Row(
            "AdamW step, 200 M parameters in fp32 / DeepSpeed ZeRO-3 on NVMe",
            "s",
            Target(0.5, at_least=False),
            step,
            partial(theirs.run, "step", repeat=1),
            seconds,
            peer="DeepSpeed",
        ),
    ]


def released(process: JobProcess, **options: Any) -> Sample:
    """Steps; then the process gives its memory back, because with that of the others it is too
    much."""
    sample = process.run("step", repeat=STEPS, **options)
    process.run("release")
    return sample


def kept_rows(ours: JobProcess, others: JobProcess, memory: JobProcess) -> list[Row]:
    rows: list[tuple[str, str, float, Callable[[], Sample]]] = [
        (
            "half of the states in memory / all on NVMe",
            "8 bytes, half in memory",
            0.55,
            partial(released, others, form="8 bytes"),
        ),
        ("all states in memory / torch's own", "8 bytes in memory", 1.1, partial(released, memory)),
    ]
    return [
        Row(
            f"AdamW step, 200 M parameters in fp32, {words}",
            "s",
            Target(most, at_least=False),
            partial(ours.run, "step", repeat=STEPS, form=form),
            other,
            seconds,
            peer="torch",
        )
        for words, form, most, other in rows
    ]


def cut_rows(ours: JobProcess, others: JobProcess) -> list[Row]:
    """Fewer bytes beside whole masters and moments in fp32."""
    rows = [
        ("masters cut, states on NVMe", "10 bytes", 1 / 1.12),
        (
            "masters cut, moments in 8 bits, half of the states in memory",
            "4 bytes, half in memory",
            0.20,
        ),
    ]
    return [
        Row(
            f"AdamW step, 200 M parameters in bf16, {words} / 12 bytes per parameter on NVMe",
            "s",
            Target(most, at_least=False),
            partial(ours.run, "step", repeat=STEPS, form=form),
            partial(released, others, form="12 bytes"),
            seconds,
            peer="torch",
        )
        for words, form, most in rows
    ]


def int8_rows(bench: Bench, ours: JobProcess, others: JobProcess) -> list[Row]:
    def limit() -> Sample:
        """The slower of the drive alone and the same arithmetic with all states in memory."""
        drive = fio_pass(bench, "mix", 2 * INT8_BYTES)
        return slower(drive, released(others, form="4 bytes in memory"))

    rows: list[tuple[str, Target | None, Callable[[], Sample]]] = [
        ("the drive or torch alone", Target(1.10, at_least=False), limit),
        ("12 bytes per parameter", None, partial(released, others, form="12 bytes")),
        ("10 bytes per parameter", None, partial(released, others, form="10 bytes")),
    ]
    return [
        Row(
            "AdamW step, 200 M parameters in bf16, masters cut, moments in 8 bits, states on NVMe "
            f"/ {against}",
            "s",
            target,
            partial(ours.run, "step", repeat=STEPS, form="4 bytes"),
            other,
            seconds,
            peer="torch",
        )
        for against, target, other in rows
    ]


def inference_rows(bench: Bench, ours: JobProcess, memory: JobProcess) -> list[Row]:
    last: dict[int, Sample] = {}

    def our_pass(batch: int) -> Sample:
        last[batch] = ours.run("infer", rows=batch, repeat=PASSES)
        return last[batch]

    def read_bytes(batch: int) -> int:
        known = last.get(batch) or our_pass(batch)
        return int(known.gb_per_second * 1e9 * known.repetition_seconds)

    def limit(batch: int) -> Sample:
        drive = fio_pass(bench, "read", read_bytes(batch))
        compute = memory.run("infer", rows=batch, repeat=PASSES)
        memory.run("release")
        return slower(drive, compute)

    rows = [
        Row(
            "inference, weights 3x the memory for them / fio beside torch",
            "s",
            None,
            partial(our_pass, 1),
            lambda: beside(bench, memory, "read", read_bytes(1), "infer", rows=1),
            seconds,
            peer="torch",
        )
    ]
    for batch, name in ((1, "the drive is the limit"), (128, "the processor is")):
        rows.append(
            Row(
                f"inference, weights 3x the memory for them, {name} / the drive or torch alone",
                "s",
                Target(1.10, at_least=False),
                partial(our_pass, batch),
                partial(limit, batch),
                seconds,
                peer="torch",
            )
        )
    return rows
