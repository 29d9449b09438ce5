"""The sweep for scripts written for DeepSpeed's aio_bench_perf_sweep.py.

It has the same names and puts logs in the same places; `tensorferry point` runs each point.

    python -m tensorferry.sweep --nvme_dir /mnt/nvme --log_dir logs

runs `tensorferry sweep`, which does the whole job. The functions here run the points that a script
chooses:

>>> from tensorferry.sweep import get_sweep_cmd_lines
>>> get_sweep_cmd_lines({"block_size": ["128K", "1M"], "overlap_events": [True]})
[['--block_size 128K', '--overlap_events'], ['--block_size 1M', '--overlap_events']]
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile

from ._core import privileged

TYPE_CHECKING = False  # as in typing, which takes long to import
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any, NoReturn, TextIO

__all__ = [
    "DEFAULT_SWEEP_CONFIG",
    "Job",
    "SweepConfig",
    "find_command",
    "get_sweep_cmd_lines",
    "main",
    "run_read_sweep",
    "run_write_sweep",
]

DEFAULT_SWEEP_CONFIG: dict[str, list[Any]] = {
    "block_size": ["128K", "256K", "512K", "1M"],
    "queue_depth": [4, 16, 32, 64],
    "overlap_events": [True, False],
    "io_parallel": [1, 2, 8],
    "single_submit": [False],
}
# The values of a point if the space does not name them.
DEFAULT_POINT: dict[str, str | None] = {
    "--block_size": "1M",
    "--queue_depth": "32",
    "--io_parallel": "1",
}
CHUNK_BYTES = 16 << 20


class Job:
    """A command line, as words for the shell, and the file that takes its output."""

    def __init__(
        self,
        cmd_line: Sequence[str],
        output_file: str | None = None,
        work_dir: str | None = None,
    ) -> None:
        self.cmd_line = cmd_line
        self.output_file = output_file
        self.work_dir = work_dir
        self.output_fd: TextIO | None = None

    def cmd(self) -> Sequence[str]:
        return self.cmd_line

    def get_stdout(self) -> TextIO | None:
        return self.output_fd

    def get_stderr(self) -> TextIO | None:
        return self.output_fd

    def get_cwd(self) -> str | None:
        return self.work_dir

    def open_output_file(self) -> None:
        if self.output_file is not None:
            self.output_fd = open(self.output_file, "w")

    def close_output_file(self) -> None:
        if self.output_fd is not None:
            self.output_fd.close()
            self.output_fd = None


class SweepConfig:
    """The settings of a sweep, from its arguments: `args` has nvme_dir, io_size, sweep_config (a
    JSON file or None), no_read, no_write, no_sudo, log_dir and loops."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.nvme_dir: str = args.nvme_dir
        self.io_size: int | str = args.io_size
        self.search_space = _search_space(args.sweep_config)
        self.read = not args.no_read
        self.write = not args.no_write
        self.flush_cache = not args.no_sudo
        self.log_dir: str = args.log_dir
        self.loops: int = args.loops
        self.other_options = f"--loops {args.loops}"


def get_sweep_cmd_lines(sweep_config_dict: Mapping[str, Iterable[object]]) -> list[list[str]]:
    """Lists all points of a space, each as a list of options. A flag that is off is a blank."""

    def option(name: str, value: object) -> str:
        if isinstance(value, bool):
            return f"--{name}" if value else " "
        return f"--{name} {value}"

    options = [
        [option(name, value) for value in values] for name, values in sweep_config_dict.items()
    ]
    return [list(point) for point in itertools.product(*options)]


def run_read_sweep(
    sweep_config: SweepConfig,
    flush_cache_job: Job | None,
    sync_job: Job | None,
    cmd_lines: Iterable[Sequence[str]],
) -> int:
    """Reads one file of random data at every point, writes one log per point, and returns how many
    points failed. It reports a point that fails and goes on. The file is in nvme_dir meanwhile.

    Before each point it runs sync_job and flush_cache_job, unless they are None. A point with
    neither overlap_events nor sequential_requests is sequential, as in DeepSpeed, but overlapping
    in a space that has sequential_requests.
    """
    with tempfile.TemporaryDirectory(
        prefix="tensorferry-sweep-", dir=sweep_config.nvme_dir
    ) as scratch:
        file = os.path.join(scratch, "read.bin")
        _fill(file, _bytes(sweep_config.io_size))
        return _run_points("read", file, sweep_config, flush_cache_job, sync_job, cmd_lines)


def run_write_sweep(
    sweep_config: SweepConfig,
    flush_cache_job: Job | None,
    sync_job: Job | None,
    cmd_lines: Iterable[Sequence[str]],
) -> int:
    """Writes a file at every point. See run_read_sweep()."""
    with tempfile.TemporaryDirectory(
        prefix="tensorferry-sweep-", dir=sweep_config.nvme_dir
    ) as scratch:
        file = os.path.join(scratch, "write.bin")
        return _run_points("write", file, sweep_config, flush_cache_job, sync_job, cmd_lines)


