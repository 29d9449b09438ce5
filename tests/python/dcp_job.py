"""Ranks that save and load sharded states with torch.distributed.checkpoint.

Reads lines of JSON, [number of ranks, name of a function here, its arguments...], forks the ranks
and writes their exit statuses: importing torch takes longer than what they do.
"""

import json
import os
import socket
import sys
import traceback
import warnings

import tensorferry.dcp
import torch
import torch._dynamo  # DTensor imports it when it is first used: here, once for all ranks
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

warnings.simplefilter("ignore")

WRITERS = {"tensorferry": tensorferry.dcp.Writer, "torch": dcp.FileSystemWriter}
READERS = {"tensorferry": tensorferry.dcp.Reader, "torch": dcp.FileSystemReader}


def full_tensors(step):
    """What the state of a step holds; the same on all ranks."""
    make = torch.Generator().manual_seed(step)
    return {
        "rows": torch.randn(1000, 257, generator=make),
        "columns": torch.randn(64, 4096, generator=make),
        "narrow": torch.randn(500, 100, generator=make).bfloat16(),
        "uneven": torch.randn(7, 30_001, generator=make),
        "replicated": torch.randn(300, 300, generator=make),
        "scalar": torch.tensor(float(step)),
    }


PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "narrow": Shard(1), "uneven": Shard(0)}


def state_of(step, mesh, empty=False):
    """A state dict as FSDP2 makes it: DTensors, a plain tensor, and other objects."""
    state = {}
    for name, tensor in full_tensors(step).items():
        if name == "scalar":
            state[name] = torch.zeros(()) if empty else tensor
            continue
        tensor = distribute_tensor(tensor, mesh, [PLACEMENTS.get(name, Replicate())])
        state[name] = torch.zeros_like(tensor) if empty else tensor
    return {"model": state, "step": 0 if empty else step, "names": [] if empty else ["a", "b"]}


def same_state(state, step, mesh):
    expected = state_of(step, mesh)
    for name, tensor in expected["model"].items():
        got = state["model"][name]
        if isinstance(tensor, DTensor):
            tensor, got = tensor.to_local(), got.to_local()
        assert torch.equal(tensor, got), name
    assert state["step"] == step and state["names"] == ["a", "b"]


def save(mesh, folder, kind, step):
    """Saves the state of a step."""
    dcp.save(state_of(step, mesh), storage_writer=WRITERS[kind](folder))


def load(mesh, folder, kind, step):
    """Loads it and compares."""
    state = state_of(step, mesh, empty=True)
    dcp.load(state, storage_reader=READERS[kind](folder))
    same_state(state, step, mesh)


def asynchronous(mesh, folder):
    """Saves twice with async_save, and changes tensors meanwhile."""
    writer = tensorferry.dcp.Writer(folder)
    kept = tensorferry.dcp.Stager()
    small = tensorferry.dcp.Stager(stage_bytes=4096)  # most goes to ordinary memory
    for step, stager in enumerate([None, kept, small, kept], 1):
        state = state_of(step, mesh)
        saving = dcp.async_save(state, storage_writer=writer, async_stager=stager)
        for tensor in state["model"].values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
        saving.result()
        load(mesh, folder, "torch", step)
        if stager is not None:
            stats = stager.stats()
            assert (stats["buffer_bytes"] <= 4096) == (stager is small), stats
            assert stats["buffer_bytes_used"] == 0, stats


def alone(mesh, folder):
    """Each rank saves without the others, twice, and loads."""
    for step in (1, 2):
        state = state_of(step, mesh)
        writer = tensorferry.dcp.Writer(folder)
        dcp.save(state, storage_writer=writer, use_collectives=False)
        dist.barrier()
    for reader in READERS.values():
        state = state_of(2, mesh, empty=True)
        dcp.load(state, storage_reader=reader(folder))
        same_state(state, 2, mesh)


def fail(mesh, folder, layout):
    """The last rank fails in the middle of a second save."""
    writer = tensorferry.dcp.Writer(folder, layout=layout)
    dcp.save(state_of(1, mesh)["model"], storage_writer=writer)

    def stop(done, total):
        if mesh.get_rank() == mesh.size() - 1:
            raise InterruptedError("enough")

    writer = tensorferry.dcp.Writer(folder, layout=layout, progress=stop)
    try:
        dcp.save(state_of(2, mesh)["model"], storage_writer=writer)
    except dcp.api.CheckpointException as error:
        assert "enough" in str(error)
    else:
        raise AssertionError("it has saved")


def save_huggingface(mesh, folder, step):
    """Saves the tensors as safetensors files, twice, and loads them."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    for each in (step + 1, step):
        state = state_of(each, mesh)["model"]
        numbers = {"rows": 2, "uneven": 2}
        writer = tensorferry.dcp.Writer(folder, layout="huggingface", fqn_to_index_mapping=numbers)
        dcp.save(state, storage_writer=writer)
    for reader in (tensorferry.dcp.Reader, HuggingFaceStorageReader):
        state = state_of(step, mesh, empty=True)
        dcp.load(state["model"], storage_reader=reader(folder))
        same_state({"model": state["model"], "step": step, "names": ["a", "b"]}, step, mesh)


def load_huggingface(mesh, folder, step):
    """Saves shards with torch's writer, and loads them with our reader."""
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    state = state_of(step, mesh)["model"]
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True))
    state = state_of(step, mesh, empty=True)
    dcp.load(state["model"], storage_reader=tensorferry.dcp.Reader(folder))
    same_state({"model": state["model"], "step": step, "names": ["a", "b"]}, step, mesh)


def run_rank(rank, ranks, port, function, arguments):
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
    globals()[function](init_device_mesh("cpu", (ranks,)), *arguments)
    dist.barrier()


def fork_rank(*job):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            run_rank(*job)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)  # torch 2.13 with gloo sometimes aborts at exit
    return child


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    for line in sys.stdin:
        ranks, function, *arguments = json.loads(line)
        port = free_port()
        children = [fork_rank(rank, ranks, port, function, arguments) for rank in range(ranks)]
        print(json.dumps([os.waitpid(child, 0)[1] for child in children]), flush=True)
