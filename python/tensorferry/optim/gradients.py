"""Gradients on the drive: they go there as backward produces them, and the step reads them."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._memory.buffers import letting_go
from .._memory.heap import note_freed
from .._memory.layout import distributed_like, flat_as, local, page_up
from .._memory.operators import mapped
from .stored_gradient import StoredGradient, entry_of

if TYPE_CHECKING:
    from .._core import Operation, SwapSpace
    from .sub_groups import Shard, SubGroups


def norm_of(gradient: Tensor, norm_type: float = 2.0) -> Tensor:
    """The norm of one gradient, in fp32 at least."""
    dtype = torch.float32 if gradient.dtype.itemsize < 4 else None
    return torch.linalg.vector_norm(gradient, norm_type, dtype=dtype)


def clip_scale(norm: Tensor, max_norm: float) -> Tensor:
    """The factor that torch.nn.utils.clip_grad_norm_ multiplies gradients of this norm by."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


class Entry:
    """One gradient on the drive, and the changes that torch has made to it since it was written."""

    def __init__(
        self, store: GradientStore, number: int, shard: Shard, device: torch.device
    ) -> None:
        self._store = weakref.ref(store)  # p.grad has the entry, and the store the parameters
        self.number = number  # of the parameter
        self.size, self.stride = shard.size, shard.stride
        self.dtype, self.device = shard.param.dtype, device
        self.norm: Tensor | None = None  # 2-norm of what was written, if it is known
        self.changes: list[tuple[Any, Any]] = []  # (operator, arguments), made when it is read
        self.zeroed = False
        self.failed: BaseException | None = None  # why it is not complete
        self.gone = False

    def _open(self) -> GradientStore:
        store = self._store()
        if store is None or self.gone:
            raise RuntimeError(
                "this gradient is not on the drive any more: it has been zeroed or replaced, or "
                "its optimizer is closed; set p.grad to None"
            )
        return store

    def load(self) -> Tensor:
        """Its values, in memory of their own."""
        return self._open().load(self)

    def save(self, values: Tensor) -> None:
        """Replaces it."""
        if values.size() != self.size:
            raise RuntimeError(
                f"a gradient of {tuple(self.size)} on the drive cannot become one of "
                f"{tuple(values.size())}: assign p.grad"
            )
        self._open().save(self, values)

    def add(self, values: Tensor) -> None:
        self._open().add(self, values)

    def change(self, operator: Any, args: Any) -> None:
        """Notes an operator that changes each element by itself."""
        self._open()
        self.changes.append((operator, mapped(_kept, args)))

    def zero(self) -> None:
        self._open().end_writes([self])
        self.norm = norm_of(torch.zeros(1, dtype=self.dtype, device=self.device))
        self.changes, self.zeroed, self.failed = [], True, None

    def known_norm(self) -> Tensor | None:
        self._open()
        return None if self.changes else self.norm

    def is_known_finite(self) -> bool:
        norm = self.known_norm()  # of finite elements it may not be finite itself
        return norm is not None and bool(norm.isfinite())

    def apply_changes(self, part: Tensor) -> Tensor:
        """Makes the noted changes to some of its elements."""
        if self.zeroed:
            part.zero_()
        for operator, args in self.changes:
            takes_lists = operator._schema.name.startswith(("aten::_foreach_", "aten::_amp_"))
            here = mapped(lambda v: v.to(part.device) if isinstance(v, torch.Tensor) else v, args)
            operator([part] if takes_lists else part, *here)
        return part


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


