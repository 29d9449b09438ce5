"""A parameter whose values are on the drive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn

import torch
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from .._core import Operation
from .mapped_weight import MappedWeight
from .pending import settle_pending
from .reading import Reading
from .values import Values, cuts_of
from .weight_memory import WeightBuffer

_stored_parameters = WeakTensorKeyDictionary()


def stored_parameter_of(param: torch.Tensor) -> StoredParameter | None:
    """Returns the StoredParameter of a parameter on the drive; None for one in memory."""
    stored: StoredParameter | None = None
    if len(_stored_parameters) > 0:  # to look up a tensor takes a microsecond
        stored = _stored_parameters.get(param)
    return stored


class StoredParameter:
    """A parameter on the drive. While its buffer has memory, its values are there, too."""

    def __init__(
        self, param: torch.nn.Parameter | None, values: Values, buffer: WeightBuffer, offset: int
    ) -> None:
        """`values` are on the drive; their memory begins at byte `offset` of the buffer. `param` is
        None for a part of a parameter, of which users get the memory alone."""
        # Does not keep the parameter alive.
        self._param = (lambda: None) if param is None else TensorWeakRef(param)
        self.values = values
        self.buffer = buffer
        self.offset = offset
        self.dtype = values.dtype
        self.device = buffer.device
        self.size = values.size
        self.stride = values.stride
        self.numel = self.size.numel()
        self.nbytes = self.numel * self.dtype.itemsize
        self._first = offset + values.lead  # byte of the buffer with its first value
        self._mapped: Callable[[], MappedWeight | None] = lambda: None  # what view() has returned
        self.cuts = cuts_of(self.numel)
        # The parameter has these values while its own are not in memory: they show its shape, and
        # nobody can take them for data.
        self._has_nan = self.dtype.is_floating_point or self.dtype.is_complex
        self._nothing = torch.zeros((), dtype=self.dtype, device=self.device)
        self._forget_values()
        self.absent = self._nothing.expand(self.size)
        if param is not None:
            _stored_parameters[param] = self

    # --- what the parameter shows ---

    @property
    def param(self) -> torch.nn.Parameter | None:
        """The parameter; None when nobody has it any more."""
        param: torch.nn.Parameter | None = self._param()
        return param

    @property
    def version(self) -> int | None:
        """How often autograd has seen the parameter change; None if autograd does not count."""
        param = self.param
        return None if param is None or param.is_inference() else param._version

    def note_change(self) -> None:
        """Tells autograd that the parameter has changed."""
        param = self.param
        if param is not None and not param.is_inference():
            torch.autograd.graph.increment_version(param)

    def check_unchanged(self) -> None:
        """Raises RuntimeError if the parameter cannot take its values from the drive, or if it was
        given others meanwhile."""
        param = self.param
        if param is None:
            return
        self._check_kind(param)
        if not self._is_nothing() or param.data_ptr() != self.absent.data_ptr():
            self._refuse_assigned()

    def _refuse_assigned(self) -> NoReturn:
        self._forget_values()
        self.show(self.absent)
        raise RuntimeError(
            f"a parameter of shape {tuple(self.size)} was assigned values while its weights "
            "were on NVMe, and the assigned values are lost: change weights inside "
            "`with weights.gather(module, modify=True)`"
        )

    def _is_nothing(self) -> bool:
        if self.device.type != "cpu":  # a look would wait for the GPU
            return True
        value = self._nothing.item()
        return value != value if self._has_nan else value == 0

    def _check_kind(self, param: torch.nn.Parameter) -> None:
        same = param.dtype == self.dtype and param.size() == self.size
        if not same or param.device != self.device:
            raise RuntimeError(
                f"a parameter on NVMe was converted from {self.dtype} of shape {tuple(self.size)} "
                f"on {self.device} to {param.dtype} of shape {tuple(param.size())} on "
                f"{param.device}: convert the model before its weights go to NVMe"
            )

    def _forget_values(self) -> None:
        self._nothing.fill_(float("nan") if self._has_nan else 0)

    def watch(self) -> None:
        """Makes the backward pass raise where it has a gradient for a weight that cannot change."""
        if (param := self.param) is not None:
            self.values.watch(param)

    def show(self, values: torch.Tensor) -> None:
        """Gives the parameter these values."""
        if (param := self.param) is not None:
            param.data = values

    def restore(self, values: torch.Tensor) -> None:
        """Gives the parameter values that nobody brings or takes any more."""
        self.show(values)

    def end(self) -> None:
        """Forgets the parameter: its values are not on the drive any more."""
        if (param := self.param) is not None:
            _stored_parameters.pop(param, None)

    # --- in the memory of its buffer ---

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """Returns its values in the memory of the buffer."""
        elements = memory[self._first : self._first + self.nbytes].view(self.dtype)
        return elements.as_strided(self.size, self.stride)

    def own_values(self) -> torch.Tensor | None:
        """Returns the parameter; None if it has gone."""
        return self.param

    def is_elsewhere(self, memory: torch.Tensor) -> bool:
        """Returns whether the parameter, which was shown here, has got other memory since."""
        param = self.param
        return param is not None and param.data_ptr() != memory.data_ptr() + self._first

    @torch.no_grad()
    def collect(self, memory: torch.Tensor) -> None:
        """Copies the values that the parameter has elsewhere to the memory of the buffer."""
        if (param := self.param) is not None:
            self._check_kind(param)
            self.of(memory).copy_(param)

    def load(self, memory: torch.Tensor) -> Iterable[Reading]:
        """Starts to read its values into the memory of the buffer, a read for each cut."""
        return self.values.get(self._slot(memory), 0, self.numel)

    def save(self, memory: torch.Tensor) -> Iterator[Operation]:
        """Starts to write its values from the memory of the buffer, a write for each cut."""
        self._mapped = lambda: None
        return self.values.put(self._slot(memory), 0, self.numel)

    def _slot(self, memory: torch.Tensor) -> torch.Tensor:
        return memory[self.offset : self.offset + self.values.slot_bytes]

    # --- for optimizers ---

    def read(self, target: torch.Tensor, begin: int = 0, end: int | None = None) -> list[Reading]:
        """Starts to read the elements `begin` to `end`, whole cuts, into bytes of whole pages.
        Returns the reads; none if they were in memory and have been copied."""
        end = self.numel if end is None else end
        self._check_cuts(begin, end)
        if (memory := self.buffer.settled()) is not None:
            here = self._elements(memory, begin, end)
            self.buffer.check_newest(self.offset)
            target[: here.numel()].copy_(here)
            return []
        return list(self.values.get(target, begin, end))

    def write(
        self, source: torch.Tensor, begin: int = 0, end: int | None = None
    ) -> list[Operation]:
        """Starts to write the elements `begin` to `end`, whole cuts, from bytes of whole pages, and
        changes them in memory, too. Returns the writes."""
        end = self.numel if end is None else end
        self._check_cuts(begin, end)
        self.values.check_writable()
        self.note_change()
        if (memory := self.buffer.settled()) is not None:
            here = self._elements(memory, begin, end)
            if here.data_ptr() != source.data_ptr():
                here.copy_(source[: here.numel()])
        else:
            self.buffer.forget()
        self._mapped = lambda: None
        return list(self.values.put(source, begin, end))

    def _check_cuts(self, begin: int, end: int) -> None:
        inside = (last - first for first, last in self.cuts if begin <= first and last <= end)
        if sum(inside) != end - begin:
            raise RuntimeError(
                "the optimizer was created before the weights moved to NVMe: call "
                "offload.parameters() first"
            )

    def _elements(self, memory: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        size = self.dtype.itemsize
        return memory[self._first + begin * size : self._first + end * size]

    # --- on the drive ---

    def note_replaced(self) -> None:
        """Says that the drive has got other values. No memory may have the old ones."""
        self.note_change()
        self._mapped = lambda: None

    def view(self) -> torch.Tensor:
        """Returns the values, mapped from the drive: the same tensor as long as somebody has it."""
        settle_pending([self.param])
        if (mapped := self._mapped()) is None:
            mapped = MappedWeight(self.values.view())
            self._mapped = weakref.ref(mapped)
        return mapped
