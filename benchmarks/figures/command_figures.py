#!/usr/bin/env python3
"""The figures of the command: `make command-figures`.

- Its own cost: `tensorferry bench` of 1 MiB reads against the bare calls of the C++ API in a loop
  (`bare_calls`). callgrind counts the instructions of two runs of different length; the difference
  excludes start and end. CPU time is that of the process, in pairs.
- The tuner: `tensorferry tune` against the full grid of its candidates. It measures the grid point
  by point, in two passes, and then the best points against the tuned one in interleaved pairs. The
  figure is the ratio of their speeds, read and write together.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.figures.callgrind import instructions_each
from benchmarks.jobs.job import PROGRAM, ROOT
from benchmarks.jobs.progress import Progress
from benchmarks.rows.pairs import Target, figure

FERRY = ROOT / "build/release/bin/tensorferry"
COUNTED = (300, 800)  # above 256: below it the file of bench grows with the count
TIMED = 4000
POINT_BYTES = 256 << 20
FINALISTS = 3
ENV = os.environ | {"TENSORFERRY_PROFILES": ""}


def run(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, env=ENV)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}")
    return done.stdout


# --- its own cost ---------------------------------------------------------------------------------


def bench(folder: Path, count: int, engine: str) -> list[object]:
    return [
        FERRY,
        "bench",
        "--nvme-path",
        folder,
        "--sizes",
        "1M",
        "--iterations",
        count,
        "--threads",
        "1",
        "--queue-depth",
        "16",
        "--block-size",
        "1M",
        "--engine",
        engine,
    ]


def bare(folder: Path, count: int, engine: str) -> list[object]:
    return [PROGRAM.parent / "bare_calls", folder / "bare.bin", count, engine]


def counted(make, folder: Path) -> float:
    """Instructions per iteration. Both bench and bare_calls make a write and a read in each."""
    # io_uring hangs under valgrind; the command adds the same to every engine.
    return instructions_each(lambda count: make(folder, count, "threads"), COUNTED, ENV)


def cpu_us_per_read(folder: Path) -> tuple[float, float]:
    """(bench, bare) of one pair of runs."""
    results = folder / "bench.json"
    run(*bench(folder, TIMED, "auto"), "--json", results)
    (read,) = [
        one for one in json.loads(results.read_text())["series"] if one["direction"] == "read"
    ]
    ours = read["cpu_seconds_per_gb"] * (1 << 20) / 1e9 * 1e6
    return ours, json.loads(run(*bare(folder, TIMED, "auto")))["read_cpu_us"]


def own_cost(folder: Path, pairs: int, progress: Progress) -> None:
    progress.step("counting instructions")
    with_command = counted(bench, folder)
    without = counted(bare, folder)
    own = (with_command - without) / 2
    print(
        f"instructions per operation: {with_command / 2:.0f} in bench, {without / 2:.0f} bare: "
        f"the command adds {own:.0f}"
    )
    times = []
    for i in range(pairs):
        progress.step(f"CPU time, pair {i + 1} of {pairs}")
        times.append(cpu_us_per_read(folder))
    ratio = figure([ours / plain for ours, plain in times], Target(1.02, at_least=False))
    plain = median(plain for _, plain in times)
    print(
        f"CPU per 1 MiB read: {median(ours for ours, _ in times):.2f} us in bench, {plain:.2f} "
        f"bare: ratio {ratio.ratio:.3f} ({ratio.low:.3f} to {ratio.high:.3f}), target <= 1.02: "
        f"{ratio.verdict}"
    )
    # One instruction per nanosecond is slow; four would be fast.
    print(
        f"at one instruction per nanosecond these {own:.0f} take {own / 1000:.2f} us, "
        f"{own / 1000 / plain * 100:.1f} % of a 1 MiB read's CPU time"
    )


# --- the tuner ------------------------------------------------------------------------------------


def setting(candidate: dict) -> tuple:
    return tuple(candidate[name] for name in ("engine", "block_bytes", "queue_depth", "workers"))


def speed(folder: Path, point: tuple, directions: tuple[str, ...]) -> float:
    """GB/s over all directions, with the same bytes each way."""
    engine, block, depth, workers = point
    seconds = 0.0
    for direction in directions:
        out = folder / "point.json"
        run(
            FERRY,
            "point",
            f"--{direction}_file",
            folder / "tune.bin",
            "--io_size",
            POINT_BYTES,
            "--engine",
            engine,
            "--block_size",
            block,
            "--queue_depth",
            depth,
            "--io_parallel",
            workers,
            "--overlap_events",
            "--loops",
            "2",
            "--json",
            out,
        )
        seconds += sum(json.loads(out.read_text())["seconds"]) / 2
    return len(directions) * POINT_BYTES / 1e9 / seconds


def tuner(folder: Path, objective: str, pairs: int, progress: Progress) -> None:
    directions = {"read": ("read",), "write": ("write",)}.get(objective, ("read", "write"))
    begin = time.monotonic()
    progress.step("tuning")
    run(
        FERRY,
        "tune",
        folder,
        "--objective",
        objective,
        "--no-profile",
        "--json",
        folder / "tune.json",
    )
    took = time.monotonic() - begin
    results = json.loads((folder / "tune.json").read_text())
    best = setting(results["best"])
    grid = [setting(one) for one in results["grid"]]
    run(FERRY, "point", "--write_file", folder / "tune.bin", "--io_size", POINT_BYTES)
    speeds: dict[tuple, list[float]] = {point: [] for point in grid}
    for turn in range(2):
        for i, point in enumerate(grid):
            progress.step(f"grid, pass {turn + 1} of 2: {i + 1} of {len(grid)}")
            speeds[point].append(speed(folder, point, directions))
    ranked = sorted(grid, key=lambda point: -median(speeds[point]))
    print(
        f"tune --objective {objective}: {took:.1f} s; chose {best}; rank in the grid "
        f"{ranked.index(best) + 1} of {len(grid)}"
    )
    for rival in ranked[:FINALISTS]:
        if rival == best:
            print(f"  the tuned point is among the best of the grid: {rival}")
            continue
        ratios = []
        for i in range(pairs):
            progress.step(f"pair {i + 1} of {pairs} against {rival}")
            order = [best, rival] if i % 2 == 0 else [rival, best]
            got = {point: speed(folder, point, directions) for point in order}
            ratios.append(got[best] / got[rival])
        made = figure(ratios, Target(0.98, at_least=True))
        print(
            f"  against {rival}: {made.ratio:.3f} ({made.low:.3f} to {made.high:.3f}), target "
            f">= 0.98: {made.verdict}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--directory", type=Path, default=ROOT / "build")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--objective", default="balanced", choices=("read", "write", "balanced"))
    parser.add_argument("--only", choices=("cost", "tuner"))
    options = parser.parse_args()
    progress = Progress()
    with tempfile.TemporaryDirectory(prefix="command-", dir=options.directory) as name:
        folder = Path(name)
        if options.only != "tuner":
            own_cost(folder, options.pairs, progress)
        if options.only != "cost":
            tuner(folder, options.objective, options.pairs, progress)
    progress.end()


if __name__ == "__main__":
    main()
