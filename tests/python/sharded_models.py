"""Models that FSDP2 has sharded in its several ways, and what they are trained with."""

import functools
import hashlib
import warnings

import torch
import torch._dynamo  # DTensor imports it when it is first used: here, once for all ranks
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

warnings.simplefilter("ignore")


class Block(nn.Module):
    def __init__(self, width, recomputes=False):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.recomputes = recomputes

    def inner(self, x):
        return self.down(torch.relu(self.up(self.norm(x))))

    def forward(self, x):
        if self.recomputes:
            return x + checkpoint(self.inner, x, use_reentrant=False)
        return x + self.inner(x)


class Net(nn.Module):
    """Its rows do not divide by 2 or 4; the head has fewer rows than 4 ranks."""

    def __init__(self, width=37, depth=3, recomputes=False):
        super().__init__()
        self.first = nn.Linear(11, width)
        self.blocks = nn.ModuleList(Block(width, recomputes) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net(**options):
    torch.manual_seed(0)
    return Net(**options)


def shard(model, **options):
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def with_forward_prefetch():
    model = shard(net())
    for block, following in zip(model.blocks, model.blocks[1:]):
        block.set_modules_to_forward_prefetch([following])
    for block, following in zip(model.blocks[1:], model.blocks):
        block.set_modules_to_backward_prefetch([following])
    return model


def with_tensor_parallel():
    """All ranks but two are of the data."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = net(width=36)
    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
    return shard(model, mesh=mesh["dp"])


def with_replicas():
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("r", "s"))
    return shard(net(), mesh=mesh)


def with_tied_weights():
    model = net()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    return fully_shard(model)


def with_frozen_weights():
    model = net()
    model.blocks[0].requires_grad_(False)
    return shard(model)


def with_columns():
    model = net(width=36)
    by_columns = functools.partial(fully_shard, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    for block in model.blocks:
        by_columns(block)
    return fully_shard(model)


def half():
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


MODELS = {
    "rows": lambda: shard(net()),
    "mixed precision": lambda: shard(net(), mp_policy=half()),
    "checkpointing": lambda: shard(net(recomputes=True)),
    "kept after forward": lambda: shard(net(), reshard_after_forward=False),
    "forward prefetch": with_forward_prefetch,
    "replicas": with_replicas,
    "tensor parallel": with_tensor_parallel,
    "tied weights": with_tied_weights,
    "frozen weights": with_frozen_weights,
    "columns": with_columns,
    "one group": lambda: fully_shard(net()),
}


def digest(model):
    sums = hashlib.sha256()
    for value in model.state_dict().values():
        sums.update(value.full_tensor().contiguous().view(torch.uint8).numpy().tobytes())
    return sums.hexdigest()


def batch(step, rows=5):
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(rows, 11, generator=generator)


def loss_of(model, step):
    return model(batch(step)).float().square().mean()
