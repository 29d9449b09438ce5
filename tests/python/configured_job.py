"""What ranks do with a configuration of DeepSpeed's."""

import logging
import os

import tensorferry
import tensorferry.optim
import torch
import torch.distributed as dist
from forked_ranks import serve, word_of
from sharded_models import batch, loss_of, net, shard
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


def configuration(stage, nvme=None, weights=False, **more):
    """A configuration with states on NVMe, and weights too if they are wanted there."""
    place = {"device": "nvme", "nvme_path": nvme}
    zero = {"stage": stage}
    if nvme is not None:
        zero |= {"offload_optimizer": place} | ({"offload_param": place} if weights else {})
    params = {"lr": 0.02, "weight_decay": 0.0}
    return {
        "train_micro_batch_size_per_gpu": 5,
        "optimizer": {"type": "AdamW", "params": params},
        "zero_optimization": zero,
        **more,
    }


def configured(config, steps=4, **options):
    """The losses of a training with a configuration, and the kind of the model."""
    model, optimizer = tensorferry.initialize(net(width=64, depth=4), config, **options)
    losses = []
    for step in range(steps):
        dtype = next(model.parameters()).dtype
        loss = model(batch(step).to(dtype)).float().square().mean()
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    kind = type(model).__name__
    on_nvme = 0 if optimizer.weights is None else optimizer.weights.stats()["weight_bytes"]
    optimizer.close()
    return losses, kind, on_nvme


def staged(nvme):
    """All stages: the numbers of torch's own engine, made by hand."""
    seen = {}
    words = []
    log = logging.Handler()
    log.emit = lambda record: words.append(record.getMessage())
    logging.getLogger("tensorferry").addHandler(log)
    for stage in range(4):
        losses, kind, _ = configured(configuration(stage, nvme))
        said = any("stage 1 is done as stage 2" in word for word in words)
        assert said == (stage >= 1)
        if stage == 0:
            model = DistributedDataParallel(net(width=64, depth=4))
        else:
            model = shard(net(width=64, depth=4), reshard_after_forward=stage == 3)
        assert kind == type(model).__name__
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0, fused=True)
        for step, loss in enumerate(losses):
            expected = loss_of(model, step)
            assert loss == expected.item(), (stage, step)
            expected.backward()
            optimizer.step()
            optimizer.zero_grad()
        seen[str(stage)] = losses
    return seen


def resharded(nvme):
    """Of each stage of FSDP2 whether it lets go of gathered weights after the forward pass."""
    seen = {}
    for stage in (1, 2, 3):
        model, optimizer = tensorferry.initialize(net(), configuration(stage, nvme))
        model(batch(0))
        seen[str(stage)] = isinstance(model.blocks[0].up.weight, DTensor)
        optimizer.close()
    return seen


def configured_weights(nvme):
    """Weights, states and gradients on NVMe, clipped: the numbers of memory. A given list of
    parameters becomes that of the shards."""
    more = dict(gradient_clipping=0.05, gradient_accumulation_steps=2)
    for half in ({}, {"bf16": {"enabled": True}}):
        expected = configured(configuration(3, **more, **half))
        config = configuration(3, nvme, weights=True, **more, **half)
        got = configured(config, max_cpu_bytes=(100 if dist.get_world_size() == 1 else 60) << 10)
        assert got[0] == expected[0], (got, expected)
        assert got[2] > 0
    model = net()
    groups = [{"params": list(model.blocks.parameters()), "lr": 0.5}, {"params": model.head.weight}]
    _, optimizer = tensorferry.initialize(model, configuration(2), model_parameters=groups)
    assert [len(group["params"]) for group in optimizer.param_groups] == [18, 1]
    own = set(model.parameters())
    assert all(param in own for group in optimizer.param_groups for param in group["params"])
    return got[1]


def clipped_by_all(nvme):
    """What the configuration clips by is the norm over all ranks."""
    config = configuration(3, gradient_clipping=1e-3)
    config["optimizer"] = {"type": "SGD", "params": {"lr": 1.0}}
    model, optimizer = tensorferry.initialize(net(), config)
    before = [p.full_tensor() for p in model.parameters()]
    optimizer.backward(loss_of(model, 0))
    optimizer.step()
    model.reshard()
    moved = [p.full_tensor() - b for p, b in zip(model.parameters(), before)]
    return nn.utils.get_total_norm(moved).item()


def configured_words(nvme):
    """What a configuration of several ranks cannot have."""
    model = net()
    given = torch.optim.SGD(model.parameters(), 0.1)
    config = configuration(3)
    del config["optimizer"]
    return {
        "given": word_of(tensorferry.initialize, model, config, optimizer=given),
        "ddp": word_of(tensorferry.initialize, net(), configuration(0, nvme, weights=True)),
        "wrapped": word_of(
            tensorferry.initialize,
            DistributedDataParallel(net()),
            configuration(3, nvme, weights=True),
        ),
        "overlap": word_of(
            tensorferry.initialize, net(), configuration(3, nvme), overlap="backward"
        ),
        "own overlap": word_of(
            tensorferry.optim.AdamW, net().parameters(), nvme_path=nvme, overlap="iteration"
        ),
        "stages": word_of(tensorferry.initialize, net(), configuration(2 + dist.get_rank())),
        "left": os.listdir(nvme),
    }


def as_deepspeed(path, steps):
    """The losses of the training of tests/shared/deepspeed_job.py, by the same file."""
    torch.manual_seed(0)
    half = dict(dtype=torch.bfloat16)  # as zero.Init draws the values
    model = nn.Sequential(
        nn.Linear(256, 1024, **half),
        nn.GELU(),
        nn.Linear(1024, 1024, **half),
        nn.GELU(),
        nn.Linear(1024, 16, **half),
    )
    model, optimizer = tensorferry.initialize(model, path)
    generator = torch.Generator().manual_seed(1234 + dist.get_rank())
    losses = []
    for _ in range(steps):
        rows = torch.randn(8, 256, generator=generator, dtype=torch.bfloat16)
        loss = model(rows).float().pow(2).mean()
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert optimizer.weights.stats()["weight_bytes"] > 0
    return losses


if __name__ == "__main__":
    serve(globals())
