#!/usr/bin/env python3
"""The figures of the Python package: `make python-figures`.

- Import: the time of `import tensorferry`, without starting Python.
- A call: a synchronous read of 4 KiB on an open File, from C++ and from Python, on a file in
  memory, so that no drive takes part. callgrind counts the instructions of two runs of different
  length; the difference excludes start and end. The time is the median over alternating runs.
- Ctrl-C: from the signal to KeyboardInterrupt in a wait.
- A million reads: memory and descriptors before and after.
- A fork with 2 GiB of used but idle page-locked memory, and with none: how long os.fork() takes in
  the parent, and how much memory the kernel copies for the child.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks.figures.callgrind import instructions_each
from benchmarks.jobs.job import PROGRAM, ROOT

BYTES = 4096
FILE_BYTES = 16 << 20
COUNTED_CALLS = (200, 1200)
TIMED_CALLS = 20_000

CALL_JOB = """
import statistics, sys, time
import tensorferry
kind, path, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
buffer = bytearray(4096)
if kind == "tensor":
    import torch
    buffer = torch.empty(4096, dtype=torch.uint8)
times = []
with tensorferry.Handle() as handle, tensorferry.File(path) as file:
    read, clock = handle.read_now, time.perf_counter_ns
    for i in range(count):
        start = clock()
        read(buffer, file, i % 4096 * 4096)
        times.append(clock() - start)
print(statistics.median(times) / 1000)
"""

# One request of 4 KiB at a time, so that 256 MiB take much longer than the test.
CTRL_C_JOB = """
import os, signal, sys, threading, time
import tensorferry
handle = tensorferry.Handle(queue_depth=1, block_bytes=4096, workers=1)
operation = handle.write(bytes(256 << 20), sys.argv[1])
def press():
    global pressed
    time.sleep(0.05)
    pressed = time.monotonic()
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=press).start()
try:
    operation.wait()
except KeyboardInterrupt:
    print((time.monotonic() - pressed) * 1000)
"""

MANY_JOB = """
import gc, os, sys
import tensorferry
kind, path, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
handle, buffer = tensorferry.Handle(), bytearray(4096)
file = tensorferry.File(path) if kind == "File" else path
def measure():
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4, len(os.listdir("/proc/self/fd"))
def read(times):
    for i in range(times):
        handle.read_now(buffer, file, i % 4096 * 4096)
read(10_000)
before = measure()
read(count)
after = measure()
print(*before, *after)
"""

FORK_JOB = """
import os, statistics, sys, time
import tensorferry
path, size, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
buffer = tensorferry.PinnedBuffer(max(size, 8 << 20))
handle = tensorferry.Handle()
if size:
    part = memoryview(buffer)[: 8 << 20]
    handle.write(part, path).wait()
    handle.read(part, path).wait()
else:
    buffer.free()
times = []
for _ in range(rounds):
    reader, writer = os.pipe()
    start = time.perf_counter()
    child = os.fork()
    if child == 0:
        with open("/proc/self/smaps_rollup") as lines:
            kib = sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:"))
        os.write(writer, str(kib).encode())
        os._exit(0)
    times.append(time.perf_counter() - start)
    kib = int(os.read(reader, 100))
    os.waitpid(child, 0)
    os.close(reader), os.close(writer)
