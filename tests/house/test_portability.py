"""The library compiles for another processor: what is chosen at run time has a baseline there.
`make aarch64` builds all of it and runs its tests."""

import shutil

import pytest
from house import ROOT, run

COMPILER = "aarch64-linux-gnu-g++"
# All below the engines, which need that processor's liburing and libaio.
ROOMS = ["base", "os", "memory", "files"]


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


@pytest.mark.parametrize("room", ROOMS)
def test_it_compiles_for_aarch64(room, tmp_path):
    """All files of a room at once, as the release build compiles them."""
    files = sorted(f for f in (ROOT / "src" / room).glob("*.cc") if "_test" not in f.name)
    assert files
    source = tmp_path / "room.cc"
    source.write_text("".join(f'#include "{room}/{file.name}"\n' for file in files))
    compile_for_aarch64(source, tmp_path, "include", "src")


def test_the_public_headers_compile_for_aarch64(tmp_path):
    source = tmp_path / "user.cc"
    source.write_text('#include "tensorferry/tensorferry.h"\n')
    compile_for_aarch64(source, tmp_path, "include")
