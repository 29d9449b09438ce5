"""Where things are, and how the tests of the house run programs."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command, **options):
    """Runs a command that must succeed and returns what it printed."""
    done = subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        **options,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}"
    return done.stdout


def built_job(build_dir, name):
    """The path of a program of this folder; skips the test if it is not built."""
    program = build_dir / "tests" / "house" / name
    if not program.is_file():
        pytest.skip(f"{program} is not built: run `make` first")
    return program
