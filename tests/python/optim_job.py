"""A rank of a training with torch's DistributedDataParallel or FSDP2. Prints a digest of the
parameters after each step, and at the end its own directory.

python optim_job.py (ddp|fsdp) (torch|tensorferry) DIRECTORY
"""

import hashlib
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tensorferry.optim
from training import loss_of, small_model


def digest(model):
    sums = hashlib.sha256()
    for param in model.parameters():
        whole = param.full_tensor() if hasattr(param, "full_tensor") else param
        sums.update(whole.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return sums.hexdigest()


def check_gradients_on_the_drive(model, directory):
    """Those of distributed parameters are stepped, but their norm is not known on one rank."""
    optimizer = tensorferry.optim.AdamW(
        model.parameters(), nvme_path=directory, offload_gradients=True
    )
    loss_of(model, 0).backward()
    assert all(param.grad is None for param in model.parameters())
    try:
        optimizer.clip_grad_norm_(1.0)
    except NotImplementedError:
        pass
    else:
        raise AssertionError("a norm of one rank passed for that of all")
    before = digest(model)
    optimizer.step()
    assert digest(model) != before
    optimizer.close()


def check_masters_in_memory():
    """What somebody changes is stepped, in the part that each rank has."""
    model = small_model()
    fully_shard(model)
    config = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 0.0}}}
    model, optimizer = tensorferry.initialize(model, config)
    for _ in range(2):
        optimizer.backward(loss_of(model, 0))
        optimizer.step()
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(2)
        changed = digest(model)
        optimizer.backward(loss_of(model, 0))
        optimizer.step()
        assert digest(model) == changed


def main():
    kind, whose, directory = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = small_model()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        for layer in (model[0], model[3]):
            fully_shard(layer)
        fully_shard(model)
    if whose == "torch":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
    else:
        optimizer = tensorferry.optim.AdamW(
            model.parameters(), lr=0.02, nvme_path=directory, buffer_count=1, buffer_bytes=1
        )
    for step in range(10):
        optimizer.zero_grad()
        loss_of(model, 10 * step + dist.get_rank()).backward()
        if step % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        if step == 5:
            optimizer.load_state_dict(optimizer.state_dict())
        print(step, digest(model), flush=True)
    if whose != "torch":
        print("directory", *optimizer._space.directories, flush=True)
    dist.barrier()
    if whose == "torch":
        os._exit(0)  # how torch ends is not what is tested
    optimizer.close()
    if kind == "fsdp":
        check_gradients_on_the_drive(model, directory)
        check_masters_in_memory()
    dist.destroy_process_group()


main()
