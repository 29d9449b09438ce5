"""How an optimizer with states on NVMe saves and loads them, one sub-group at a time."""

import collections
import copy
import itertools

import torch

from .._memory.buffers import letting_go
from .._memory.layout import distributed_like, flat_as, local, page_up
from .._memory.stored_parameter import home_of


class Checkpoints:
    """The part of Offloaded that knows torch's state_dict."""

    def state_dict(self):
        """As torch's, with the same names: each may load the other's. The states are mapped from
        the drive, so that saving them takes no memory; they are those of now, also after later
        steps. Parameters in bf16 and fp16 have their copy in fp32 as "master"."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        self._check_usable()
        self._settle()
        numbers = {}
        groups = []
        for group in self.param_groups:
            packed = {name: value for name, value in group.items() if name != "params"}
            for param in group["params"]:
                numbers.setdefault(param, len(numbers))
            packed["params"] = [numbers[param] for param in group["params"]]
            groups.append(packed)
        state = {}
        for param, number in numbers.items():
            own = self._state_of(param)
            if own:
                state[number] = own
        result = {"state": state, "param_groups": groups}
        for hook in self._optimizer_state_dict_post_hooks.values():
            changed = hook(self, result)
            result = result if changed is None else changed
        return result

    def _state_of(self, param):
        shards = self._shards[param]
        if not shards:
            return {}
        own = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in shards[0].small.items()
        }
        parts = collections.defaultdict(list)
        for group in self._groups:
            for slot in group.slots:
                if slot.shard.param is param:
                    parts[slot.name].append((group.key, slot))
        for name, pieces in parts.items():
            view = self._space.view([(key, slot.offset, slot.nbytes) for key, slot in pieces])
            first = pieces[0][1]
            tensor = torch.frombuffer(view, dtype=first.dtype)
            if first.shard.whole:
                tensor = tensor.view(first.shape)
            else:
                tensor = tensor.as_strided(first.shard.size, first.shard.stride)
            own[name] = distributed_like(tensor, param)
        return own

    def load_state_dict(self, state_dict):
        """Takes states that state_dict() of this optimizer, or of torch's own, has returned. They
        go to the drive one sub-group at a time: load the file with torch.load(..., mmap=True) and
        they are never in memory at once."""
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        saved = state_dict["param_groups"]
        if len(saved) != len(self.param_groups):
            raise ValueError("loaded state dict has a different number of parameter groups")
        for group, other in zip(self.param_groups, saved):
            if len(group["params"]) != len(other["params"]):
                raise ValueError(
                    "loaded state dict contains a parameter group that doesn't match the size of "
                    "optimizer's group"
                )
        numbers = itertools.chain.from_iterable(other["params"] for other in saved)
        params = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        by_number = dict(zip(numbers, params))
        states = {
            by_number[number]: state
            for number, state in state_dict["state"].items()
            if number in by_number
        }
        self._check_shapes(states)
        self._settle_quietly()
        self._cut_for(saved)
        self._spoiled = "a checkpoint could not be loaded to the end"
        for group, other in zip(self.param_groups, saved):
            own = {name: value for name, value in other.items() if name != "params"}
            group.update(copy.deepcopy(own))
        self._import(states)
        self._followed.forget()
        self._spoiled = None
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _settle_quietly(self):
        try:
            self._settle()
        except OSError:  # what is loaded replaces it
            pass

    @torch.no_grad()
    @letting_go()
    def _import(self, states):
        """Takes states of whole parameters, one sub-group at a time."""
        for group in self._groups:
            pieces = {}
            for shard in group.shards:
                if own := self._piece(shard, states.get(shard.param, {})):
                    pieces[shard] = own
            self._write_pieces(group, pieces)
        self._settle()

    def _write_pieces(self, group, pieces):
        # The buffer is let go of before the next is taken: there may be but one.
        if not pieces:
            group.slots = []
            self._space.drop(group.key)
            return
        slots = group.lay_out(pieces)
        size = page_up(slots[-1].offset + slots[-1].nbytes)
        memory = torch.frombuffer(self._space.take(size), dtype=torch.uint8)
        for slot in slots:
            slot.of(memory).copy_(pieces[slot.shard][slot.name])
        group.slots = slots
        self._writes.append(self._space.put(group.key, memory))

    def _check_shapes(self, states):
        """Refuses states that cannot be those of these parameters, before anything has changed."""
        for param, state in states.items():
            shards = self._shards[param]
            for name, value in state.items():
                if not shards or shards[0].whole or _is_small(shards[0], name, value):
                    continue
                if local(value).shape != local(param).shape:
                    raise ValueError(
                        f"state '{name}' has shape {tuple(value.shape)}, its parameter "
                        f"{tuple(param.shape)}"
                    )

    def _piece(self, shard, state):
        """What a shard has of the states of its parameter."""
        shard.small = {}
        own = {}
        for name, value in state.items():
            if name == "master" and not shard.master:
                continue
            if isinstance(value, torch.Tensor):
                value = _as_stepped(shard, name, local(value))
            if _is_small(shard, name, value):
                shard.small[name] = copy.deepcopy(value)
            else:
                own[name] = value
        if shard.master and "master" not in own and state:
            own["master"] = self._values_of(shard).float()
        order = {"master": 0}
        return dict(sorted(own.items(), key=lambda item: order.get(item[0], 1)))

    def _values_of(self, shard):
        home = home_of(shard.param)
        if home is None:
            return shard.values()
        size = shard.numel * shard.param.dtype.itemsize
        memory = torch.empty(page_up(size), dtype=torch.uint8)
        for operation in home.read(memory, shard.begin, shard.end):
            operation.wait()
        return shard.shaped(memory[:size].view(shard.param.dtype))


def _is_small(shard, name, value):
    """Whether a state stays in memory."""
    if not isinstance(value, torch.Tensor) or name == "step":
        return True
    return value.dim() == 0 and (shard.whole or local(shard.param).dim() > 0)


def _as_stepped(shard, name, value):
    """A state, whole as in a file, as the step wants it: in the dtype that torch would give it, and
    of a parameter that is cut only what this shard has."""
    dtype = value.dtype
    device = None
    if name == "step":
        if shard.group.get("fused"):
            dtype, device = torch.float32, local(shard.param).device
    elif shard.param.is_floating_point():
        dtype = shard.dtype
    if not _is_small(shard, name, value) and not shard.whole:
        value = flat_as(value, shard.stride)[shard.begin : shard.end]
    return value.to(device=device, dtype=dtype)