class GradientStore:
    """The gradients of one optimizer's parameters, by shard.

    A gradient that has gone to the drive leaves a StoredGradient in p.grad, through which torch
    adds to it, clips and zeroes it: p.grad decides whether a parameter has one. Memory holds
    nothing but the gradient at hand and the buffers, which take `buffers_bytes`."""

    def __init__(self, sub_groups: SubGroups, space: SwapSpace, buffers_bytes: int) -> None:
        self._sub_groups = sub_groups
        self._space = space
        self._buffers_bytes = buffers_bytes
        self._params: list[Tensor] = []
        self._numbers: dict[Tensor, int] = {}  # of each parameter, a part of its keys
        self._entries: dict[Tensor, Entry] = {}  # parameter -> its gradient on the drive
        self._hooks: list[Any] = []
        self._writes: list[tuple[Entry, Operation]] = []

    def watch(self, params: Iterable[Tensor]) -> None:
        """Takes the gradients of these parameters from now on."""
        store = weakref.ref(self)

        def take(param: Tensor) -> None:
            if (own := store()) is not None:
                own.take(param)

        for param in params:
            self._numbers[param] = len(self._params)
            self._params.append(param)
            if param.requires_grad:  # collect() takes those of a parameter that is thawed later
                self._hooks.append(param.register_post_accumulate_grad_hook(take))

    def close(self) -> None:
        """Takes no more gradients, and removes those on the drive from p.grad."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for param, entry in self._entries.items():
            entry.gone = True
            if entry_of(param.grad) is entry:
                param.grad = None
        self._entries = {}

    def _shards(self, entry: Entry) -> list[Shard]:
        return self._sub_groups.shards[self._params[entry.number]]

    def _key(self, shard: Shard) -> str:
        return f"gradient/{self._numbers[shard.param]}/{shard.begin}"

    def __len__(self) -> int:
        return sum(self._current(param) is not None for param in self._entries)

    def _current(self, param: Tensor) -> Entry | None:
        """The entry of the gradient in p.grad, if it is on the drive."""
        entry = self._entries.get(param)
        return entry if entry is not None and entry_of(param.grad) is entry else None

    def has(self, shard: Shard) -> bool:
        return self._current(shard.param) is not None

    # --- to the drive ---

    def collect(self) -> None:
        """Takes the gradients that no hook has seen, and waits for all writes."""
        for param in self._params:
            if param.grad is not None:
                self.take(param)
        for param in [param for param in self._entries if self._current(param) is None]:
            self._forget(param)
        self._settle(set(self._entries.values()))

    def _settle(self, entries: Collection[Entry]) -> None:
        """Waits until these gradients are written; raises if one is not complete."""
        self.end_writes(entries)
        failed = next((entry.failed for entry in entries if entry.failed is not None), None)
        if failed is not None:
            raise RuntimeError(
                f"a gradient could not be written ({failed!r}); parameters and states have not "
                "changed: call zero_grad() and compute the gradients again"
            ) from failed

    def end_writes(self, entries: Collection[Entry] = ()) -> None:
        """Waits for the writes of these, and forgets others that are done."""
        going_on = []
        for entry, operation in self._writes:
            if entry not in entries and not operation.done():
                going_on.append((entry, operation))
                continue
            try:
                operation.wait()
            except OSError as error:
                entry.failed = entry.failed or error
        self._writes = going_on  # not before: Ctrl-C must not lose one that has failed

    @torch.no_grad()
    @letting_go()
    def take(self, param: Tensor) -> None:
        """Moves the gradient in p.grad to the drive, if it is not there."""
        shards = self._sub_groups.shards[param]
        if not shards or self._current(param) is not None:  # no elements, or on the drive already
            return
        if param.grad.layout != torch.strided:
            raise RuntimeError("gradients must be dense to go to the drive")
        gradient = local(param.grad)
        if isinstance(gradient, StoredGradient):  # of another parameter, or of another optimizer
            gradient = gradient.clone()
        if gradient.size() != shards[0].size or gradient.dtype != param.dtype:
            raise RuntimeError(
                f"a gradient, {gradient.dtype} of {tuple(gradient.size())}, is not like its "
                f"parameter, {param.dtype} of {tuple(shards[0].size)}: it cannot go to the drive; "
                "leave offload_gradients out"
            )
        self._forget(param)
        entry = Entry(self, self._numbers[param], shards[0], gradient.device)
        self._entries[param] = entry
        self.save(entry, gradient)
        nbytes = gradient.nbytes
        param.grad = distributed_like(StoredGradient(entry), param)
        del gradient
        note_freed(nbytes)

    # Each buffer is let go of before the next is taken: there may be but one.

    @torch.no_grad()
    @letting_go()
    def save(self, entry: Entry, values: Tensor) -> None:
        """Starts to write a gradient in the place of the old one."""
        self.end_writes([entry])
        whole = flat_as(values, entry.stride)
        try:
            entry.norm = norm_of(whole)
            for shard in self._shards(entry):
                memory = self._take_buffer(shard)
                self._part(shard, memory).copy_(whole[shard.begin : shard.end])
                self._put(shard, memory)
                del memory
        except BaseException as error:
            entry.failed = error
            raise
        entry.changes, entry.zeroed, entry.failed = [], False, None

    @torch.no_grad()
    @letting_go()
    def add(self, entry: Entry, values: Tensor) -> None:
        """Adds to a gradient."""
        self._settle([entry])
        try:
            if values.nbytes <= self._buffers_bytes:
                self.save(entry, self.load(entry).add_(values))
            else:
                self._add_by_piece(entry, flat_as(values, entry.stride))
        except BaseException as error:
            entry.failed = error
            raise
        note_freed(values.nbytes)  # soon: backward still holds it

    def _add_by_piece(self, entry: Entry, whole: Tensor) -> None:
        """Adds without memory for the sum. Its norm is not known then."""
        entry.norm = None
        for shard in self._shards(entry):
            memory = self._fetch(shard)
            added = whole[shard.begin : shard.end]
            self.result(shard, memory).add_(added.to(memory.device))
            self._put(shard, memory)
            del memory
        entry.changes, entry.zeroed = [], False

    def _put(self, shard: Shard, memory: Tensor) -> None:
        operation = self._space.put(self._key(shard), memory)
        self._writes.append((self._entries[shard.param], operation))

    def _take_buffer(self, shard: Shard) -> Tensor:
        buffer = self._space.take(page_up(shard.nbytes))
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def _part(self, shard: Shard, memory: Tensor) -> Tensor:
        return memory[: shard.nbytes].view(shard.param.dtype)

    # --- and back ---

    @torch.no_grad()
    @letting_go()
    def load(self, entry: Entry) -> Tensor:
        """Reads a whole gradient into memory of its own."""
        self._settle([entry])
        shards = self._shards(entry)
        elements = torch.empty(shards[-1].end, dtype=entry.dtype, device=entry.device)
        note_freed(elements.nbytes)  # of the one that was loaded before
        for shard in shards:
            elements[shard.begin : shard.end] = self.result(shard, self._fetch(shard))
        return elements.as_strided(entry.size, entry.stride)

    def _fetch(self, shard: Shard) -> Tensor:
        memory = self._take_buffer(shard)
        for operation in self.read(shard, memory):
            operation.wait()
        return memory

    def read(self, shard: Shard, memory: Tensor) -> list[Operation]:
        """Starts to read the gradient of a shard into a part of a buffer."""
        if self._entries[shard.param].zeroed:
            return []
        return [self._space.get(self._key(shard), memory[: page_up(shard.nbytes)])]

    def result(self, shard: Shard, memory: Tensor) -> Tensor:
        """The gradient that read() has brought, with the changes made since it was written."""
        return self._entries[shard.param].apply_changes(self._part(shard, memory))

    def _forget(self, param: Tensor) -> None:
        entry = self._entries.get(param)
        if entry is None:
            return
        entry.gone = True
        for shard in self._sub_groups.shards[param]:
            self._space.drop(self._key(shard))
        del self._entries[param]

    def drop(self) -> None:
        """Forgets all gradients, after zero_grad() has taken them out of p.grad."""
        for param in list(self._entries):
            self._forget(param)
