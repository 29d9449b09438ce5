"""How an optimizer's parameters are cut into pieces that fit the buffers, and how the states of a
piece lie in one record on the drive."""

from dataclasses import dataclass, field

import torch

from .._memory.layout import CUT, PAGE, check_dense, flat_as, local, page_up

# Each tensor of a shard is rounded up to whole pages: at most a master and three states, and beside
# the record its values and its gradient.
STATE_PAGES = 4 * PAGE
HELD_PAGES = STATE_PAGES + 2 * PAGE

# The least that a buffer holds: a cut of any dtype with three states, its values and its gradient.
LEAST_BYTES = HELD_PAGES + 5 * 8 * CUT


@dataclass(eq=False)
class Slot:
    """Where one state tensor of a shard lies in its record."""

    shard: "Shard"
    name: str
    offset: int
    shape: tuple
    dtype: torch.dtype

    @property
    def nbytes(self):
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count

    def of(self, memory):
        return memory[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(eq=False)
class Shard:
    """Elements of a parameter: those from `begin` to `end` in the order of its memory, or, where
    the optimizer needs its shape, all of it."""

    param: torch.Tensor
    group: dict
    size: torch.Size  # of what this rank has of the parameter, as are the strides
    stride: tuple
    begin: int
    end: int
    whole: bool
    master: bool  # is a copy in fp32 what the optimizer steps?
    small: dict = field(default_factory=dict)  # states that stay in memory: step counts and such

    @property
    def shape(self):
        return tuple(self.size) if self.whole else (self.numel,)

    @property
    def dtype(self):
        return torch.float32 if self.master else self.param.dtype

    @property
    def numel(self):
        return self.end - self.begin

    def values(self):
        """The elements themselves, where they are in memory."""
        return self.cut_like(self.param)

    def check_layout(self):
        """Refuses a parameter in memory whose elements are not where they were: the step would be
        that of a copy."""
        values = local(self.param)
        moved = not self.whole and values.stride() != self.stride
        if moved or values.size() != self.size:
            raise RuntimeError(
                f"a parameter of shape {tuple(values.size())} and strides {values.stride()} had "
                f"{tuple(self.size)} and {self.stride} when this optimizer was made: make it after "
                "changing shapes and memory formats"
            )

    def cut_like(self, tensor):
        """This part of a tensor of the parameter's shape whose memory may be in another order."""
        tensor = local(tensor)
        if self.whole:
            return tensor
        return flat_as(tensor, self.stride)[self.begin : self.end]

    def shaped(self, elements):
        """Elements in the order of the parameter's memory, in the shape that is stepped."""
        return elements.as_strided(self.size, self.stride) if self.whole else elements


def check_groups(groups, shards):
    """Refuses to step others than the parameters whose shards these are."""
    params = {param for group in groups for param in group["params"]}
    cut_for = {id(own[0].group) for own in shards.values() if own}
    if params != shards.keys() or not cut_for <= {id(group) for group in groups}:
        raise RuntimeError(
            "param_groups has other parameters or groups than this optimizer was made with: use "
            "add_param_group(), or make a new optimizer"
        )


class SubGroup:
    """Shards that are stepped together. Their states are one record on the drive."""

    def __init__(self, number, device):
        self.key = f"states/{number}"
        self.device = device  # of its parameters
        self.shards = []
        self.slots = []  # none: it has no states yet
        self.spare_bytes = 0  # what a first record may need

    @property
    def record_bytes(self):
        last = self.slots[-1] if self.slots else None
        return page_up(last.offset + last.nbytes) if last else 0

    def lay_out(self, states):
        """Slots for the states of each shard: {shard: {name: tensor}}."""
        slots = []
        offset = 0
        for shard in self.shards:
            for name, tensor in states.get(shard, {}).items():
                slot = Slot(shard, name, offset, tuple(tensor.shape), tensor.dtype)
                slots.append(slot)
                offset += page_up(slot.nbytes)
        return slots


class Plan:
    """Cuts parameters into shards and collects them into sub-groups of about `buffer_bytes`."""

    def __init__(self, buffer_bytes, whole):
        self.buffer_bytes = buffer_bytes
        self.whole = whole
        self.largest = 0  # bytes of the largest sub-group
        self.groups = []
        self._filled = 0

    def add(self, group, param, master, element_bytes, home=None):
        """Adds a parameter, cut as it is cut on the drive if its values are there. An element takes
        `element_bytes`: (bytes of states, bytes in the buffers)."""
        values = local(param)
        if home is None:
            check_dense(values)
            size, stride = values.size(), values.stride()
        else:
            size, stride = home.size, home.stride
        count = values.numel()
        if count == 0:
            return []
        state_bytes, bytes_each = element_bytes
        if self.whole:
            cuts = [(0, count)]
        elif home is not None:
            cuts = home.cuts
        else:
            most = max((self.buffer_bytes - HELD_PAGES) // bytes_each // CUT, 1) * CUT
            cuts = [(at, min(at + most, count)) for at in range(0, count, most)]
        shards = []
        for begin, end in cuts:
            shard = Shard(param, group, size, stride, begin, end, self.whole, master)
            nbytes = (end - begin) * bytes_each + HELD_PAGES
            full = self._filled + nbytes > self.buffer_bytes
            if not self.groups or full or self.groups[-1].device != values.device:
                self.groups.append(SubGroup(len(self.groups), values.device))
                self._filled = 0
            self.groups[-1].shards.append(shard)
            self.groups[-1].spare_bytes += (end - begin) * state_bytes + STATE_PAGES
            self._filled += nbytes
            self.largest = max(self.largest, self._filled)
            shards.append(shard)
        return shards
