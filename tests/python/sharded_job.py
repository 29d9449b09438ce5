"""What ranks do with models that FSDP2 has sharded and whose weights are on NVMe."""

import contextlib
import ctypes
import functools
import hashlib
import os

import tensorferry.checkpoint
import tensorferry.dcp
import tensorferry.offload
import tensorferry.optim
import tensorferry.snapshot
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forked_ranks import serve, word_of
from sharded_models import MODELS, digest, loss_of, net, shard
from tensorferry._memory.stored_parameter import stored_parameter_of
from tensorferry.optim.stored_gradient import entry_of
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

LIMIT = 48 << 10  # bytes for weights


def on_drive(model, nvme, **options):
    """(weights, optimizer) of a model with weights, states and gradients on the drive."""
    weights = tensorferry.offload.parameters(
        model, nvme, **(dict(max_cpu_bytes=LIMIT, keep_bytes=0, checksums=True) | options)
    )
    optimizer = tensorferry.optim.AdamW(
        model.parameters(),
        lr=0.02,
        nvme_path=nvme,
        offload_gradients=True,
        buffer_count=1,
        buffer_bytes=1,
    )
    return weights, optimizer


def in_memory(model):
    return None, torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)


def by_mesh(model):
    """Parameters that torch can clip together."""
    meshes = {}
    for param in model.parameters():
        meshes.setdefault(param.device_mesh, []).append(param)
    return meshes.values()


def trained(model, optimizer, syncs=True, steps=3, scaler=None):
    """What each step gives: loss, norm, digest of the weights. The second one accumulates."""
    seen = []
    for step in range(steps):
        for micro in range(1 + step % 2):
            last = micro == step % 2
            if not syncs:
                model.set_requires_gradient_sync(last)
            loss = loss_of(model, 10 * step + micro)
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        norms = [nn.utils.clip_grad_norm_(own, 0.05) for own in by_mesh(model)]
        optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        optimizer.zero_grad()
        seen.append((loss.item(), *(norm.full_tensor().item() for norm in norms), digest(model)))
    return seen


def memory_of(model):
    """Bytes that each shard takes which has elements."""
    shards = [param.to_local() for param in model.parameters()]
    return {shard.untyped_storage().nbytes() for shard in shards if shard.numel() > 0}


def same_as_in_memory(kind, nvme, syncs):
    """Trains both ways and compares, to the bit."""
    model = MODELS[kind]()
    expected = trained(model, in_memory(model)[1], syncs)
    model = MODELS[kind]()
    weights, optimizer = on_drive(model, nvme)
    got = trained(model, optimizer, syncs)
    assert got == expected, (got, expected)
    stats = weights.stats()
    assert stats["written_bytes"] > stats["weight_bytes"] > 0
    assert (stats["read_bytes"] > 0) == (stats["weight_bytes"] > stats["buffer_bytes"])
    assert stats["overflows"] == 0
    assert memory_of(model) == {4}, memory_of(model)
    optimizer.close()
    weights.close(restore=True)
    assert digest(model) == expected[-1][-1]
    assert trained(model, in_memory(model)[1], syncs) is not None
    return stats["buffer_bytes"]


def scaled_as_in_memory(nvme):
    """GradScaler, with a loss that overflows in the second step: that step is skipped."""
    seen = []
    for place in (in_memory, functools.partial(on_drive, nvme=nvme)):
        model = MODELS["rows"]()
        weights, optimizer = place(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        seen.append(trained(model, optimizer, steps=1, scaler=scaler))
        scaler.scale(loss_of(model, 5) * (float("inf") if dist.get_rank() == 0 else 1)).backward()
        assert all(entry_of(p.grad) for p in model.parameters()) or weights is None
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen[-1] += [scaler.get_scale(), digest(model)]
        seen[-1] += trained(model, optimizer, steps=2, scaler=scaler)
    assert seen[0] == seen[1], seen
    assert seen[0][1] == 512.0 and seen[0][2] == seen[0][0][2]


def within_the_limit(nvme):
    """How much of the weights is in memory at most, and how much is on the drive."""
    model = shard(net(width=64, depth=6))
    weights, optimizer = on_drive(model, nvme, max_cpu_bytes=80 << 10)
    most = 0
    for block in model.blocks:
        block.register_forward_hook(
            lambda *_: most_of.append(weights.stats()["resident_bytes"]), always_call=True
        )
    most_of = []
    trained(model, optimizer)
    stats = weights.stats()
    most = max(most_of)
    return most, stats["buffer_bytes"], stats["weight_bytes"], stats["overflows"]


def status_bytes(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name + ":"))


