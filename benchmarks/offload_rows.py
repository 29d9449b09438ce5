"""The rows of compare.py about optimizers and weights on NVMe."""

from __future__ import annotations

from functools import partial

from bench import Bench
from job_process import JobProcess
from jobs import GIB, FioPoint, JobFailed, Sample, fio_options, fio_seconds, run
from pairs import Target
from peers import Peers
from rows import Row, seconds

STEP_BYTES = 1_600_000_000  # moments of 200 M parameters in fp32, each way
STEPS = 3
PASSES = 8  # a pass takes a fifth of a second: fewer tell more of the drive's moods than of it


def fio_mix(bench: Bench, read_bytes: int, written_bytes: int, repeat: int = 1) -> Sample:
    """fio reads one file and writes another at the same time, each at its best settings."""
    command = ["fio", "--output-format=json"]
    for direction, size in (("read", read_bytes), ("write", written_bytes)):
        if size == 0:
            continue
        point: FioPoint = bench.best_point(direction, GIB)
        command += [f"--name={direction}", f"--filename={bench.file(direction)}"]
        command += [*fio_options(point, direction, GIB), f"--io_size={size * repeat}"]
    jobs = run(command)["jobs"]
    took = []
    for job in jobs:
        moved = job[job["jobname"]]["io_bytes"]
        expected = read_bytes if job["jobname"] == "read" else written_bytes
        if moved < expected * repeat:
            raise JobFailed(f"fio moved {moved} bytes, not {expected * repeat}")
        took.append(fio_seconds(job, job["jobname"]) * expected / moved)
    return Sample(repetition_seconds=max(took), engine="fio")


def offload_rows(bench: Bench, peers: Peers) -> list[Row]:
    folder = str(bench.read_file.parent)
    ours = JobProcess("offload_jobs.py", "tensorferry", peers, "torch", folder)
    memory = JobProcess("offload_jobs.py", "torch", peers, "torch", folder)
    theirs = JobProcess("offload_jobs.py", "deepspeed", peers, "DeepSpeed", folder)
    bench.at_end += [ours.end, memory.end, theirs.end]
    last: dict[int, Sample] = {}

    def our_pass(rows: int) -> Sample:
        last[rows] = ours.run("infer", rows=rows, repeat=PASSES)
        return last[rows]

    def step_limit() -> Sample:
        """The slower of the drive alone and the computation alone."""
        drive = fio_mix(bench, STEP_BYTES, STEP_BYTES)
        compute = memory.run("step", repeat=STEPS)
        return max(drive, compute, key=lambda sample: sample.repetition_seconds)

    def pass_limit(rows: int) -> Sample:
        known = last.get(rows) or our_pass(rows)
        read_bytes = int(known.gb_per_second * 1e9 * known.repetition_seconds)
        drive = fio_mix(bench, read_bytes, 0, PASSES)
        compute = memory.run("infer", rows=rows, repeat=PASSES)
        return max(drive, compute, key=lambda sample: sample.repetition_seconds)

    step = partial(ours.run, "step", repeat=STEPS)
    rows = [
        Row(
            "AdamW step, 200 M parameters in fp32, states on NVMe / the drive or torch alone",
            "s",
            Target(1.10, at_least=False),
            step,
            step_limit,
            seconds,
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
    for batch, name in ((4, "the drive is the limit"), (128, "the processor is")):
        rows.append(
            Row(
                f"inference, weights 3x the memory for them, {name} / the drive or torch alone",
                "s",
                Target(1.10, at_least=False),
                partial(our_pass, batch),
                partial(pass_limit, batch),
                seconds,
            )
        )
    return rows
