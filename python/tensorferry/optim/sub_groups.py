"""The sub-groups of an optimizer: parameters are cut into shards, shards that fit one buffer form a
sub-group, and the states of a sub-group are the fields of one record on the drive."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._memory.layout import CUT, PAGE, check_dense, flat_as, local, page_up
from .._memory.stored_parameter import stored_parameter_of
from .cut_masters import LOW, MASTER_BLOCK, Cut
from .masters import HALF
from .quantized_moments import ELEMENT_BYTES, PACKED

Group = dict[str, Any]  # a parameter group of torch's

# Each tensor of a shard is rounded up to whole pages: at most a master and three states, beside the
# record its values and its gradient, and in the scratch memory a gradient, a master and two
# moments.
STATE_PAGES = 4 * PAGE
HELD_PAGES = STATE_PAGES + 2 * PAGE
SCRATCH_PAGES = 4 * PAGE

# States that state_dict() maps from the drive begin at a page. These ones it makes whole first, so
# they need not: small parameters would take mostly rounding.
UNMAPPED = (LOW, PACKED)
_LINE = 64  # bytes, of the processor's cache

# The smallest buffer: a cut of any dtype with three states, its values and its gradient.
LEAST_BYTES = HELD_PAGES + SCRATCH_PAGES + 5 * 8 * CUT


@dataclass(eq=False)
class StateField:
    """Where one state tensor of a shard lies in its record."""

    shard: Shard
    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @functools.cached_property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, memory: Tensor) -> Tensor:
        """The state in memory that holds the record."""
        state = memory[self.offset : self.offset + self.nbytes].view(self.dtype)
        return state if len(self.shape) == 1 else state.view(self.shape)


@dataclass(eq=False)
class Shard:
    """Elements of a parameter: those from `begin` to `end` in the order of its memory, or all of it
    if the optimizer needs its shape."""

    param: Tensor
    group: Group
    size: torch.Size  # of this rank's part of the parameter, as are the strides
    stride: tuple[int, ...]
    begin: int
    end: int
    whole: bool
    master: bool  # does the optimizer step a copy in fp32?
    cuts_master: bool  # may only the lower half of that be stored?
    packs_moments: bool  # are moments stored in 8 bits?
    stays_whole: bool = False  # is all of it stored, because somebody has changed the weights?
    cut: Cut | None = None  # what goes with the lower half, once there is one
    small: dict[str, Any] = field(default_factory=dict)  # states that stay in memory: step counts

    @property
    def known_cut(self) -> Cut:
        """For callers who know that the record has the lower half of the master."""
        assert self.cut is not None
        return self.cut

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.size) if self.whole else (self.numel,)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.master else self.param.dtype

    @property
    def numel(self) -> int:
        return self.end - self.begin

    @property
    def nbytes(self) -> int:
        """Bytes of its values, and of its gradient, in the dtype of the parameter."""
        return self.numel * self.param.dtype.itemsize

    def values(self) -> Tensor:
        """The elements themselves, if the parameter is in memory."""
        return self.cut_like(self.param)

    def check_layout(self) -> None:
        """Refuses a parameter in memory whose elements have moved: the step would change a copy."""
        values = local(self.param)
        moved = not self.whole and values.stride() != self.stride
        if moved or values.size() != self.size:
            raise RuntimeError(
                f"a parameter of shape {tuple(values.size())} and strides {values.stride()} had "
                f"{tuple(self.size)} and {self.stride} when this optimizer was made: make it after "
                "changing shapes and memory formats"
            )

    def cut_like(self, tensor: Tensor) -> Tensor:
        """This part of a tensor of the parameter's shape, in any memory format."""
        tensor = local(tensor)
        if self.whole:
            return tensor
        elements = flat_as(tensor, self.stride)
        return elements if self.numel == elements.numel() else elements[self.begin : self.end]

    def shaped(self, elements: Tensor) -> Tensor:
        """Elements in the order of the parameter's memory, in the shape that is stepped."""
        return elements.as_strided(self.size, self.stride) if self.whole else elements


