"""The rows of compare.py about whole iterations of training: forward, backward, step and drive."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.jobs.job import Sample
from benchmarks.jobs.job_process import JobProcess
from benchmarks.jobs.peers import Peers
from benchmarks.rows.bench import Bench
from benchmarks.rows.offload_rows import fio_pass, slower
from benchmarks.rows.pairs import Target
from benchmarks.rows.row import Row, seconds

STEP_BYTES = 48 * 2048 * 2048 * 8  # moments of the parameters in fp32, each way
AHEAD_BYTES = 4 * (64 << 20)  # that the buffers of a step hold
REPEAT = 3
# Rows of input with which torch takes about as long as the drive, less and more.
BALANCED, FEW, MANY = 240, 8, 960


def iteration_rows(bench: Bench, peers: Peers) -> list[Row]:
    folder = str(bench.read_file.parent)
    ours, memory, theirs = (
        JobProcess("iteration_jobs.py", side, peers, peer, folder)
        for side, peer in (("tensorferry", "torch"), ("torch", "torch"), ("deepspeed", "DeepSpeed"))
    )
    bench.at_end += [ours.end, memory.end, theirs.end]
    return [
        *overlap_rows(bench, ours, memory),
        *stored_rows(bench, ours, memory),
        *activation_rows(bench, ours, memory),
        Row(
            "iteration, 200 M parameters in fp32, states on NVMe / DeepSpeed ZeRO-3 on NVMe",
            "s",
            Target(0.25, at_least=False),
            partial(iterated, ours, BALANCED),
            partial(theirs.run, "iterate", rows=BALANCED, repeat=1),
            seconds,
            peer="DeepSpeed",
        ),
    ]


def iterated(process: JobProcess, rows: int, overlap: str = "iteration") -> Sample:
    return process.run("iterate", rows=rows, repeat=REPEAT, overlap=overlap)


def in_memory(memory: JobProcess, rows: int) -> Sample:
    """The computation alone; then the process gives its memory back."""
    sample = memory.run("iterate", rows=rows, repeat=REPEAT)
    memory.run("release")
    return sample


def overlap_rows(bench: Bench, ours: JobProcess, memory: JobProcess) -> list[Row]:
    def limit(rows: int) -> Sample:
        """The slower of the drive alone and the computation alone."""
        return slower(fio_pass(bench, "mix", 2 * STEP_BYTES), in_memory(memory, rows))

    def limit_of_backward(rows: int) -> Sample:
        """The drive rests in the forward pass, but for what the buffers hold ahead."""
        drive = fio_pass(bench, "mix", 2 * STEP_BYTES)
        forward = memory.run("forward", rows=rows, repeat=REPEAT)
        ahead = drive.repetition_seconds * AHEAD_BYTES / (2 * STEP_BYTES)
        both = forward.repetition_seconds + drive.repetition_seconds - ahead
        sum_of_both = Sample(repetition_seconds=both, engine="fio, torch")
        return slower(slower(drive, sum_of_both), in_memory(memory, rows))

    kinds: list[tuple[str, str, int, float, Callable[[int], Sample]]] = [
        ("backward", "", BALANCED, 1.10, limit_of_backward),
        ("iteration", "", BALANCED, 1.10, limit),
        ("iteration", ", the drive is the limit", FEW, 1.05, limit),
        ("iteration", ", the processor is", MANY, 1.05, limit),
    ]
    rows = [
        Row(
            f'iteration, 200 M parameters in fp32, overlap="{overlap}"{words} / the drive or '
            "torch alone",
            "s",
            Target(most, at_least=False),
            partial(iterated, ours, count, overlap),
            partial(against, count),
            seconds,
            peer="torch",
        )
        for overlap, words, count, most, against in kinds
    ]
    without = Row(
        'iteration, 200 M parameters in fp32, overlap="iteration" / without overlap',
        "s",
        None,
        partial(iterated, ours, BALANCED),
        partial(iterated, ours, BALANCED, ""),
        seconds,
        peer="torch",
    )
    return [*rows, without]


def stored_rows(bench: Bench, ours: JobProcess, memory: JobProcess) -> list[Row]:
    last: list[Sample] = []

    def stored() -> Sample:
        sample = ours.run(
            "iterate", rows=BALANCED, repeat=REPEAT, overlap="iteration", stores_weights=True
        )
        last[:] = [sample]
        return sample

    def limit() -> Sample:
        """The drive moves as much as ours has."""
        known = last[0] if last else stored()
        moved = int(known.gb_per_second * 1e9 * known.repetition_seconds)
        return slower(fio_pass(bench, "mix", moved), in_memory(memory, BALANCED))

    return [
        Row(
            "iteration, 200 M parameters in fp32, states and weights on NVMe, gradients stepped at "
            "once / the drive or torch alone",
            "s",
            Target(1.15, at_least=False),
            stored,
            limit,
            seconds,
            peer="torch",
        )
    ]


def activation_rows(bench: Bench, ours: JobProcess, memory: JobProcess) -> list[Row]:
    last: dict[str, Sample] = {}

    def kept(shape: str) -> Sample:
        sample = memory.run("activate", shape=shape, repeat=1)
        memory.run("release")
        return sample

    def moved(shape: str) -> Sample:
        last[shape] = ours.run("activate", shape=shape, repeat=1)
        return last[shape]

    def limit() -> Sample:
        known = last.get("little") or moved("little")
        size = int(known.gb_per_second * 1e9 * known.repetition_seconds)
        return slower(fio_pass(bench, "mix", size), kept("little"))

    rows: list[tuple[str, float, str, Callable[[], Sample]]] = [
        ("the drive has room / in memory", 1.05, "much", partial(kept, "much")),
        ("the drive has none / the drive or torch alone", 1.10, "little", limit),
    ]
    return [
        Row(
            f"forward and backward, saved activations on NVMe, 4x their memory, {words}",
            "s",
            Target(most, at_least=False),
            partial(moved, shape),
            other,
            seconds,
            peer="torch",
        )
        for words, most, shape, other in rows
    ]
