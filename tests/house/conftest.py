"""Where things are, for the tests of the house."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root():
    return ROOT


@pytest.fixture(scope="session")
def build_dir():
    """The build under test; `make test` has made it."""
    path = Path(os.environ.get("TENSORFERRY_BUILD_DIR", ROOT / "build" / "release"))
    if not (path / "CMakeCache.txt").is_file():
        pytest.skip(f"{path} is not configured: run `make` first")
    return path


@pytest.fixture(scope="session")
def prefix(build_dir, tmp_path_factory):
    """A temporary directory that the library is installed into."""
    path = tmp_path_factory.mktemp("prefix")
    run("cmake", "--install", build_dir, "--prefix", path)
    return path


@pytest.fixture(scope="session")
def cxx(build_dir):
    """The compiler that made the build."""
    for line in (build_dir / "CMakeCache.txt").read_text().splitlines():
        if line.startswith("CMAKE_CXX_COMPILER:"):
            return line.partition("=")[2]
    raise AssertionError("no compiler in CMakeCache.txt")


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
