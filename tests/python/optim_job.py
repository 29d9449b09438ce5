"""A rank of a training with torch's DistributedDataParallel or FSDP2. Prints a digest of the
parameters after each step, and at the end its own directory.

python optim_job.py (ddp|fsdp) (torch|tensorferry|gradients) DIRECTORY

gradients: with those on the drive too.
"""

import hashlib
import os
import sys

import tensorferry.optim
import torch
import torch.distributed as dist
from tensorferry.optim.stored_gradient import entry_of
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training import loss_of, small_model


def digest(model):
    sums = hashlib.sha256()
    for param in model.parameters():
        whole = param.full_tensor() if hasattr(param, "full_tensor") else param
        sums.update(whole.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return sums.hexdigest()


def check_gradients_in_buckets_are_refused(directory):
    """DistributedDataParallel keeps them in memory; made before or after the optimizer."""

    def optimizer_of(model):
        return tensorferry.optim.AdamW(
            model.parameters(), nvme_path=directory, offload_gradients=True
        )

    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}, None):
        for ddp_first in (True, False):
            model = small_model()
            optimizer = None if ddp_first else optimizer_of(model)
            wrapped = DistributedDataParallel(model, **(options or {}))
            if options is None:
                wrapped.register_comm_hook(None, allreduce_hook)
            optimizer = optimizer or optimizer_of(model)
            try:
                loss_of(wrapped, dist.get_rank()).backward()
            except RuntimeError as error:
                print("refused", error, flush=True)
            else:
                raise AssertionError(f"gradients of one rank passed for those of all: {options}")
            optimizer.close()


def check_overlap_is_refused(directory):
    """Before anything is done: an optimizer without overlap can be made."""
    for overlap in ("backward", "iteration"):
        model = DistributedDataParallel(small_model())
        before = digest(model)
        try:
            tensorferry.optim.AdamW(model.parameters(), nvme_path=directory, overlap=overlap)
        except RuntimeError as error:
            print("refused", error, flush=True)
        assert digest(model) == before
        tensorferry.optim.AdamW(model.parameters(), nvme_path=directory).close()


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
            model.parameters(),
            lr=0.02,
            nvme_path=directory,
            buffer_count=1,
            buffer_bytes=1,
            offload_gradients=whose == "gradients",
        )
    norm = 0
    for step in range(10):
        optimizer.zero_grad()
        for micro in range(1 + step % 3):
            loss_of(model, 100 * step + 10 * micro + dist.get_rank()).backward()
        assert whose != "gradients" or all(entry_of(p.grad) for p in model.parameters())
        if step % 2:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        optimizer.step()
        if step == 5:
            optimizer.load_state_dict(optimizer.state_dict())
        print(step, digest(model), float(norm), flush=True)
    if whose != "torch":
        print("directory", *optimizer._store.space.directories, flush=True)
    dist.barrier()
    if whose == "torch":
        os._exit(0)  # how torch ends is not what is tested
    optimizer.close()
    if whose == "gradients":
        check_gradients_in_buckets_are_refused(directory)
    elif whose == "tensorferry" and kind == "ddp":
        check_overlap_is_refused(directory)
    elif kind == "fsdp":
        check_masters_in_memory()
    dist.destroy_process_group()


main()
