"""GPUs on a machine that has none: how the driver's library is found, and how its errors are told.
The library is tests/fake_cuda, which moves no bytes; data is for tests/gpu."""

import errno
import re

import pytest
from ferry_program import BUILD

FAKES = BUILD / "tests" / "fake_cuda"
BENCH = ("bench", "--gpu", "--sizes", "64K", "--iterations", "2", "--nvme-path", ".")


def error_of(ferry, fake="whole", asked="", arguments=BENCH):
    done = ferry(*arguments, code=1, LD_LIBRARY_PATH=str(FAKES / fake), FAKE_CUDA=asked)
    return done.stderr


def test_without_a_driver_the_reason_is_told(ferry):
    done = ferry(*BENCH, code=1)
    assert "ENODEV" in done.stderr and "libcuda.so.1" in done.stderr and "--gpus all" in done.stderr


def test_a_driver_that_is_too_old_is_named_with_what_it_lacks(ferry):
    assert "too old: libcuda.so.1 has no cuEventQuery" in error_of(ferry, "old")


@pytest.mark.parametrize(
    ("asked", "code", "words"),
    [
        ("cuInit=100", errno.ENODEV, "cuInit"),
        ("cuInit=999", errno.EIO, "CUDA error 999"),
        ("cuDevicePrimaryCtxRetain=2", errno.ENOMEM, "CUDA_ERROR_OUT_OF_MEMORY"),
        ("cuMemAlloc_v2=2", errno.ENOMEM, "CUDA_ERROR_OUT_OF_MEMORY"),
        ("cuStreamCreate=2", errno.ENOMEM, "cuStreamCreate"),
        ("cuStreamQuery=700", errno.EIO, "CUDA_ERROR_ILLEGAL_ADDRESS"),
        ("cuMemcpyAsync=700", errno.EIO, "an earlier kernel or copy"),
        ("cuMemcpyAsync=1", errno.EFAULT, "has the memory been freed?"),
        ("cuEventRecord=2 cuStreamQuery=600", errno.ENOMEM, "cuStreamQuery"),
        ("capturing=1", errno.EBUSY, "CUDA graph"),
        ("cuMemcpyAsync=900", errno.EBUSY, "CUDA graph"),
    ],
)
def test_errors_of_cuda_are_told_as_ours(ferry, asked, code, words):
    said = error_of(ferry, asked=asked)
    assert f"({errno.errorcode[code]})" in said and words in said
    assert re.search(r"\bcu[A-Z]|CUDA", said)


def test_an_error_while_copying_names_the_file_and_the_place_in_it(ferry):
    said = error_of(ferry, asked="cuMemcpyAsync=700")
    assert "copy to cuda:0: ./" in said and "offset 0, length 65536" in said


@pytest.mark.parametrize("flag", ["--gpu", "--gds"])
def test_a_sweep_tells_before_its_first_point(ferry, flag):
    sweep = ("sweep", "--nvme_dir", ".", "--io_size", "1M", flag)
    said = error_of(ferry, asked="cuMemAlloc_v2=2", arguments=sweep)
    assert "ENOMEM" in said


def test_transfers_of_the_cpu_do_not_look_for_the_library(ferry):
    ferry("bench", "--sizes", "64K", "--iterations", "2", "--nvme-path", ".",
          LD_LIBRARY_PATH=str(FAKES / "whole"), FAKE_CUDA="cuInit=999")  # fmt: skip