def peaks_of_memory(nvme):
    """What this process has taken at most while a model was made and while it was trained, and
    the bytes of its weights."""

    def train(model, limit):
        weights, optimizer = on_drive(model, nvme, max_cpu_bytes=limit)
        peaks = [status_bytes("VmHWM")]
        for step in range(2):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        peaks.append(status_bytes("VmHWM"))
        optimizer.close()
        weights.close()
        return peaks

    train(shard(net(width=512, depth=1)), 1 << 20)  # brings code and libraries in
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # VmHWM begins anew
    before = status_bytes("VmRSS")
    with torch.device("meta"):
        model = net(width=512, depth=24)
    peaks = train(shard(model), 6 << 20)
    return [peak - before for peak in peaks], sum(param.nbytes for param in model.parameters())


def read_ahead(nvme):
    """(how many groups were there when FSDP2 asked, and how many were not), and how many there are:
    five passes with memory for one in use and the next one."""
    model = shard(net(width=64, depth=6))
    weights = tensorferry.offload.parameters(model, nvme, 112 << 10, keep_bytes=0)
    with torch.no_grad():
        for step in range(5):
            loss_of(model, step)
    stats = weights.stats()
    weights.close()
    return (stats["hits"], stats["misses"]), 7


def beside_what_is_in_use(nvme):
    """A pass with memory for one group, which another one has: the groups that it read. One that
    comes beyond the limit is read once, not for each of its weights."""
    model = shard(net(width=64, depth=4))
    weights = tensorferry.offload.parameters(model, nvme, 40 << 10, keep_bytes=0)
    with torch.no_grad(), weights.gather(model.blocks[1]):
        before = weights.stats()
        loss_of(model, 0)
    after = weights.stats()
    weights.close()
    return [after[name] - before[name] for name in ("misses", "overflows")]


def budgeted(nvme):
    """A budget for weights and states: what stays, and the numbers."""
    model = shard(net(width=64, depth=6))
    expected = trained(model, in_memory(model)[1])
    seen = []
    for limit in (100 << 10, 10 << 20):
        model = shard(net(width=64, depth=6))
        budget = tensorferry.MemoryBudget(limit)
        weights = tensorferry.offload.parameters(model, nvme, budget)
        optimizer = tensorferry.optim.AdamW(
            model.parameters(), lr=0.02, nvme_path=nvme, max_cpu_bytes=budget
        )
        assert trained(model, optimizer) == expected
        assert budget.held_bytes <= limit
        stats = weights.stats()
        seen.append((stats["kept_bytes"], stats["weight_bytes"]))
        optimizer.close()
        weights.close()
    return seen


def made_on_meta(nvme):
    """A model without memory gets its weights one group at a time."""
    with torch.device("meta"):
        model = net()
    shard(model)
    torch.manual_seed(3)
    weights, optimizer = on_drive(model, nvme)
    made = digest(model)
    with torch.device("meta"):
        other = net()
    shard(other)
    other.to_empty(device="cpu")
    torch.manual_seed(3)
    holding = [other.first, other.head]  # FSDP2's groups: the root's first
    for block in other.blocks:
        holding += [block.norm, block.up, block.down]
    order = [other.head, other.first]
    for block in other.blocks:
        order += [block.down, block.up, block.norm]
    assert set(order) == set(holding)
    for module in order:
        module.reset_parameters()
    assert made == digest(other)
    assert trained(model, optimizer) == trained(other, in_memory(other)[1])


