"""The calls that are made most stay within their budget of instructions, as callgrind counts
them."""

import platform
import shutil
import subprocess
import sys

import pytest
from house import ROOT, run

COMPILER = "12"  # g++, whose code the budget is of


def test_the_calls_that_are_made_most_keep_to_their_budget(build_dir, cxx):
    if not shutil.which("valgrind"):
        pytest.skip("valgrind is not installed")
    version = run(cxx, "--version").split("\n")[0]
    if platform.machine() != "x86_64" or run(cxx, "-dumpversion").strip() != COMPILER:
        pytest.skip(f"the budget is of g++ {COMPILER} on x86-64, not of {version}")
    program = build_dir / "benchmarks" / "hot_paths"
    if not program.is_file():
        pytest.skip(f"{program} is not built: run `make` first")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.figures.hot_paths",
            "--program",
            program,
            "--directory",
            build_dir,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    print(done.stdout)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
