"""The sweep for scripts that were written for DeepSpeed's aio_bench_perf_sweep.py: the same names,
logs in the same places, and each point run by `tensorferry point`.

    python -m tensorferry.sweep --nvme_dir /mnt/nvme --log_dir logs

is `tensorferry sweep`, which does the whole job. The functions here run the points of a script's
own choosing:

>>> from tensorferry.sweep import get_sweep_cmd_lines
>>> get_sweep_cmd_lines({"block_size": ["128K", "1M"], "overlap_events": [True]})
[['--block_size 128K', '--overlap_events'], ['--block_size 1M', '--overlap_events']]
"""

import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile

from ._core import privileged

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

DEFAULT_SWEEP_CONFIG = {
    "block_size": ["128K", "256K", "512K", "1M"],
    "queue_depth": [4, 16, 32, 64],
    "overlap_events": [True, False],
    "io_parallel": [1, 2, 8],
    "single_submit": [False],
}
# Of a point whose space leaves them out.
DEFAULT_POINT = {"--block_size": "1M", "--queue_depth": "32", "--io_parallel": "1"}
CHUNK_BYTES = 16 << 20


class Job:
    """A command line, as words for the shell, and where its output goes."""

    def __init__(self, cmd_line, output_file=None, work_dir=None):
        self.cmd_line = cmd_line
        self.output_file = output_file
        self.work_dir = work_dir
        self.output_fd = None

    def cmd(self):
        return self.cmd_line

    def get_stdout(self):
        return self.output_fd

    def get_stderr(self):
        return self.output_fd

    def get_cwd(self):
        return self.work_dir

    def open_output_file(self):
        if self.output_file is not None:
            self.output_fd = open(self.output_file, "w")

    def close_output_file(self):
        if self.output_fd is not None:
            self.output_fd.close()
            self.output_fd = None


class SweepConfig:
    """What the arguments of a sweep ask for. `args` has nvme_dir, io_size, sweep_config (a JSON
    file or None), no_read, no_write, no_sudo, log_dir and loops."""

    def __init__(self, args):
        self.nvme_dir = args.nvme_dir
        self.io_size = args.io_size
        self.search_space = _search_space(args.sweep_config)
        self.read = not args.no_read
        self.write = not args.no_write
        self.flush_cache = not args.no_sudo
        self.log_dir = args.log_dir
        self.loops = args.loops
        self.other_options = f"--loops {args.loops}"


def get_sweep_cmd_lines(sweep_config_dict):
    """All points of a space, each as a list of options. A flag that is off is a blank."""

    def option(name, value):
        if isinstance(value, bool):
            return f"--{name}" if value else " "
        return f"--{name} {value}"

    options = [
        [option(name, value) for value in values] for name, values in sweep_config_dict.items()
    ]
    return [list(point) for point in itertools.product(*options)]


def run_read_sweep(sweep_config, flush_cache_job, sync_job, cmd_lines):
    """Reads one file of random data at every point, and leaves one log for each. The file lies in
    nvme_dir while it runs. A point that fails is reported; returns how many did.

    Before each point come sync_job and flush_cache_job, where they are not None. A point with
    neither overlap_events nor sequential_requests is sequential, as in DeepSpeed, but overlapping
    in a space that says sequential_requests.
    """
    with tempfile.TemporaryDirectory(
        prefix="tensorferry-sweep-", dir=sweep_config.nvme_dir
    ) as scratch:
        file = os.path.join(scratch, "read.bin")
        _fill(file, _bytes(sweep_config.io_size))
        return _run_points("read", file, sweep_config, flush_cache_job, sync_job, cmd_lines)


def run_write_sweep(sweep_config, flush_cache_job, sync_job, cmd_lines):
    """Writes a file at every point. See run_read_sweep()."""
    with tempfile.TemporaryDirectory(
        prefix="tensorferry-sweep-", dir=sweep_config.nvme_dir
    ) as scratch:
        file = os.path.join(scratch, "write.bin")
        return _run_points("write", file, sweep_config, flush_cache_job, sync_job, cmd_lines)


def find_command():
    """The path of the command `tensorferry`: $TENSORFERRY_COMMAND, else the one installed beside
    this Python, else the first on the PATH. Raises FileNotFoundError."""
    named = None if privileged() else os.environ.get("TENSORFERRY_COMMAND")
    if named:
        found = shutil.which(named)
        if not found:
            raise FileNotFoundError(
                f"TENSORFERRY_COMMAND is {named}, which is no program: set it "
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


def main():
    """Becomes `tensorferry sweep` with the arguments of this program."""
    try:
        command = find_command()
    except FileNotFoundError as error:
        sys.exit(f"tensorferry.sweep: {error}")
    sys.stdout.flush()
    os.execv(command, [command, "sweep", *sys.argv[1:]])


def _search_space(path):
    if path is None:
        return DEFAULT_SWEEP_CONFIG
    with open(path) as file:
        return json.load(file)


def _bytes(text):
    """400M as a number, in binary units."""
    text = str(text).strip()
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}.get(text[-1:].upper())
    digits = text[:-1] if scale else text
    if not digits.isascii() or not digits.isdigit():
        raise ValueError(f"io_size is {text!r}: give a size such as 400M or 1G")
    return int(digits) * (scale or 1)


def _fill(path, size):
    with open(path, "wb") as file:
        for start in range(0, size, CHUNK_BYTES):
            file.write(os.urandom(min(CHUNK_BYTES, size - start)))
        file.flush()
        os.fsync(file.fileno())


def _run_points(direction, file, sweep_config, flush_cache_job, sync_job, cmd_lines):
    command = find_command()
    # Where sequential is a flag, its absence means the other thing.
    flags = {word for line in cmd_lines for option in line for word in option.split()}
    inverse = "--sequential_requests" in flags | {f"--{name}" for name in sweep_config.search_space}
    points = [_options(line, inverse) for line in cmd_lines]
    engines = {options.get("--engine") for options in points}
    failed = 0
    for options in points:
        folder = os.path.join(sweep_config.log_dir, direction)
        if len(engines) > 1:
            folder = os.path.join(sweep_config.log_dir, options.get("--engine", "auto"), direction)
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


def _options(cmd_line, inverse):
    """A point's options by name, with the one of the two modes that it has."""
    options = dict(DEFAULT_POINT)
    for option in cmd_line:
        name, *value = option.split(maxsplit=1) or [None]
        if name:
            options[name] = value[0].strip() if value else None
    if options.get("--threads") == "1":  # DeepSpeed's own spaces have it; a point has one anyway
        del options["--threads"]
    if not options.keys() & {"--overlap_events", "--sequential_requests"}:
        options["--overlap_events" if inverse else "--sequential_requests"] = None
    return options


def _log_name(direction, options):
    submit = "single" if "--single_submit" in options else "block"
    mode = "overlap" if "--overlap_events" in options else "sequential"
    name = (
        f"{direction}_{submit}_{mode}_t1_p{options['--io_parallel']}"
        f"_d{options['--queue_depth']}_bs{options['--block_size']}.txt"
    )
    return name.replace(os.sep, "-")  # a value that is none fails as a point, not as a path


def _run(job):
    """Runs it in a shell, as scripts expect; says so if it fails, and returns whether it worked."""
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