def padding_while_it_is_written(nvme):
    """Every write finds the bytes that its memory still has when FSDP2 has gathered it."""
    model = shard(net())
    weights = tensorferry.offload.parameters(model, nvme, 1 << 20, keep_bytes=0, checksums=True)
    stored = [own for own in map(stored_parameter_of, model.parameters()) if own is not None]
    written = []

    def watched(put, slot, begin, end):
        written.append((slot, slot.clone()))
        return put(slot, begin, end)

    with weights.gather(modify=True):
        for own in stored:
            rest = slice(own.offset + own.nbytes, own.offset + own.values.slot_bytes)
            own.buffer.held[rest] = 255
            own.values.put = functools.partial(watched, own.values.put)
    loss_of(model, 0)
    assert len(written) == len(stored)
    assert all(torch.equal(slot, then) for slot, then in written)
    padded = sum(own.numel < own.padded().numel() for own in stored)
    weights.close()
    return padded


def refused(nvme):
    """What cannot be on the drive, or cannot be done with what is there."""
    parameters = functools.partial(tensorferry.offload.parameters, nvme_path=nvme, keep_bytes=0)
    words = {}
    model = shard(net(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    words["policy"] = word_of(parameters, model)
    if dist.get_world_size() == 4:
        model = shard(net(), reshard_after_forward=2)
        words["number"] = word_of(parameters, model)
    model = net()
    fully_shard(model.blocks[0])
    words["plain"] = word_of(parameters, model)
    model = shard(net())
    before = digest(model)
    weights = parameters(model, max_cpu_bytes=LIMIT)
    words["again"] = word_of(parameters, model)
    loss_of(model, 0).backward()
    words["optimizer"] = word_of(torch.optim.SGD(model.parameters(), 0.1).step)
    words["assign"] = word_of(model.load_state_dict, model.state_dict(), assign=True)
    with torch.no_grad():
        model.first.weight.to_local().fill_(1)
    words["assigned"] = word_of(contextlib.ExitStack().enter_context, weights.gather())
    assert digest(model) == before
    weights.close()
    words["closed"] = word_of(loss_of, model, 0)
    dist.barrier()
    return words


def changed_and_loaded(nvme):
    """gather(), state_dict() and load_state_dict() of shards."""
    model, other = shard(net()), shard(net())
    weights = tensorferry.offload.parameters(model, nvme, LIMIT, keep_bytes=0)
    with torch.no_grad():
        with weights.gather(modify=True):
            for param in model.parameters():
                param.mul_(2)
            inside = loss_of(model, 1).item()
        with weights.gather(model.blocks[0]):  # in place, which autograd counts
            model.blocks[0].up.weight.to_local().add_(1)
        for param in other.parameters():
            param.mul_(2)
        assert inside == loss_of(other, 1).item()
        other.blocks[0].up.weight.to_local().add_(1)
    assert digest(model) == digest(other)
    assert loss_of(model, 2).item() == loss_of(other, 2).item()
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    kept = model.state_dict()
    with weights.gather(modify=True), torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert digest(model) != digest(other)
    assert all(torch.equal(kept[n].to_local(), v.to_local()) for n, v in saved.items())
    assert model.load_state_dict(saved).missing_keys == []
    assert digest(model) == digest(other)
    assert loss_of(model, 3).item() == loss_of(other, 3).item()
    model.reshard()
    assert memory_of(model) == {4}, memory_of(model)
    weights.close()


def states_of(model, optimizer):
    """Weights and states for torch.distributed.checkpoint, with the names of parameters."""
    names = [name for name, _ in model.named_parameters()]
    states = optimizer.state_dict()["state"]
    return {
        "model": dict(model.state_dict()),
        "optimizer": {names[number]: dict(own) for number, own in states.items()},
    }


def digest_of_states(model, states):
    """Of the states of the whole parameters. A rank without elements of one has none of it."""
    sums = hashlib.sha256()
    for name, param in model.named_parameters():
        own = states.get(name, {})
        for state in ("exp_avg", "exp_avg_sq"):
            value = own[state] if state in own else torch.empty_like(param)
            sums.update(value.full_tensor().numpy().tobytes())
    return sums.hexdigest()


def saved_for_others(nvme, folder, steps=2):
    """Trains and saves weights and states with torch.distributed.checkpoint. Returns what they
    are."""
    model = MODELS["rows"]()
    weights, optimizer = on_drive(model, nvme)
    trained(model, optimizer, steps=steps)
    saved = states_of(model, optimizer)
    dcp.save(saved, storage_writer=tensorferry.dcp.Writer(folder))
    in_both = digest(model), digest_of_states(model, saved["optimizer"])
    other = MODELS["rows"]()
    reference = in_memory(other)[1]
    trained(other, reference, steps=steps)
    assert in_both[1] == digest_of_states(other, states_of(other, reference)["optimizer"])
    return in_both


def empty_states(param):
    return {
        "step": torch.tensor(0.0),
        "exp_avg": torch.zeros_like(param.detach()),
        "exp_avg_sq": torch.zeros_like(param.detach()),
    }


def loaded_from_others(nvme, folder, expected):
    """Another number of ranks loads, group by group, and goes on."""
    model = MODELS["rows"]()
    weights, optimizer = on_drive(model, nvme)
    for part in [*model.blocks, model.first, model.head]:
        prefix = next(name for name, module in model.named_modules() if module is part)
        empty = {
            f"{prefix}.{name}": torch.empty_like(value) for name, value in part.state_dict().items()
        }
        dcp.load({"model": empty}, storage_reader=tensorferry.dcp.Reader(folder))
        part.load_state_dict({name.removeprefix(f"{prefix}."): v for name, v in empty.items()})
    states = {name: empty_states(param) for name, param in model.named_parameters()}
    dcp.load({"optimizer": states}, storage_reader=tensorferry.dcp.Reader(folder))
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": dict(enumerate(states.values())), "param_groups": groups})
    loaded = states_of(model, optimizer)["optimizer"]
    assert all(own["step"] == 2 for own in loaded.values())
    assert [digest(model), digest_of_states(model, loaded)] == expected
    trained(model, optimizer, steps=1)


def resumed(nvme, folder):
    """A snapshot of shards on the drive: the same losses after it, in another run."""
    model = MODELS["rows"]()
    weights, optimizer = on_drive(model, nvme)
    trained(model, optimizer)
    tensorferry.snapshot.take(folder, model=model, optimizer=optimizer)
    expected = trained(model, optimizer)
    optimizer.close()
    weights.close()
    model = MODELS["rows"]()
    weights, optimizer = on_drive(model, nvme)
    assert tensorferry.snapshot.resume(folder, model=model, optimizer=optimizer) is not None
    assert trained(model, optimizer) == expected


class Adapted(nn.Module):
    """A frozen model and what is trained beside it."""

    def __init__(self, base):
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.adapter = nn.Linear(11, 11)
        self.base = base

    def forward(self, x):
        return self.base(self.adapter(x))


def adapters(folder):
    """Trains beside weights that all ranks read from one checkpoint, under DDP."""
    path = os.path.join(folder, f"base-{dist.get_world_size()}.safetensors")
    if dist.get_rank() == 0:
        tensorferry.checkpoint.save(net().state_dict(), path)
    dist.barrier()
    seen = []
    for from_file in (False, True):
        base = net()
        if from_file:
            weights = tensorferry.offload.checkpoint(base, path, LIMIT, keep_bytes=0)
        model = Adapted(base.requires_grad_(False))
        frozen = [name for name, param in model.named_parameters() if not param.requires_grad]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, frozen)
        model = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.module.adapter.parameters(), lr=0.02)
        losses = []
        for step in range(4):
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        seen.append((losses, model.module.adapter.weight.tolist()))
    assert seen[0] == seen[1]
    assert weights.stats()["read_bytes"] > 0 and weights.stats()["written_bytes"] == 0
    word = word_of(DistributedDataParallel, Adapted(base))
    weights.close()
    return seen[1][1], word


if __name__ == "__main__":
    serve(globals())
