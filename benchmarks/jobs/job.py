"""Runs one job of fio or of ferry_job and returns its measurements.

Both start their clock after they have set up memory, rings and files. A Sample is one job. Compare
only samples that were taken one right after the other on the same file.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.jobs import machine

MIB = 1 << 20
GIB = 1 << 30
JOB_SECONDS_MAX = 600


ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "build" / "release" / "benchmarks" / "ferry_job"
REPORTS = ROOT / "build" / "reports"


class JobFailed(Exception):
    """A job failed; the text says which and why."""


NOT_HERE = "not possible here: "  # begins the reason


class NotHere(JobFailed):
    """This machine cannot run the job, which is no fault of the job."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{NOT_HERE}{why}")


@dataclass(frozen=True)
class Sample:
    """The measurements of one job; 0 if the job does not measure it."""

    gb_per_second: float = 0.0
    cpu_seconds_per_gb: float = 0.0
    call_us_median: float = 0.0
    call_us_mean: float = 0.0
    call_us_p99: float = 0.0
    open_close_us: float = 0.0
    repetition_seconds: float = 0.0
    memory_bytes: float = 0.0
    read_bytes: float = 0.0  # by the drive
    asked_bytes: float = 0.0  # that the caller wanted
    descriptors: float = 0.0
    switches: float = 0.0  # of threads, for one operation
    request_bytes: int = 0
    queue_depth: int = 0
    engine: str = ""


@dataclass(frozen=True)
class FioPoint:
    """Settings of fio, among which its calibration chooses. The buffers are fixed only if this user
    may lock that much memory."""

    block_bytes: int
    depth: int
    fixed_buffers: bool

    def __post_init__(self) -> None:
        fixed = self.fixed_buffers and machine.may_lock(self.block_bytes * self.depth)
        object.__setattr__(self, "fixed_buffers", fixed)

    def __str__(self) -> str:
        buffers = "fixed buffers" if self.fixed_buffers else "plain buffers"
        return f"{self.block_bytes >> 10} KiB, depth {self.depth}, {buffers}"


def size_text(size: int) -> str:
    for unit, bytes_per_unit in (("GiB", GIB), ("MiB", MIB), ("KiB", 1 << 10)):
        if size % bytes_per_unit == 0:
            return f"{size // bytes_per_unit} {unit}"
    return f"{size} bytes"


# So fio has its buffers on huge pages, as we have.
FIO_ENV = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def run(command: list[str]) -> Any:
    env = FIO_ENV if command[0] == "fio" else None
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=env, timeout=JOB_SECONDS_MAX, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise JobFailed(f"{' '.join(command)}: no answer within {JOB_SECONDS_MAX} s") from error
    except OSError as error:
        raise JobFailed(f"{command[0]}: {error.strerror}") from error
    said = done.stderr.strip() or done.stdout.strip()
    # fio may print a warning before its JSON.
    begin = done.stdout.find("{")
    if done.returncode != 0 or begin < 0:
        raise JobFailed(f"{' '.join(command)}: {said}")
    try:
        return json.loads(done.stdout[begin:])
    except json.JSONDecodeError as error:
        raise JobFailed(f"{' '.join(command)}: it printed no JSON: {said}") from error


