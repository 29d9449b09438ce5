"""The rows of compare.py about other ways to save and load tensors, and about imports."""

from __future__ import annotations

import os
import subprocess
from functools import partial
from pathlib import Path

from benchmarks.jobs.job import ROOT, JobFailed, Sample, size_text
from benchmarks.jobs.job_process import JobProcess
from benchmarks.jobs.peers import Peers
from benchmarks.rows.bench import Bench
from benchmarks.rows.row import Row, milliseconds, speed

SMALL_TENSORS = 10_000
# How the peer saves (some only load) and loads, its side in peer_jobs.py, its name in peers.py.
WAYS = [
    ("torch.save", "torch.load", "torch", "torch"),
    ("", "torch.load(mmap=True)", "torch mmap", "torch"),
    ("safetensors", "safetensors", "safetensors", "safetensors"),
    ("", 'safetensors(backend="pread")', "safetensors pread", "safetensors"),
    ("NumPy tofile", "NumPy fromfile", "NumPy", "NumPy"),
    ("", "fastsafetensors", "fastsafetensors", "fastsafetensors"),
    ("", "runai-model-streamer", "runai-model-streamer", "runai-model-streamer"),
    ("tensornvme", "tensornvme", "tensornvme", "tensornvme"),
    ("kvikio", "kvikio", "kvikio", "kvikio"),
]
WITHOUT_FORMAT = ("NumPy", "tensornvme", "kvikio")  # bytes alone, so our side has no header either
IMPORTS = {
    "torch": "torch",
    "NumPy": "numpy",
    "safetensors": "safetensors.torch",
    "fastsafetensors": "fastsafetensors",
    "runai-model-streamer": "runai_model_streamer",
    "tensornvme": "tensornvme",
    "DeepSpeed": "deepspeed",
}


def peer_rows(bench: Bench, peers: Peers) -> list[Row]:
    def process(side: str, peer: str) -> JobProcess:
        file = bench.read_file.parent / f"{side.replace(' ', '-')}.bin"
        made = JobProcess("peer_jobs.py", side, peers, peer, str(file))
        bench.at_end.append(made.end)
        return made

    formatted, raw = (process(side, "torch") for side in ("tensorferry", "tensorferry raw"))
    size = bench.large
    one = {"count": 1, "size": size}
    many = {"count": SMALL_TENSORS, "size": 0}
    rows: dict[str, list[Row]] = {"save": [], "load": [], "many": []}
    for save_name, load_name, side, peer in WAYS:
        theirs = process(side, peer)
        ours = raw if peer in WITHOUT_FORMAT else formatted
        for group, kind, what, name, options in (
            ("save", "save", f"a tensor of {size_text(size)}", save_name, one),
            ("load", "load", f"a tensor of {size_text(size)}", load_name, one),
            ("many", "load", f"{SMALL_TENSORS:,} tensors of 4 to 64 KiB", load_name, many),
        ):
            if name:
                mine, other = (partial(who.run, kind, **options) for who in (ours, theirs))
                row = Row(f"{kind} {what} / {name}", "GB/s", None, mine, other, speed, peer=peer)
                rows[group].append(row)
    return [*rows["save"], *rows["load"], *rows["many"]]


def import_time(python: Path, module: str) -> Sample:
    """The time of an import, without starting Python. An untimed import first brings the files into
    the page cache."""
    code = f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
    env = {"PYTHONPATH": str(ROOT / "build" / "release" / "python"), "DS_ACCELERATOR": "cpu"}
    command = [str(python), "-c", code]
    for _ in range(2):
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | env, check=False
        )
        if done.returncode != 0:
            said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise JobFailed(f"import {module}: {said[-1]}")
    return Sample(repetition_seconds=float(done.stdout.split()[-1]))


def import_rows(peers: Peers) -> list[Row]:
    def timed(peer: str, module: str) -> Sample:
        return import_time(peers.python(peer), module)

    return [
        Row(
            f"import / import {module}",
            "ms",
            None,
            partial(timed, "torch", "tensorferry"),
            partial(timed, peer, module),
            milliseconds,
            peer=peer,
        )
        for peer, module in IMPORTS.items()
    ]
