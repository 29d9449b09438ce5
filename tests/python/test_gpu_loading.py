"""What a process without CUDA keeps, with a driver's library in reach (tests/fake_cuda)."""

import os
from pathlib import Path

import pytest
from programs import run_python

BUILD = Path(
    os.environ.get("TENSORFERRY_BUILD_DIR", Path(__file__).parents[2] / "build" / "release")
)
WHOLE = BUILD / "tests" / "fake_cuda" / "whole"


def python(code, *args):
    done = run_python(code, *args, timeout=120, LD_LIBRARY_PATH=str(WHOLE))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(autouse=True)
def library():
    if not (WHOLE / "libcuda.so.1").exists():
        pytest.skip("run `make` first")


def test_the_library_is_never_loaded_by_us(path):
    python("""
import sys, tensorferry
buffer = tensorferry.PinnedBuffer(1 << 20)
with tensorferry.Handle() as handle:
    handle.write_now(buffer, sys.argv[1])
    handle.read(buffer, sys.argv[1]).wait()
tensorferry.gds_handle().sync_pread(buffer, sys.argv[1])
assert "libcuda" not in open("/proc/self/maps").read()
""", path)  # fmt: skip


def test_a_library_that_nobody_has_started_is_left_alone(path):
    """fork() stays safe: cuInit is not called, which the library would show."""
    python("""
import ctypes, sys, tensorferry
cuda = ctypes.CDLL("libcuda.so.1")
buffer = tensorferry.PinnedBuffer(1 << 20)
with tensorferry.Handle() as handle:
    handle.write_now(buffer, sys.argv[1])
    handle.read(buffer, sys.argv[1]).wait()
assert cuda.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 3  # not initialized
""", path)  # fmt: skip


def test_memory_of_the_cpu_moves_as_before_beside_cuda(path):
    python("""
import ctypes, os, sys, tensorferry
assert ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
source, target = os.urandom(5 << 20), bytearray(5 << 20)
with tensorferry.Handle() as handle:
    handle.write(source, sys.argv[1]).wait()
    handle.read(target, sys.argv[1]).wait()
assert target == source
pid = os.fork()
if pid == 0:
    with tensorferry.Handle() as handle:
        handle.read_now(target, sys.argv[1])
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
""", path)  # fmt: skip