def remove(paths: list[Path]) -> None:
    """Removes files and waits until the file system has done so, before the next measurement."""
    for path in paths:
        path.unlink(missing_ok=True)
    if not paths:
        return
    folder = os.open(paths[0].parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def fio_seconds(job: dict[str, Any], direction: str) -> float:
    """fio rounds its running time up to a millisecond, which adds half a millisecond on average."""
    return max(float(job[direction]["runtime"]) - 0.5, 0.5) / 1000


def fio_cpu_seconds(job: dict[str, Any]) -> float:
    """fio rounds user and system time down to a millisecond each."""
    share = (float(job["usr_cpu"]) + float(job["sys_cpu"])) / 100
    return share * float(job["job_runtime"]) / 1000 + 0.001


def fio_options(point: FioPoint, direction: str, size: int, engine: str = "io_uring") -> list[str]:
    ring = [f"--fixedbufs={int(point.fixed_buffers)}", "--registerfiles=1"]
    if engine != "io_uring":
        ring = []
    return [
        f"--ioengine={engine}",
        "--direct=1",
        f"--rw={direction}",
        f"--bs={point.block_bytes}",
        f"--iodepth={point.depth}",
        f"--size={size}",
        # Otherwise fio changes every block before it writes it, and drops the page cache at each
        # pass, which direct I/O does not use.
        "--scramble_buffers=0",
        "--invalidate=0",
        *ring,
    ]


def fio_large(
    file: Path,
    point: FioPoint,
    direction: str,
    size: int,
    repeat: int,
    continuous: bool = False,
    engine: str = "io_uring",
) -> Sample:
    """`repeat` passes over one file; `continuous` does not drain the queue between them."""
    passes = f"--io_size={size * repeat}" if continuous else f"--loops={repeat}"
    options = fio_options(point, direction, size, engine)
    command = ["fio", "--output-format=json", "--name=large", f"--filename={file}", passes]
    job = run([*command, *options])["jobs"][0]
    if job[direction]["io_bytes"] != size * repeat:
        raise JobFailed(f"fio moved {job[direction]['io_bytes']} bytes, not {size * repeat}")
    gigabytes = size * repeat / 1e9
    return Sample(
        gb_per_second=gigabytes / fio_seconds(job, direction),
        cpu_seconds_per_gb=fio_cpu_seconds(job) / gigabytes,
        request_bytes=point.block_bytes,
        queue_depth=point.depth,
        engine="fio",
    )


def fio_mixed(file: Path, point: FioPoint, size: int, repeat: int) -> Sample:
    """One job that reads and overwrites, half each, because two jobs do not begin at one moment."""
    command = ["fio", "--output-format=json", "--name=mixed", f"--filename={file}"]
    command += [f"--io_size={size * repeat}", *fio_options(point, "rw", size)]
    job = run(command)["jobs"][0]
    moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
    if moved != size * repeat:
        raise JobFailed(f"fio moved {moved} bytes, not {size * repeat}")
    seconds = max(fio_seconds(job, direction) for direction in ("read", "write"))
    return Sample(gb_per_second=moved / 1e9 / seconds, engine="fio")


def fio_together(
    file: Path, point: FioPoint, direction: str, size: int, repeat: int, how: str
) -> Sample:
    """Two jobs at the same time, "threads" or "processes", each over its own half of the file."""
    command = ["fio", "--output-format=json", "--name=two", f"--filename={file}", "--numjobs=2"]
    command += [f"--offset_increment={size}", f"--loops={repeat}"]
    command += ["--thread"] if how == "threads" else []
    jobs = run([*command, *fio_options(point, direction, size)])["jobs"]
    seconds = max(fio_seconds(job, direction) for job in jobs)
    return Sample(gb_per_second=size * repeat * len(jobs) / 1e9 / seconds, engine="fio")


def fio_queue(file: Path, file_bytes: int, count: int) -> Sample:
    """Direct reads of 4 KiB at random offsets, 64 at a time."""
    command = ["fio", "--output-format=json", "--name=queue", f"--filename={file}"]
    command += [f"--io_size={count * 4096}", "--norandommap=1", "--randrepeat=0"]
    point = FioPoint(4096, 64, True)
    job = run([*command, *fio_options(point, "randread", file_bytes)])["jobs"][0]
    return Sample(gb_per_second=count * 4096 / 1e9 / fio_seconds(job, "read"), engine="fio")


def fio_threads(file: Path, file_bytes: int, size: int, count: int, threads: int) -> Sample:
    """Synchronous direct reads at random offsets, `count` of each of the jobs, all at once."""
    command = ["fio", "--output-format=json", "--name=threads", f"--filename={file}"]
    command += [f"--numjobs={threads}", f"--number_ios={count}", "--norandommap=1"]
    command += ["--randrepeat=0", "--ioengine=psync", "--direct=1", "--rw=randread"]
    command += [f"--bs={size}", f"--size={file_bytes}", f"--io_size={size * count}"]
    # A buffer of 1 MiB is on a huge page only if it begins one, and then twice as fast.
    command += ["--iomem_align=2m", "--invalidate=0"]
    jobs = run(command)["jobs"]
    moved = sum(job["read"]["io_bytes"] for job in jobs)
    if moved != size * count * threads:
        raise JobFailed(f"fio moved {moved} bytes, not {size * count * threads}")
    seconds = max(fio_seconds(job, "read") for job in jobs)
    return Sample(gb_per_second=moved / 1e9 / seconds, engine="fio")


def fio_drives(files: list[Path], sizes: list[int], point: FioPoint, repeat: int) -> Sample:
    """Reads all files at once, with a job for each."""
    options = [
        option for option in fio_options(point, "read", 0) if not option.startswith("--size")
    ]
    command = ["fio", "--output-format=json", *options, f"--loops={repeat}"]
    for number, (file, size) in enumerate(zip(files, sizes, strict=True)):
        command += [f"--name=drive{number}", f"--filename={file}", f"--size={size}"]
    jobs = run(command)["jobs"]
    moved = sum(job["read"]["io_bytes"] for job in jobs)
    if moved != sum(sizes) * repeat:
        raise JobFailed(f"fio moved {moved} bytes, not {sum(sizes) * repeat}")
    seconds = max(fio_seconds(job, "read") for job in jobs)
    return Sample(gb_per_second=moved / 1e9 / seconds, engine="fio")


def fio_new_files(
    files: list[Path], point: FioPoint, size: int, preallocate: bool = True, sync: bool = False
) -> Sample:
    """Writes new files, one after the other. fio preallocates by default, before its clock
    starts; fsync is within it."""
    remove(files)
    command = ["fio", "--output-format=json", *fio_options(point, "write", size)]
    command += ["--end_fsync=1"] if sync else []
    command += [] if preallocate else ["--fallocate=none"]
    for file in files:
        command += [f"--name={file.name}", f"--filename={file}", "--stonewall"]
    jobs = run(command)["jobs"]
    seconds = sum(fio_seconds(job, "write") for job in jobs)
    remove(files)
    return Sample(gb_per_second=size * len(files) / 1e9 / seconds, engine="fio")


def fio_calls(file: Path, size: int, file_bytes: int, count: int) -> Sample:
    """Synchronous direct reads at random offsets, one at a time."""
    report = run(
        [
            "fio",
            "--output-format=json",
            "--name=calls",
            f"--filename={file}",
            "--ioengine=psync",
            "--direct=1",
            "--rw=randread",
            f"--bs={size}",
            f"--size={file_bytes}",
            f"--number_ios={count}",
            "--norandommap=1",
            "--randrepeat=0",
            "--lat_percentiles=1",
            "--clat_percentiles=0",
            "--percentile_list=50",
        ]
    )
    latency = report["jobs"][0]["read"]["lat_ns"]
    return Sample(
        call_us_median=latency["percentile"]["50.000000"] / 1000,
        call_us_mean=latency["mean"] / 1000,
        engine="fio",
    )


@dataclass(frozen=True)
class Ferry:
    """The ferry_job program."""

    program: Path

    def run(self, file: Path, *options: str) -> Sample:
        report = run([str(self.program), "--file", str(file), *options])
        if not report["direct"]:
            raise JobFailed(
                f"{file} cannot be read with O_DIRECT: {report['direct_reason']}; choose a drive "
                "with --directory"
            )
        calls = report.get("call_us", {"p50": 0.0, "mean": 0.0})
        return Sample(
            gb_per_second=report["gb_per_second"],
            cpu_seconds_per_gb=report["cpu_seconds_per_gb"],
            call_us_median=calls["p50"],
            call_us_mean=calls["mean"],
            open_close_us=report.get("open_close_us", 0.0),
            repetition_seconds=sum(report["seconds"]) / len(report["seconds"]),
            switches=report["context_switches_per_operation"],
            request_bytes=report["request_bytes"],
            queue_depth=report["queue_depth"],
            engine=report["engine"],
        )

    def queue(
        self, file: Path, file_bytes: int, count: int, repeat: int, seed: int = 1
    ) -> dict[str, Any]:
        """Reads of 4 KiB at random offsets, 64 at a time; returns the whole report."""
        report: dict[str, Any] = run(
            [str(self.program), "--file", str(file), "--mode", "queue", "--bytes", "4K"]
            + ["--file-bytes", str(file_bytes), "--count", str(count), "--repeat", str(repeat)]
            + ["--seed", str(seed)]
        )
        return report

    def processes(self, file: Path, direction: str, size: int, repeat: int) -> Sample:
        """Two processes that begin at the same moment, each over its own half of the file."""
        running: list[Any] = []
        for number in range(2):
            command = [str(self.program), "--file", str(file), "--direction", direction]
            command += ["--bytes", str(size), "--offset", str(number * size)]
            command += ["--repeat", str(repeat), "--wait-to-start"]
            running.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
        try:
            for process in running:
                if process.stdout.readline() != "ready\n":
                    raise JobFailed(f"{' '.join(map(str, process.args))}: {process.wait()}")
            begin_ns = time.monotonic_ns()
            for process in running:
                process.stdin.write("\n")
                process.stdin.flush()
            texts = [process.communicate(timeout=JOB_SECONDS_MAX)[0] for process in running]
        except subprocess.TimeoutExpired as error:
            raise JobFailed(f"two processes: no answer within {JOB_SECONDS_MAX} s") from error
        except BrokenPipeError as error:
            raise JobFailed("two processes: one ended before it could start") from error
        finally:
            for process in running:
                process.kill()
                process.wait()
        if any(process.returncode != 0 for process in running):
            raise JobFailed(
                f"two processes: their exit statuses are {[p.returncode for p in running]}"
            )
        ends = [json.loads(text)["end_ns"] for text in texts]
        seconds = (max(ends) - begin_ns) / 1e9
        return Sample(gb_per_second=2 * size * repeat / 1e9 / seconds, engine="processes")

    def large(self, file: Path, direction: str, size: int, repeat: int, *options: str) -> Sample:
        return self.run(
            file, "--direction", direction, "--bytes", str(size), "--repeat", str(repeat), *options
        )

    def new_files(self, file: Path, size: int, repeat: int) -> Sample:
        """Writes `repeat` new files, one after the other."""
        remove(list(file.parent.glob(f"{file.name}.*")))
        sample = self.large(file, "write", size, repeat, "--new-file")
        remove(list(file.parent.glob(f"{file.name}.*")))
        return sample

    def calls(
        self,
        file: Path,
        mode: str,
        size: int,
        file_bytes: int,
        count: int,
        memory: str,
        seed: int,
        *options: str,
    ) -> Sample:
        return self.run(
            file,
            "--mode",
            mode,
            "--bytes",
            str(size),
            "--file-bytes",
            str(file_bytes),
            "--count",
            str(count),
            "--memory",
            memory,
            "--seed",
            str(seed),
            *options,
        )

    def drives(self, files: list[Path], sizes: list[int], repeat: int, *options: str) -> Sample:
        """Reads all files at once with one handle."""
        words = [word for file in files[1:] for word in ("--file", str(file))]
        words += [word for size in sizes for word in ("--bytes", str(size))]
        return self.run(files[0], "--mode", "drives", "--repeat", str(repeat), *words, *options)

    def swap(
        self, folders: list[Path], direction: str, size: int, count: int, repeat: int
    ) -> Sample:
        """Puts (write) or gets (read) `count` tensors in a SwapSpace over all folders, after one
        untimed pass."""
        words = [word for folder in folders[1:] for word in ("--file", str(folder))]
        words += ["--direction", direction, "--bytes", str(size), "--count", str(count)]
        words += ["--repeat", str(repeat), "--warm-up", "1"]
        return self.run(folders[0], "--mode", "swap", *words)
