#!/usr/bin/env python3
"""Ranks that share a drive: eight processes, each with a swap space of its own as a rank of a
training has it, against one that moves the same bytes. Needs neither torch nor a GPU.

What they do is what a step does: each rank reads tensors, or writes them, or does both in turn, a
few at a time. The drive is one of the machine, so compare only the ratios of a run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import mean, median
from typing import TYPE_CHECKING

from benchmarks.figures.paired import HEAD, row
from benchmarks.jobs.job import GIB, MIB
from benchmarks.rows.pairs import Target, figure

if TYPE_CHECKING:
    from tensorferry import Operation, SwapBuffer, SwapSpace

RANKS = 8
TENSOR_BYTES = 16 * MIB
IN_FLIGHT = 4  # tensors of a rank
TOTAL_BYTES = 2 * GIB  # of all ranks together
KINDS = ("read", "write", "read and write")
WORK = "import sys; from benchmarks.figures.rank_figures import serve; serve(*sys.argv[1:])"


def serve(directory: str, rank: str, total: str) -> None:
    """A rank: reads the name of what to do, does it, and writes its seconds."""
    import tensorferry

    count = int(total) // TENSOR_BYTES
    buffer_bytes = IN_FLIGHT * TENSOR_BYTES
    with tensorferry.SwapSpace(
        directory, buffer_bytes=buffer_bytes, run="figures", rank=int(rank)
    ) as space:
        memory = [space.take(TENSOR_BYTES) for _ in range(IN_FLIGHT)]
        _move(space, memory, ["put"] * count)
        print("ready", flush=True)
        calls = {
            "read": ["get"] * count,
            "write": ["put"] * count,
            "read and write": ["get", "put"] * (count // 2),
        }
        for line in sys.stdin:
            begin = time.perf_counter()
            _move(space, memory, calls[line.strip()])
            print(time.perf_counter() - begin, flush=True)


def _move(space: SwapSpace, memory: list[SwapBuffer], calls: list[str]) -> None:
    going: dict[int, Operation] = {}  # by slot
    for number, call in enumerate(calls):
        slot = number % IN_FLIGHT
        if slot in going:
            going[slot].wait()
        going[slot] = getattr(space, call)(f"{number}", memory[slot])
    for operation in going.values():
        operation.wait()


def _answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


class Ranks:
    """Processes that move `total` bytes together."""

    def __init__(self, directory: str, count: int, total: int) -> None:
        words = (sys.executable, "-c", WORK, directory)
        self._processes = [
            subprocess.Popen(
                [*words, str(rank), str(total // count)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(count)
        ]
        for process in self._processes:
            if _answer(process) != "ready":
                raise RuntimeError("a rank could not begin: its error is above")
        self.slowest: dict[str, list[float]] = {kind: [] for kind in KINDS}  # against the mean

    def seconds(self, kind: str) -> float:
        """Until the last rank has moved its bytes."""
        for process in self._processes:
            print(kind, file=process.stdin, flush=True)
        took = [float(_answer(process)) for process in self._processes]
        self.slowest[kind].append(1 / max(took) / mean(1 / each for each in took))
        return max(took)

    def close(self) -> None:
        for process in self._processes:
            process.communicate(timeout=60)  # the end of its input is its end


@contextmanager
def ranks(directory: str, count: int, total: int) -> Iterator[Ranks]:
    several = Ranks(directory, count, total)
    try:
        yield several
    finally:
        several.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", default=None, help="on the drive; default: a temporary one")
    parser.add_argument("--pairs", type=int, default=20)
    options = parser.parse_args()
    print(HEAD)
    with ExitStack() as at_end:
        directory = options.directory or at_end.enter_context(tempfile.TemporaryDirectory())
        many = at_end.enter_context(ranks(directory, RANKS, TOTAL_BYTES))
        one = at_end.enter_context(ranks(directory, 1, TOTAL_BYTES))
        for kind in KINDS:
            name = f"{RANKS} ranks on a drive, {kind} / one rank"
            ours, other = partial(many.seconds, kind), partial(one.seconds, kind)
            row(name, ours, other, options.pairs, Target(0.95, at_least=True))
            told = figure(many.slowest[kind][1:], Target(0.8, at_least=True))
            print(
                f"{f'the slowest of {RANKS} ranks, {kind} / their mean':64} {'':9} {'':9}    "
                f"{told.ratio:6.3f}  {told.low:.3f} to {told.high:.3f}  {told.verdict} (median of "
                f"{len(many.slowest[kind]) - 1}: {median(many.slowest[kind][1:]):.3f})"
            )


if __name__ == "__main__":
    main()
