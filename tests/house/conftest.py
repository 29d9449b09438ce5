"""What was built and what is installed from it, for the tests of the house."""

import os
from pathlib import Path

import pytest
from house import ROOT, run


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
