"""Trainings with real DeepSpeed: their configuration, their processes and what these print."""

import json
import re
import subprocess
import sys
from pathlib import Path

from ranks import rank_environments
from warm_python import WARM_PYTHON

JOB = Path(__file__).with_name("deepspeed_job.py")
ENABLE = "import tensorferry.deepspeed; tensorferry.deepspeed.enable();"

# What async_io op the processes of a training use.
STARTS = {
    "tensorferry": ENABLE,
    "plain": f"import sys; sys.path.append({str(JOB.parent)!r});"
    "import plain_op; plain_op.enable();",
    "none": "",
}

# A program begins with this and gets a FastFileWriter without building DeepSpeed's op for it.
FAST_FILE_WRITER = (
    ENABLE
    + """
import sys
import torch
from deepspeed.io import fast_file_writer
from deepspeed.ops.op_builder import AsyncIOBuilder

class Utils:
    @staticmethod
    def cast_to_byte_tensor(tensors):
        one = lambda t: t if t.nbytes <= 1 else t.contiguous().view(-1).view(torch.uint8)
        return [one(t) for t in tensors] if isinstance(tensors, list) else one(tensors)

class UtilsBuilder:
    def load(self, verbose=False):
        return Utils

fast_file_writer.UtilsBuilder = UtilsBuilder

def open_writer(path, handle, buffer_bytes, double):
    pinned = handle.new_cpu_locked_tensor(buffer_bytes, torch.empty(0, dtype=torch.uint8))
    config = fast_file_writer.FastFileWriterConfig(
        dnvme_handle=handle, pinned_tensor=pinned, double_buffer=double)
    return fast_file_writer.FastFileWriter(file_path=path, config=config)
"""
)


def config(folder, optimizer, parameters, adam=None, **more):
    """Writes a configuration of ZeRO-3 that offloads to "nvme" or "cpu"; returns its path. `adam`
    goes to the optimizer's settings, `more` to the top."""
    nvme = {"device": "nvme", "nvme_path": str(folder / "nvme"), "pin_memory": True}
    cpu = {"device": "cpu", "pin_memory": True}
    made = {
        "train_micro_batch_size_per_gpu": 8,
        "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3} | (adam or {})},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "sub_group_size": 300_000,
            "offload_optimizer": nvme | {"buffer_count": 4} if optimizer == "nvme" else cpu,
            "offload_param": nvme | {"buffer_count": 8, "buffer_size": 2_000_000}
            if parameters == "nvme"
            else cpu,
        },
        "aio": {
            "block_size": 262144,
            "queue_depth": 8,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        },
    } | more
    path = folder / f"{optimizer}_{parameters}.json"
    path.write_text(json.dumps(made))
    return path


def train(config_path, ranks=1, op="tensorferry", device="cpu", **options):
    """Runs a training and returns, for each rank, (losses, bytes that tensorferry moved)."""
    ours = op == "tensorferry"
    words = [f"device={device}", *(f"{key}={value}" for key, value in options.items())]
    more = {"REPORT_HANDLES": "1" if ours else ""}
    python = [sys.executable]
    if device == "cpu":  # what uses a GPU is no child of a process that may have looked for one
        python = WARM_PYTHON
        more |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    run = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0])"
    processes = [
        subprocess.Popen(
            [*python, "-c", STARTS[op] + run, str(JOB), str(config_path), *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for environment in rank_environments(ranks, **more)
    ]
    results = []
    try:
        for process in processes:
            out, _ = process.communicate(timeout=900)
            assert process.returncode == 0, out[-5000:]
            losses = re.findall(r"^loss (\d+) (\S+)$", out, re.M)
            moved = json.loads(re.search(r"^moved (.*)$", out, re.M)[1]) if ours else None
            results.append((losses, moved))
    finally:
        for process in processes:
            process.kill()
    return results
