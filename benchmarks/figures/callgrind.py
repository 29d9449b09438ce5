"""Instructions of a call, counted by callgrind over all threads: unlike times, the same in every
run."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

SECONDS_MAX = 300


def instructions(command: Sequence[object], env: Mapping[str, str]) -> int:
    with tempfile.TemporaryDirectory(prefix="callgrind-") as folder:
        out = Path(folder) / "out"
        words = [
            "valgrind",
            "--quiet",
            "--tool=callgrind",
            f"--callgrind-out-file={out}",
            *map(str, command),
        ]
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, env=env, timeout=SECONDS_MAX
            )
        except subprocess.TimeoutExpired:
            sys.exit(f"{' '.join(words)}\nno end within {SECONDS_MAX} s")
        found = out.is_file() and re.search(r"^(?:summary|totals): (\d+)", out.read_text(), re.M)
    if done.returncode != 0 or not found:
        sys.exit(f"{' '.join(words)}\n{done.stdout}\n{done.stderr[-2000:]}")
    return int(found[1])


def instructions_each(
    make: Callable[[int], Sequence[object]], counts: tuple[int, int], env: Mapping[str, str]
) -> float:
    """Instructions of one call. `make(count)` is a command that makes `count` calls; the difference
    of two runs excludes start and end."""
    few, many = (instructions(make(count), env) for count in counts)
    return (many - few) / (counts[1] - counts[0])
