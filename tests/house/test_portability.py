"""The library compiles for another processor: what is chosen at run time has a baseline there."""

import shutil

import pytest

from conftest import ROOT, run

COMPILER = "aarch64-linux-gnu-g++"
# All but the engines, which need that processor's liburing and libaio.
SOURCES = sorted(
    path.relative_to(ROOT).as_posix()
    for room in ("base", "os", "memory", "files")
    for path in (ROOT / "src" / room).glob("*.cc")
    if not path.name.endswith("_test.cc")
)


@pytest.mark.parametrize("source", SOURCES)
def test_it_compiles_for_aarch64(source, tmp_path):
    if not shutil.which(COMPILER):
        pytest.skip(f"no {COMPILER}")
    run(COMPILER, "-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", "-c", "-Iinclude", "-Isrc",
        ROOT / source, "-o", tmp_path / "object.o", cwd=ROOT)
