"""Several ranks: the stage of the configuration chooses one of torch's own engines."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn import Module, Parameter

from .sections import ConfigError

_log = logging.getLogger("tensorferry")


def join_ranks() -> int:
    """Joins the ranks that torchrun has started, unless the program has. Returns how many there
    are."""
    dist = torch.distributed
    if not dist.is_available():
        return 1
    alone = os.environ.get("WORLD_SIZE", "1") in ("", "1")
    if not dist.is_initialized() and not alone and "RANK" in os.environ:
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            local = int(os.environ.get("LOCAL_RANK", "0"))
            torch.cuda.set_device(local % torch.cuda.device_count())
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    return dist.get_world_size() if dist.is_initialized() else 1


def check_same(settings: dict[str, Any]) -> None:
    """Raises ConfigError on every rank if one has other settings than rank 0: they would wait for
    each other in vain."""
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, settings)
    for rank, own in enumerate(every):
        for name, value in every[0].items():
            if own[name] != value:
                raise ConfigError(
                    f"{name} of the configuration is {value!r} on rank 0 and {own[name]!r} on rank "
                    f"{rank}: give all ranks the same"
                )


def is_distributed(model: Module) -> bool:
    """Whether the program has made the model one of several ranks already."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule

    return is_ddp(model) or any(isinstance(m, FSDPModule) for m in model.modules())


def is_ddp(model: Module) -> bool:
    """Whether the program has wrapped the model, or a part of it, in DistributedDataParallel."""
    wrapper = torch.nn.parallel.DistributedDataParallel
    return any(isinstance(module, wrapper) for module in model.modules())


def distribute(model: Module, stage: int) -> Module:
    """Makes a model one of all ranks: stage 0 by DistributedDataParallel, stages 1 to 3 by FSDP2.
    All ranks get the values of rank 0."""
    if stage == 0:
        from torch.nn.parallel import DistributedDataParallel

        _log.info("stage 0: DistributedDataParallel, with all weights on every rank")
        devices = {param.device for param in model.parameters()}
        own = [devices.pop()] if len(devices) == 1 else []
        on_gpu = bool(own) and own[0].type == "cuda"
        return DistributedDataParallel(model, device_ids=own if on_gpu else None)
    if stage == 1:
        _log.warning("stage 1 is done as stage 2: FSDP2 shards gradients where it shards states")
    _shard(model, reshard=stage == 3)
    return model


def _shard(model: Module, reshard: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    kinds = {param.device.type for param in model.parameters()}
    if kinds == {"meta"}:
        kinds = {"cuda" if torch.cuda.is_available() else "cpu"}
    kind = kinds.pop() if len(kinds) == 1 else "cpu"
    mesh = init_device_mesh(kind, (torch.distributed.get_world_size(),))
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type != "meta":
            torch.distributed.broadcast(tensor.detach(), src=0)
    modules = list(_repeated(model))
    for module in modules:
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    # What no repeated module has is needed again at once, when the backward pass begins.
    fully_shard(model, mesh=mesh, reshard_after_forward=None if reshard else False)
    _log.info(
        "FSDP2 shards %d modules and what is left, and %s gathered weights after the forward pass",
        len(modules),
        "lets go of" if reshard else "keeps",
    )


def _repeated(model: Module) -> Iterator[Module]:
    """Yields the outermost modules that a list or a sequence has, as the layers of a transformer
    are: their weights are gathered together. None that shares weights with another module."""
    users: dict[Parameter, int] = {}
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                users[param] = users.get(param, 0) + 1

    def below(module: Module) -> Iterator[Module]:
        listed = isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential))
        for child in module.children():
            params = list(child.parameters())
            if listed and type(child).forward is not Module.forward and params:
                if all(_is_inside(child, param, users[param]) for param in params):
                    yield child
            else:
                yield from below(child)

    return below(model)


def _is_inside(module: Module, param: Parameter, uses: int) -> bool:
    held = sum(own is param for part in module.modules() for own in part._parameters.values())
    return held == uses


def renamed(groups: Iterable[Any], before: dict[Parameter, str], model: Module) -> list[Any]:
    """Parameters, or groups of them, with those that the model has now in the place of those that
    it had `before`."""
    names = dict(model.named_parameters())
    if not names.keys() >= set(before.values()):  # DistributedDataParallel keeps parameters
        return list(groups)

    def now(param: Any) -> Any:
        return names[before[param]] if param in before else param

    result = []
    for group in groups:
        if isinstance(group, dict):
            own = group["params"]
            params = [own] if isinstance(own, torch.Tensor) else own
            result.append({**group, "params": [now(param) for param in params]})
        else:
            result.append(now(group))
    return result
