"""Prints how long every pass over a file takes, and what the machine does meanwhile.

    PYTHONPATH=build/release/python python -m benchmarks.figures.passes FILE --direction write

Medians hide changes from second to second. Each line is one pass from ordinary memory and one from
page-locked memory right after it, with the CPU time of this process, the interrupts of the drive
and the processor time that the host gave to others. It makes FILE and removes it at the end.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import tensorferry

from benchmarks.jobs import machine

ROW = "{:>8}  {:>8}  {:>6}  {:>10}  {:>6}    {:>11}  {:>6}  {:>10}"
HEAD = ("at s", "ordinary", "CPU s", "interrupts", "steal", "page-locked", "CPU s", "interrupts")


def drive_of(path: Path) -> str:
    """The name of the drive under `path` in /proc/interrupts."""
    queue = machine.queue_of(path)
    return (queue.parent / "device").resolve().name if queue else "none"


def interrupts(drive: str) -> int:
    """Interrupts of the drive so far, on all processors."""
    total = 0
    for line in Path("/proc/interrupts").read_text().splitlines():
        fields = line.split()
        if any(field.startswith(drive) for field in fields[1:]):
            total += sum(int(field) for field in fields[1:] if field.isdigit())
    return total


def stolen() -> int:
    """Ticks of all processors that the host gave to others."""
    return int(Path("/proc/stat").read_text().split(maxsplit=9)[8])


def one_pass(move, memory, path: Path, drive: str) -> tuple[float, float, int, int]:
    """GB/s, CPU seconds, interrupts and stolen ticks."""
    before, stolen_before = interrupts(drive), stolen()
    cpu, start = time.process_time(), time.perf_counter()
    move(memory, path).wait()
    seconds = time.perf_counter() - start
    cpu = time.process_time() - cpu
    speed = len(memory) / 1e9 / seconds
    return speed, cpu, interrupts(drive) - before, stolen() - stolen_before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--direction", choices=("read", "write"), default="read")
    parser.add_argument("--mib", type=int, default=1024, help="size of a pass (default: 1024)")
    parser.add_argument(
        "--seconds", type=float, default=20, help="how long to measure (default: 20)"
    )
    given = parser.parse_args()
    if given.file.exists():
        parser.error(f"{given.file} exists already; choose a new file")
    size = given.mib << 20
    ordinary = memoryview(bytearray(size + 64))[64:]
    locked = tensorferry.PinnedBuffer(size)
    handle = tensorferry.Handle()
    try:
        handle.write(locked, given.file).wait()
        drive = drive_of(given.file)
        move = handle.read if given.direction == "read" else handle.write
        move(ordinary, given.file).wait()
        print(f"{given.direction}, {given.mib} MiB a pass, GB/s; drive: {drive}")
        print(ROW.format(*HEAD))
        start = time.monotonic()
        while time.monotonic() - start < given.seconds:
            at = time.monotonic() - start
            speed, cpu, sent, ticks = one_pass(move, ordinary, given.file, drive)
            other, other_cpu, other_sent, _ = one_pass(move, locked, given.file, drive)
            print(
                ROW.format(
                    f"{at:.1f}",
                    f"{speed:.2f}",
                    f"{cpu:.3f}",
                    sent,
                    ticks,
                    f"{other:.2f}",
                    f"{other_cpu:.3f}",
                    other_sent,
                ),
                flush=True,
            )
    finally:
        given.file.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
