"""Real DeepSpeed on a GPU with tensorferry under it: ZeRO-Infinity and FastFileWriter."""

import subprocess
import sys

import pytest

pytest.importorskip("deepspeed")

from deepspeed_training import ENABLE, FAST_FILE_WRITER, config, train
from ranks import rank_environments


def run(code, *args):
    (environment,) = rank_environments(1)
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def losses(folder, place):
    """The losses of a training that offloads to `place`, and the bytes that moved."""
    settings = config(folder, place, place, {"torch_adam": True}, zero_force_ds_cpu_optimizer=False)
    ((found, moved),) = train(settings, device="cuda", steps=6)
    return found, moved


def test_zero_infinity_on_a_gpu_gives_the_losses_of_offload_to_memory(tmp_path):
    in_memory, _ = losses(tmp_path, "cpu")
    on_drive, moved = losses(tmp_path, "nvme")
    assert len(in_memory) == 6 and on_drive == in_memory
    assert moved["read_bytes"] > 10_000_000 and moved["written_bytes"] > 10_000_000


def test_the_gds_builder_hands_out_our_gds_handle():
    run(
        ENABLE
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
        FAST_FILE_WRITER
        + """
path, double = sys.argv[1], sys.argv[2] == "True"
handle = AsyncIOBuilder().load().aio_handle(1 << 20, 8, False, True, 1)
writer = open_writer(path, handle, 4 << 20, double)
model = {"a": torch.arange(3_000_000, device="cuda"), "b": torch.ones(777, device="cuda")}
torch.save(model, writer, _use_new_zipfile_serialization=False)
writer.close()
back = torch.load(path, weights_only=True)
assert all(torch.equal(back[name], model[name]) for name in model)
""",
        tmp_path / "saved.pt",
        double,
    )