class SubGroup:
    """Shards that are stepped together. Their states are one record on the drive."""

    def __init__(self, number: int, device: torch.device) -> None:
        self.key = f"states/{number}"
        self.device = device  # of its parameters
        self.shards: list[Shard] = []
        self.fields: list[StateField] = []  # empty before the first step
        self.spare_bytes = 0  # the most that its first record may take
        self.held_bytes = 0  # the most that it takes in a buffer
        self.scratch_bytes = 0  # the most that it takes besides while it is computed

    @property
    def record_bytes(self) -> int:
        return record_bytes(self.fields)

    def lay_out(self, states: dict[Shard, dict[str, Tensor]]) -> list[StateField]:
        """Fields for the states of each shard, in the order of the shards."""
        fields = []
        offset = 0
        for shard in self.shards:
            for name, tensor in states.get(shard, {}).items():
                unit = _LINE if name in UNMAPPED else PAGE
                begin = -(-offset // unit) * unit
                state = StateField(shard, name, begin, tuple(tensor.shape), tensor.dtype)
                fields.append(state)
                offset = begin + state.nbytes
        return fields


def record_bytes(fields: list[StateField]) -> int:
    """The size of a record with these fields."""
    return page_up(fields[-1].offset + fields[-1].nbytes) if fields else 0


class ElementBytes(NamedTuple):
    """What a step needs of each element."""

    states: float  # on the drive
    held: float  # in a buffer, from the read to the write
    scratch: float  # only while it is computed


@dataclass(frozen=True)
class Needs:
    """What a step needs, by the kind of the optimizer and its options."""

    whole: bool  # parameters in their shape
    is_adam: bool
    masters: bool
    stored_gradients: bool
    packs_moments: bool  # stores them in 8 bits

    def wants_master(self, param: Tensor) -> bool:
        return self.masters and param.dtype in HALF

    def cuts_master(self, param: Tensor) -> bool:
        """Whether the weight is there to restore the upper half of its master from. fp16 has too
        many masters for some weights: subnormal ones, and infinity."""
        in_memory = stored_parameter_of(param) is None
        return self.masters and param.dtype == torch.bfloat16 and in_memory and not self.whole

    def element_bytes(self, settings: Group, param: Tensor) -> ElementBytes:
        count = 2 if self.is_adam and not settings["amsgrad"] else 3  # at most, of torch's own
        master = self.wants_master(param)
        size = 4 if master else param.dtype.itemsize
        cuts = self.cuts_master(param)
        moments = ELEMENT_BYTES if self.packs_moments else count * size
        states = moments + (2 if cuts else 4 if master else 0)
        held = states + (size if self.stored_gradients else 0)
        if stored_parameter_of(param) is not None:
            held += param.dtype.itemsize
        scratch = (4 if cuts else 0) + (count * size if self.packs_moments else 0)
        if master and not self.stored_gradients:
            scratch += size
        return ElementBytes(states, held, scratch)


class SubGroups:
    """Cuts parameters into shards and collects them into sub-groups: `buffer_count` of them, and
    the scratch memory of one, take about as many buffers of `buffer_bytes`."""

    def __init__(self, buffer_bytes: int, buffer_count: int, needs: Needs) -> None:
        self.buffer_bytes = buffer_bytes
        self.buffer_count = buffer_count
        self.needs = needs
        self.largest = 0  # bytes of the largest sub-group, with its share of the scratch memory
        self._groups: list[SubGroup] = []
        self.shards: dict[Tensor, list[Shard]] = {}  # of each parameter
        self._amsgrad: list[bool] = []  # of each group, when it was cut
        self._filled = 0

    def __iter__(self) -> Iterator[SubGroup]:
        return iter(self._groups)

    @property
    def least_bytes(self) -> int:
        """Bytes of memory without which a step cannot be made: any sub-group in a buffer, and the
        scratch memory."""
        held = max((group.held_bytes for group in self), default=0)
        return held + max((group.scratch_bytes for group in self), default=0)

    @property
    def has_states(self) -> bool:
        return any(group.fields for group in self._groups)

    def add(self, group: Group, settings: Group | None = None) -> None:
        """Cuts the parameters of a group for its settings, or for those that it will get."""
        settings = group if settings is None else settings
        if len(set(group["params"])) < len(group["params"]):
            raise ValueError(
                "a parameter is twice in its group, so it would be stepped twice: leave one out"
            )
        for param in group["params"]:
            self.shards[param] = self._cut(group, param, self.needs.element_bytes(settings, param))
        self._amsgrad.append(bool(settings.get("amsgrad")))

    def fits(self, settings: Iterable[Group]) -> bool:
        """Whether groups with these settings need as many states as they were cut for."""
        wanted = [bool(own.get("amsgrad")) for own in settings]
        return not self.needs.is_adam or wanted == self._amsgrad

    def trial(self) -> SubGroups:
        """Empty sub-groups for the same needs."""
        return SubGroups(self.buffer_bytes, self.buffer_count, self.needs)

    def adopt(self, other: SubGroups) -> None:
        """Becomes the other sub-groups."""
        vars(self).update(vars(other))

    def check_groups(self, groups: list[Group]) -> None:
        """Refuses to step other parameters than those that were added."""
        params = {param for group in groups for param in group["params"]}
        cut_for = {id(own[0].group) for own in self.shards.values() if own}
        if params != self.shards.keys() or not cut_for <= {id(group) for group in groups}:
            raise RuntimeError(
                "param_groups has other parameters or groups than this optimizer was made with: "
                "use add_param_group(), or make a new optimizer"
            )

    def _cut(self, group: Group, param: Tensor, each: ElementBytes) -> list[Shard]:
        """The shards of a parameter; those of one on the drive are cut as it is cut there."""
        values = local(param)
        home = stored_parameter_of(param)
        if home is None:
            check_dense(values)
            size, stride = values.size(), values.stride()
        else:
            size, stride = home.size, home.stride
        count = values.numel()
        if count == 0:
            return []
        if self.needs.whole:
            ranges = [(0, count)]
        elif home is not None:
            ranges = home.cuts
        else:
            room = self.buffer_bytes - HELD_PAGES - SCRATCH_PAGES
            most = int(room / (each.held + each.scratch / self.buffer_count))
            # Digests are of whole blocks: a rest takes a GPU as many calls again.
            unit = MASTER_BLOCK if self.needs.cuts_master(param) and most >= MASTER_BLOCK else CUT
            most = max(most // unit, 1) * unit
            # As few pieces as fit, and all about as long: each costs calls, and the longest one is
            # waited for at the beginning and at the end.
            most = -(-count // (-(-count // most) * unit)) * unit
            ranges = [(at, min(at + most, count)) for at in range(0, count, most)]
        needs = self.needs
        shards = []
        for begin, end in ranges:
            shard = Shard(
                param,
                group,
                size,
                stride,
                begin,
                end,
                needs.whole,
                needs.wants_master(param),
                needs.cuts_master(param),
                needs.packs_moments,
            )
            held = math.ceil((end - begin) * each.held) + HELD_PAGES
            scratch = math.ceil((end - begin) * each.scratch) + SCRATCH_PAGES
            own = self._sub_group(values.device, held + -(-scratch // self.buffer_count))
            own.shards.append(shard)
            own.held_bytes += held
            own.scratch_bytes += scratch
            own.spare_bytes += math.ceil((end - begin) * each.states) + STATE_PAGES
            shards.append(shard)
        return shards

    def _sub_group(self, device: torch.device, nbytes: int) -> SubGroup:
        """The sub-group that takes the next shard, which needs `nbytes` bytes of each buffer."""
        full = self._filled + nbytes > self.buffer_bytes
        if not self._groups or full or self._groups[-1].device != device:
            self._groups.append(SubGroup(len(self._groups), device))
            self._filled = 0
        self._filled += nbytes
        self.largest = max(self.largest, self._filled)
        return self._groups[-1]
