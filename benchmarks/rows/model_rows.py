"""The rows of compare.py about models of transformers that run from their checkpoint."""

from __future__ import annotations

from functools import partial

from benchmarks.jobs.job import Sample
from benchmarks.jobs.job_process import JobProcess
from benchmarks.jobs.peers import Peers
from benchmarks.rows.bench import Bench
from benchmarks.rows.offload_rows import fio_pass, slower
from benchmarks.rows.pairs import Target
from benchmarks.rows.row import Row, memory, seconds

PEER = "transformers"
PASSES = 6
MANY_TOKENS = 192  # so that the processor is the limit


class Models:
    """The processes that run the model, all from one folder."""

    def __init__(self, bench: Bench, peers: Peers) -> None:
        folder = str(bench.read_file.parent)
        self.bench = bench
        self.ours, self.memory, self.accelerate = (
            JobProcess("model_jobs.py", side, peers, PEER, folder)
            for side in ("tensorferry", "transformers", "accelerate")
        )
        bench.at_end += [self.ours.end, self.memory.end, self.accelerate.end]
        self.last: dict[str, Sample] = {}

    def forward(self, tokens: int) -> Sample:
        self.last["forward"] = self.ours.run("forward", tokens=tokens, repeat=PASSES)
        return self.last["forward"]

    def in_memory(self, tokens: int) -> Sample:
        sample = self.memory.run("forward", tokens=tokens, repeat=PASSES)
        self.memory.run("release")
        return sample

    def generate(self) -> Sample:
        self.last["generate"] = self.ours.run("generate", share=0.5, repeat=PASSES)
        return self.last["generate"]

    def drive(self, job: str) -> Sample:
        """fio, reading the bytes of the last job once."""
        known = self.last.get(job) or (self.forward(1) if job == "forward" else self.generate())
        read = int(known.gb_per_second * 1e9 * known.repetition_seconds)
        return fio_pass(self.bench, "read", read)

    def generation_limit(self) -> Sample:
        compute = self.ours.run("generate", share=1.2, repeat=PASSES)
        return slower(self.drive("generate"), compute)

    def given(self) -> Sample:
        return Sample(memory_bytes=self.ours.run("checkpoint").memory_bytes / 4)


def model_rows(bench: Bench, peers: Peers) -> list[Row]:
    made = Models(bench, peers)
    what = "Llama of 1 GB from its checkpoint, weights 4x the memory for them"
    one, many = partial(made.forward, 1), partial(made.forward, MANY_TOKENS)
    most = partial(Target, at_least=False)
    rows = [
        Row(
            f"{what}, one token / fio", "s", most(1.10), one, lambda: made.drive("forward"), seconds
        ),
        Row(
            f"{what}, {MANY_TOKENS} tokens / transformers in memory",
            "s",
            most(1.05),
            many,
            partial(made.in_memory, MANY_TOKENS),
            seconds,
        ),
        Row(f"{what}, memory / given", "MiB", most(1.0), one, made.given, memory),
        Row(
            "Llama of 1 GB that fits, first token from cold / transformers",
            "s",
            most(0.8),
            partial(made.ours.run, "first_token"),
            partial(made.memory.run, "first_token"),
            seconds,
        ),
        Row(
            "generation, half of 1 GB of keys and values on NVMe / the drive or torch alone",
            "s",
            most(1.10),
            made.generate,
            made.generation_limit,
            seconds,
        ),
    ]
    for cold in (True, False):
        theirs = partial(made.accelerate.run, "forward", tokens=1, repeat=2, cold=cold)
        name = f"{what}, one token / accelerate's disk_offload, {'cold' if cold else 'warm'}"
        rows.append(Row(name, "s", most(1 / 3), one, theirs, seconds))
    for row in rows:
        row.peer = PEER
    return rows
