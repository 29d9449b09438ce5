"""A rank of a training on a GPU: FSDP2 in memory, and then with weights, states and gradients on
NVMe. Prints the kinds of models that gave the same numbers.

python ranks_job.py BACKEND DIRECTORY. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torch has
them; all ranks use the first GPU.
"""

import os
import sys

import tensorferry.offload
import tensorferry.optim
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

WIDTH = 515  # does not divide by two
LIMIT = 2 << 20


def make_model(mesh, **options):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH, device="cuda") for _ in range(8)]
    model = torch.nn.Sequential(*layers)
    for layer in layers[1:]:
        fully_shard(layer, mesh=mesh, **options)
    for layer, following in zip(layers[1:], layers[2:]):
        layer.set_modules_to_forward_prefetch([following])
    return fully_shard(model, mesh=mesh, **options)


def trained(model, optimizer):
    """Losses, norms, and the shards at the end."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for step in range(6):
        for _ in range(1 + step % 2):
            rows = torch.randn(16, WIDTH, generator=generator).cuda()
            loss = model(rows).float().square().mean()
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), norm.full_tensor().item()))
    model.reshard()
    return seen, [value.to_local().cuda() for value in model.state_dict().values()]


def compared(mesh, nvme, offload_gradients, **options):
    model = make_model(mesh, **options)
    adamw = torch.optim.AdamW(model.parameters(), 0.01, fused=True)
    expected = trained(model, adamw)
    model = make_model(mesh, **options)
    weights = tensorferry.offload.parameters(model, nvme, max_gpu_bytes=LIMIT, keep_bytes=0)
    optimizer = tensorferry.optim.AdamW(
        model.parameters(),
        0.01,
        nvme_path=nvme,
        offload_gradients=offload_gradients,
        buffer_bytes=1 << 20,
    )
    got = trained(model, optimizer)
    assert got[0] == expected[0], (got[0], expected[0])
    assert all(torch.equal(one, other) for one, other in zip(got[1], expected[1]))
    stats = weights.stats()
    assert stats["resident_bytes"] <= LIMIT and stats["read_bytes"] > 0
    assert stats["overflows"] == 0
    optimizer.close()
    weights.close()


def main():
    backend, nvme = sys.argv[1:]
    torch.cuda.set_device(0)
    dist.init_process_group(backend)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    try:
        model = make_model(mesh)
        trained(model, torch.optim.AdamW(model.parameters(), 0.01, fused=True))
    except RuntimeError as error:
        print("torch cannot:", str(error).splitlines()[0], flush=True)
        os._exit(0)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    compared(mesh, nvme, offload_gradients=True)
    print("fp32", flush=True)
    compared(mesh, nvme, offload_gradients=False, mp_policy=half)
    print("mixed", flush=True)
    compared(mesh, nvme, offload_gradients=True, reshard_after_forward=False)
    print("kept", flush=True)
    dist.barrier()
    os._exit(0)  # how torch ends is not what is tested


main()