print(statistics.median(times) * 1000, kib)
"""

ENV = os.environ | {"PYTHONPATH": str(ROOT / "build" / "release" / "python"), "PYTHONHASHSEED": "0"}


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=ENV, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command[:3])} ...: {done.stderr.strip()}")
    return done.stdout + done.stderr


def python(job: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", job, *map(str, arguments)]


def cpp(path: str, count: int) -> list[str]:
    options = {
        "--mode": "sync",
        "--bytes": BYTES,
        "--file-bytes": FILE_BYTES,
        "--count": count,
        "--memory": "ordinary",
        "--warm-up": 0,
    }
    words = [str(word) for pair in options.items() for word in pair]
    return [str(PROGRAM), "--file", path, *words]


def verdict(value: float, limit: float) -> str:
    return f"<= {limit:g} {'holds' if value <= limit else 'misses'}"


def import_figure(rounds: int) -> None:
    times = []
    for _ in range(rounds):
        # Its own modules, and those of the standard library that Python had not imported yet.
        text = run([sys.executable, "-X", "importtime", "-c", "import tensorferry"])
        times.append(int(re.findall(r"\|\s*(\d+) \| tensorferry$", text, re.M)[-1]) / 1000)
    shown = verdict(median(times), 50)
    print(f"import tensorferry: {median(times):.1f} ms, median of {rounds}; {shown}")


def call_figure(path: str, rounds: int) -> None:
    makers: dict[str, Callable[[int], list[str]]] = {
        "C++": lambda count: cpp(path, count),
        "Python, bytearray": lambda count: python(CALL_JOB, "bytearray", path, count),
        "Python, torch tensor": lambda count: python(CALL_JOB, "tensor", path, count),
    }
    times: dict[str, list[float]] = {name: [] for name in makers}
    for _ in range(rounds):
        for name, make in makers.items():
            text = run(make(TIMED_CALLS))
            us = json.loads(text)["call_us"]["p50"] if name == "C++" else float(text)
            times[name].append(us)
    base_us = median(times["C++"])
    base_count = instructions_each(makers["C++"], COUNTED_CALLS, ENV)
    print(f"{'a read of 4 KiB':22}{'us':>8}{'added':>8}{'instructions':>15}{'added':>9}")
    print(f"{'C++':22}{base_us:8.2f}{'':8}{base_count:15.0f}")
    worst = 0.0
    for name in list(makers)[1:]:
        us = median(times[name])
        count = instructions_each(makers[name], COUNTED_CALLS, ENV)
        print(f"{name:22}{us:8.2f}{us - base_us:8.2f}{count:15.0f}{count - base_count:9.0f}")
        worst = max(worst, us - base_us)
    print(f"Python adds at most {worst:.2f} us; {verdict(worst, 5)}")


def ctrl_c_figure(path: str, rounds: int) -> None:
    times = [float(run(python(CTRL_C_JOB, path))) for _ in range(rounds)]
    print(f"Ctrl-C in a wait: at most {max(times):.0f} ms of {rounds}; {verdict(max(times), 200)}")


def many_figure(path: str, count: int) -> None:
    for kind in ("path", "File"):
        before_kib, before_fds, after_kib, after_fds = map(
            int, run(python(MANY_JOB, kind, path, count)).split()
        )
        print(
            f"{count:,} reads by {kind}: resident memory {before_kib} KiB before, {after_kib} "
            f"after; descriptors {before_fds}, {after_fds}"
        )


def fork_figure(path: str, rounds: int) -> None:
    for size, name in ((0, "no page-locked memory"), (2 << 30, "2 GiB used and idle")):
        ms, private_kib = map(float, run(python(FORK_JOB, path, size, rounds)).split())
        shown = verdict(ms, 50) if size else "for comparison"
        print(
            f"fork beside {name}: {ms:.1f} ms, median of {rounds}; {private_kib / 1024:.0f} MiB "
            f"copied for the child; {shown}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--reads", type=int, default=1_000_000)
    options = parser.parse_args()
    memory = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder,
        tempfile.TemporaryDirectory(dir=ROOT / "build") as on_disk,
    ):
        path = str(Path(folder) / "data.bin")
        Path(path).write_bytes(os.urandom(FILE_BYTES))
        import_figure(options.rounds)
        call_figure(path, options.rounds)
        ctrl_c_figure(str(Path(on_disk) / "data.bin"), options.rounds)
        many_figure(path, options.reads)
        fork_figure(str(Path(on_disk) / "forked.bin"), options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
