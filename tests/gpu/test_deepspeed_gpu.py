"""Real DeepSpeed on a GPU with tensorferry under it: ZeRO-Infinity and FastFileWriter."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

JOB = Path(__file__).with_name("deepspeed_gpu_job.py")
START = "import tensorferry.deepspeed; tensorferry.deepspeed.enable();"


def run(code, *args):
    environment = os.environ | {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def losses(folder, device, use_gds=False):
    place = {"device": device, "pin_memory": True}
    if device == "nvme":
        place["nvme_path"] = str(folder / "nvme")
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "sub_group_size": 300_000,
            "offload_optimizer": place | {"buffer_count": 4},
            "offload_param": place | {"buffer_count": 8, "buffer_size": 2_000_000},
        },
        "aio": {"block_size": 262144, "queue_depth": 8, "intra_op_parallelism": 1,
                "single_submit": False, "overlap_events": True, "use_gds": use_gds},
    }  # fmt: skip
    path = folder / f"{device}{use_gds}.json"
    path.write_text(json.dumps(config))
    start = START + f"import runpy, sys; sys.argv[1:] = sys.argv[1:]; runpy.run_path({str(JOB)!r})"
    told = run(start, path)
    return [line for line in told.splitlines() if line.startswith("loss")], told


def test_zero_infinity_on_a_gpu_gives_the_losses_of_offload_to_memory(tmp_path):
    in_memory, _ = losses(tmp_path, "cpu")
    on_drive, told = losses(tmp_path, "nvme")
    assert len(in_memory) == 6 and on_drive == in_memory
    moved = json.loads(next(line for line in told.splitlines() if line.startswith("moved"))[6:])
    assert moved["read_bytes"] > 10_000_000 and moved["written_bytes"] > 10_000_000


def test_the_gds_builder_hands_out_our_gds_handle():
    run(
        START
        + """
import torch, tensorferry
from deepspeed.ops.op_builder import GDSBuilder, AsyncIOBuilder
assert GDSBuilder().is_compatible()
handle = GDSBuilder().load().gds_handle(1 << 20, 8, False, True, 1)
assert type(handle) is tensorferry.gds_handle
tensor = handle.new_pinned_device_tensor(1000, torch.empty(0, dtype=torch.float32))
assert tensor.is_cuda
handle.free_pinned_device_tensor(tensor)
assert AsyncIOBuilder().load().aio_handle is tensorferry.aio_handle
"""
    )


@pytest.mark.parametrize("double", [False, True])
def test_fast_file_writer_takes_tensors_of_a_gpu(tmp_path, double):
    run(
        START
        + """
import os, sys, torch
from deepspeed.io import fast_file_writer
from deepspeed.ops.op_builder import AsyncIOBuilder

class Utils:  # what the op would give, which is not built here
    @staticmethod
    def cast_to_byte_tensor(tensors):
        one = lambda t: t if t.nbytes <= 1 else t.contiguous().view(-1).view(torch.uint8)
        return [one(t) for t in tensors] if isinstance(tensors, list) else one(tensors)

class UtilsBuilder:
    def load(self, verbose=False):
        return Utils

fast_file_writer.UtilsBuilder = UtilsBuilder
path, double = sys.argv[1], sys.argv[2] == "True"
handle = AsyncIOBuilder().load().aio_handle(1 << 20, 8, False, True, 1)
pinned = handle.new_cpu_locked_tensor(4 << 20, torch.empty(0, dtype=torch.uint8))
config = fast_file_writer.FastFileWriterConfig(
    dnvme_handle=handle, pinned_tensor=pinned, double_buffer=double)
writer = fast_file_writer.FastFileWriter(file_path=path, config=config)
model = {"a": torch.arange(3_000_000, device="cuda"), "b": torch.ones(777, device="cuda")}
torch.save(model, writer, _use_new_zipfile_serialization=False)
writer.close()
back = torch.load(path, weights_only=True)
assert all(torch.equal(back[name], model[name]) for name in model)
""",
        tmp_path / "saved.pt",
        double,
    )
