"""The library compiles for another processor: what is chosen at run time has a baseline there.
`make aarch64` builds all of it and runs its tests."""

import shutil

import pytest
from house import ROOT, run

COMPILER = "aarch64-linux-gnu-g++"
# All but the engines, which need that processor's liburing and libaio.
SOURCES = sorted(
    path.relative_to(ROOT).as_posix()
    for room in ("base", "os", "memory", "files")
    for path in (ROOT / "src" / room).glob("*.cc")
    if not path.name.endswith("_test.cc")
)


def compile_for_aarch64(source, tmp_path, *folders):
    if not shutil.which(COMPILER):
        pytest.skip(f"no {COMPILER}")
    run(
        COMPILER,
        "-std=c++20",
        "-O2",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-c",
        *(f"-I{folder}" for folder in folders),
        source,
        "-o",
        tmp_path / "object.o",
        cwd=ROOT,
    )


@pytest.mark.parametrize("source", SOURCES)
def test_it_compiles_for_aarch64(source, tmp_path):
    compile_for_aarch64(source, tmp_path, "include", "src")


def test_the_public_headers_compile_for_aarch64(tmp_path):
    source = tmp_path / "user.cc"
    source.write_text('#include "tensorferry/tensorferry.h"\n')
    compile_for_aarch64(source, tmp_path, "include")
