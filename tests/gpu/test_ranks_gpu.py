"""FSDP2 on CUDA tensors with weights, states and gradients on NVMe.

One GPU shows one rank with NCCL, and two ranks where torch lets them share it. It cannot show NCCL
between GPUs, nor that GPUs read beside each other's collectives."""

import os
import sys

import pytest
from ranks import outputs_of_ranks

JOB = os.path.join(os.path.dirname(__file__), "ranks_job.py")


def run_ranks(ranks, backend, nvme):
    return outputs_of_ranks([sys.executable, JOB, backend, nvme], ranks)


def test_one_rank_with_nccl_gets_the_numbers_of_memory(tmp_path):
    assert run_ranks(1, "nccl", tmp_path) == ["fp32\nmixed\nkept\n"]


def test_two_ranks_that_share_a_gpu_get_the_numbers_of_memory(tmp_path):
    """NCCL refuses two ranks on a GPU; gloo copies through memory."""
    outputs = run_ranks(2, "gloo", tmp_path)
    if outputs[0].startswith("torch cannot:"):
        pytest.skip(outputs[0].strip())
    assert outputs == ["fp32\nmixed\nkept\n"] * 2
