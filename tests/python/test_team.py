"""The threads that share the work on a tensor: torch's own, or others if there are none."""

import ctypes
import subprocess
import sys

import torch
from tensorferry import _core

BLOCK = 256


def quantized(values, threads):
    codes = torch.empty(values.numel(), dtype=torch.uint8)
    scales = torch.empty(-(-values.numel() // BLOCK))
    _core.quantize_moment("exp_avg", values, codes, scales, threads)
    return codes, scales


def test_fewer_threads_than_asked_for_do_all_of_it():
    """torch's library of OpenMP decides how many there are."""
    values = torch.randn(20_000 * BLOCK + 3)
    alone = quantized(values, 1)
    library = ctypes.CDLL(None)
    levels = library.omp_get_max_active_levels()
    library.omp_set_max_active_levels(0)
    try:
        codes, scales = quantized(values, 8)
    finally:
        library.omp_set_max_active_levels(levels)
    assert torch.equal(codes, alone[0]) and torch.equal(scales, alone[1])


def test_threads_without_torch_give_the_same_bits():
    code = """
import numpy, sys
from tensorferry import _core
assert "torch" not in sys.modules
values = numpy.linspace(-3, 3, 20_000 * 256 + 3, dtype=numpy.float32)
made = []
for threads in (1, 3):
    codes = numpy.zeros(values.shape, numpy.uint8)
    scales = numpy.zeros(20_001, numpy.float32)
    _core.quantize_moment("exp_avg", values, codes, scales, threads)
    made.append((codes, scales))
assert all((one == other).all() for one, other in zip(*made))
"""
    subprocess.run([sys.executable, "-c", code], check=True)
