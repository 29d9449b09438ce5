#!/usr/bin/env python3
"""Many threads and many drives on one handle, on a machine without fio. Needs neither torch nor a
GPU; gpu_figures.py includes it.

- threads: 1 to 16 threads that read synchronously on one handle, against as many threads that call
  pread (raw_threads);
- drives: eight loop devices over memory, all read at once with one handle, against one ring
  (raw_ring). Needs root; says why if it cannot be done.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.figures.paired import HEAD, row
from benchmarks.jobs.job import GIB, MIB, ROOT, Ferry, JobFailed, size_text
from benchmarks.jobs.loop_drives import LoopDrives
from benchmarks.rows.pairs import Target

THREADS = (1, 2, 4, 8, 16)
THREAD_CALLS = {4 << 10: 40_000, MIB: 2000}  # of all threads together
DRIVES, DRIVE_BYTES = 8, 256 * MIB
BLOCK_BYTES, DEPTH = MIB, 16  # of raw_ring, for each drive
SECTIONS = ("threads", "drives")


def seconds_of(program: Path, *words: object) -> float:
    command = [str(program), *map(str, words)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout)


def thread_rows(folder: Path, programs: Path, pairs: int) -> None:
    ferry = Ferry(programs / "ferry_job")
    file = folder / "threads.bin"
    ferry.large(file, "write", GIB, 1, "--warm-up", "0")

    def ours(size: int, threads: int) -> float:
        count = THREAD_CALLS[size] // threads
        words = ("--threads", str(threads))
        sample = ferry.calls(file, "sync", size, GIB, count, "pinned", 1, *words)
        return sample.repetition_seconds

    def other(size: int, threads: int) -> float:
        count = THREAD_CALLS[size] // threads
        return seconds_of(programs / "raw_threads", file, GIB, size, count, threads)

    for size in THREAD_CALLS:
        for threads in THREADS:
            name = f"{threads} threads, {size_text(size)}, one handle / pread in threads"
            mine, theirs = partial(ours, size, threads), partial(other, size, threads)
            row(name, mine, theirs, pairs, Target(0.9, at_least=True))
    file.unlink()


def drive_rows(folder: Path, programs: Path, pairs: int) -> None:
    try:
        drives = LoopDrives(folder / "drives")
    except JobFailed as error:
        print(f"{DRIVES} drives in memory: {error}")
        return
    try:
        ferry = Ferry(programs / "ferry_job")
        files = [drives.add(f"drive{i}", DRIVE_BYTES) / "file" for i in range(DRIVES)]
        names = ",".join(map(str, files))
        ring = programs / "raw_ring"
        seconds_of(ring, "write", names, DRIVE_BYTES, BLOCK_BYTES, DEPTH)

        def ours() -> float:
            return ferry.drives(files, [DRIVE_BYTES], 2).repetition_seconds

        def other() -> float:
            return seconds_of(ring, "read", names, DRIVE_BYTES, BLOCK_BYTES, DEPTH)

        name = f"{DRIVES} drives in memory, read with one handle / raw io_uring"
        row(name, ours, other, pairs, Target(0.9, at_least=True))
    except JobFailed as error:
        print(f"{DRIVES} drives in memory: {error}")
    finally:
        drives.remove()


def scale_rows(folder: Path, programs: Path, pairs: int, sections: tuple[str, ...]) -> None:
    if "threads" in sections:
        thread_rows(folder, programs, pairs)
    if "drives" in sections:
        drive_rows(folder, programs, pairs)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=Path("build"), help="where the files go")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument(
        "--programs",
        type=Path,
        default=ROOT / "build" / "release" / "benchmarks",
        help="the folder of ferry_job, raw_ring and raw_threads",
    )
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    options = parser.parse_args()
    print(HEAD)
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        scale_rows(Path(name), options.programs, options.pairs, tuple(options.sections))
    return 0


if __name__ == "__main__":
    sys.exit(main())