def find_command() -> str:
    """Finds the command `tensorferry`: $TENSORFERRY_COMMAND, else the one installed beside this
    Python, else the first on the PATH. Returns its path or raises FileNotFoundError."""
    named = None if privileged() else os.environ.get("TENSORFERRY_COMMAND")
    if named:
        found = shutil.which(named)
        if not found:
            raise FileNotFoundError(
                f"TENSORFERRY_COMMAND is {named}, which is not a program: set it "
                "to the path of the command tensorferry, or unset it"
            )
        return os.path.abspath(found)
    beside = os.path.dirname(sys.executable)
    found = shutil.which("tensorferry", path=beside) or shutil.which("tensorferry")
    if not found:
        raise FileNotFoundError(
            f"the command tensorferry is neither in {beside} nor on the PATH: install it, or set "
            "TENSORFERRY_COMMAND to its path"
        )
    return os.path.abspath(found)


def main() -> NoReturn:
    """Replaces this process by `tensorferry sweep` with the same arguments."""
    try:
        command = find_command()
    except FileNotFoundError as error:
        sys.exit(f"tensorferry.sweep: {error}")
    sys.stdout.flush()
    os.execv(command, [command, "sweep", *sys.argv[1:]])


def _search_space(path: str | None) -> dict[str, Any]:
    if path is None:
        return DEFAULT_SWEEP_CONFIG
    with open(path) as file:
        space: dict[str, Any] = json.load(file)
    return space


def _bytes(size: int | str) -> int:
    """Reads a size such as 400M, in binary units."""
    text = str(size).strip()
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}.get(text[-1:].upper())
    digits = text[:-1] if scale else text
    if not digits.isascii() or not digits.isdigit():
        raise ValueError(f"io_size is {text!r}: give a size such as 400M or 1G")
    return int(digits) * (scale or 1)


def _fill(path: str, size: int) -> None:
    with open(path, "wb") as file:
        for start in range(0, size, CHUNK_BYTES):
            file.write(os.urandom(min(CHUNK_BYTES, size - start)))
        file.flush()
        os.fsync(file.fileno())


def _run_points(
    direction: str,
    file: str,
    sweep_config: SweepConfig,
    flush_cache_job: Job | None,
    sync_job: Job | None,
    cmd_lines: Iterable[Sequence[str]],
) -> int:
    command = find_command()
    lines = list(cmd_lines)
    # In a space with the flag sequential_requests, a point without it overlaps.
    flags = {word for line in lines for option in line for word in option.split()}
    inverse = "--sequential_requests" in flags | {f"--{name}" for name in sweep_config.search_space}
    points = [_options(line, inverse) for line in lines]
    engines = {options.get("--engine") for options in points}
    failed = 0
    for options in points:
        folder = os.path.join(sweep_config.log_dir, direction)
        if len(engines) > 1:
            engine = options.get("--engine") or "auto"
            folder = os.path.join(sweep_config.log_dir, engine, direction)
        os.makedirs(folder, exist_ok=True)
        log = os.path.join(folder, _log_name(direction, options))
        words = [
            command,
            "point",
            f"--{direction}_file",
            file,
            "--io_size",
            str(sweep_config.io_size),
            *sweep_config.other_options.split(),
        ]
        for name, value in options.items():
            words += [name] if value is None else [name, value]
        for job in (sync_job, flush_cache_job):
            if job is not None:
                _run(job)
        failed += not _run(Job([shlex.quote(word) for word in words], output_file=log))
    return failed


def _options(cmd_line: Sequence[str], inverse: bool) -> dict[str, str | None]:
    """Returns a point's options by name, with exactly one of the two modes."""
    options = dict(DEFAULT_POINT)
    for option in cmd_line:
        name, *value = option.split(maxsplit=1) or [""]
        if name:
            options[name] = value[0].strip() if value else None
    if options.get("--threads") == "1":  # DeepSpeed's own spaces have it; a point has one thread
        del options["--threads"]
    if not options.keys() & {"--overlap_events", "--sequential_requests"}:
        options["--overlap_events" if inverse else "--sequential_requests"] = None
    return options


def _log_name(direction: str, options: Mapping[str, str | None]) -> str:
    submit = "single" if "--single_submit" in options else "block"
    mode = "overlap" if "--overlap_events" in options else "sequential"
    name = (
        f"{direction}_{submit}_{mode}_t1_p{options['--io_parallel']}"
        f"_d{options['--queue_depth']}_bs{options['--block_size']}.txt"
    )
    return name.replace(os.sep, "-")  # a bad value must fail as a point, not as a path


def _run(job: Job) -> bool:
    """Runs a job in a shell, as scripts expect. Prints a failure and returns False."""
    args = " ".join(job.cmd())
    print(f"args = {args}", flush=True)
    job.open_output_file()
    try:
        done = subprocess.run(
            args, shell=True, stdout=job.get_stdout(), stderr=job.get_stderr(), cwd=job.get_cwd()
        )
    finally:
        job.close_output_file()
    if done.returncode:
        where = f"; its output is in {job.output_file}" if job.output_file else ""
        print(
            f"failed with exit status {done.returncode}: {args}{where}", file=sys.stderr, flush=True
        )
    return done.returncode == 0


if __name__ == "__main__":
    main()
