"""Experts that come one by one: a call of their module needs those that a router has chosen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch.nn import Module, Parameter

from .._memory.file_values import FileValues
from .residency import Residency
from .unit import Unit

# Modules whose parameters are stacks of experts, each with a function that tells whether its calls
# ask for single experts; else all of them are in memory while it is called.
Stacks = Mapping[Module, Callable[[], bool]]


class ExpertWeights:
    """The weights of the experts of one module, in files. Each expert is a unit of its own."""

    def __init__(
        self, module: Module, values: Mapping[Parameter, FileValues], residency: Residency
    ) -> None:
        """`values` are those of the parameters that are on the drive."""
        self._residency = residency
        on_drive = {n: values[p] for n, p in module._parameters.items() if p in values}
        self._names = list(on_drive)
        self._units: list[Unit] = []
        for rows in zip(*(one.rows() for one in on_drive.values())):
            unit = residency.new_unit(is_part=True)
            for row in rows:
                unit.add(None, row)
            self._units.append(unit)
        self._kind = frozenset(self._units)

    def guess(self, wanted: bool) -> None:
        """Says whether experts are read ahead that the last pass has used."""
        for unit in self._units:
            unit.recurs = wanted

    def choose(self, experts: Sequence[int]) -> None:
        """Says which experts use() holds next, in this order, and starts to read them."""
        self._residency.choose([self._units[expert] for expert in experts], self._kind)

    @contextlib.contextmanager
    def use(self, module: Module, expert: int) -> Iterator[dict[str, torch.Tensor]]:
        """Holds one expert of the module in memory. Yields its weights by the names of the
        parameters."""
        unit = self._units[expert]
        with self._residency.using(unit) as memory:
            found: dict[str, torch.Tensor] = {}
            for name, param in module._parameters.items():
                if param is None:
                    continue
                if name not in self._names:
                    found[name] = param[expert]
                    continue
                stored = unit.parameters[self._names.index(name)]
                found[name] = stored.of(memory)
                if param.requires_grad and torch.is_grad_enabled():
                    # Its gradient has nowhere to go: the backward pass raises, with its name.
                    refuse = stored.values.check_writable
                    found[name].requires_grad_().register_hook(lambda _, refuse=refuse: refuse())
            yield found


def apart(
    modules: Collection[tuple[Module, list[Module]]], stacks: Collection[Module]
) -> Iterator[tuple[Module, list[Module]]]:
    """Yields (module, modules whose weights come with it), with stacks by themselves."""
    for module, subtree in modules:
        yield module, [part for part in subtree if part is module or part not in stacks]
        for part in subtree:
            if part is not module and part in stacks:
                yield part, [part]


def have_experts(params: Collection[Parameter], values: Mapping[Parameter, FileValues]) -> bool:
    """Returns whether all these parameters are stacks of equally many experts, which files have as
    they are."""
    counts = {values[param].size[:1] for param in params}
    return len(counts) == 1 and all(values[param].has_rows for param in params)
