"""Which modules of a model have weights, which weights come together, and how new ones start."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import torch
from torch.nn import Module, Parameter

from .unit import Unit


def unit_modules(
    module: Module, one_unit: tuple[type[Module], ...], seen: set[Module]
) -> Iterator[tuple[Module, list[Module]]]:
    """Yields (module, modules whose weights come with it), parents first, each module once. All
    weights below a module of the classes `one_unit` come with it."""
    if module in seen:
        return
    seen.add(module)
    if isinstance(module, one_unit):
        subtree = list(module.modules())
        seen.update(subtree)
        yield module, subtree
        return
    yield module, [module, *_never_called(module)]
    for child in module.children():
        yield from unit_modules(child, one_unit, seen)


def _never_called(module: Module) -> Iterator[Module]:
    """Yields the children without a forward, such as lists: their owner uses what they hold."""
    for child in module.children():
        if type(child).forward is Module.forward:
            yield child
            yield from _never_called(child)


def smallest(model: Module, keep_bytes: int, most: int) -> set[Parameter]:
    """Returns the parameters of up to `keep_bytes` that stay in memory, `most` bytes together."""
    kept = set()
    total = 0
    for param in sorted(model.parameters(), key=lambda p: p.nbytes):
        total += param.nbytes
        if param.nbytes > keep_bytes or total > most:
            break
        kept.add(param)
    return kept


def owners(
    modules: Iterable[tuple[Module, list[Module]]], kept: Collection[Parameter]
) -> dict[Module, list[Parameter]]:
    """Returns which parameters each module owns. The first module owns those that several share."""
    owners: dict[Module, list[Parameter]] = {}
    seen = set(kept)
    for module, subtree in modules:
        own = owners.setdefault(module, [])
        for part in subtree:
            for param in part._parameters.values():
                if param is not None and param not in seen and param.numel() > 0:
                    seen.add(param)
                    own.append(param)
    return owners


def needed_modules(
    modules: Iterable[tuple[Module, list[Module]]], owned: Mapping[Module, list[Parameter]]
) -> dict[Module, set[Module]]:
    """Returns the modules that own the weights which each module needs."""
    owner_of = {param: module for module, params in owned.items() for param in params}
    needed: dict[Module, set[Module]] = {}
    for module, subtree in modules:
        params = (param for part in subtree for param in part._parameters.values())
        found = (owner_of.get(param) for param in params if param is not None)
        needed[module] = {owner for owner in found if owner is not None}
    return needed


def units_of(modules: Iterable[Module], units: Mapping[Parameter, Unit]) -> list[Unit]:
    """Returns the units of the weights that these modules hold themselves."""
    params = (param for module in modules for param in module._parameters.values())
    found = (units.get(param) for param in params if param is not None)
    return list(dict.fromkeys(unit for unit in found if unit is not None))


def materialise(part: Module, made: dict[Parameter, Parameter], device: torch.device) -> bool:
    """Gives memory to the parameters and buffers of a module that are on the meta device. Returns
    whether it had any. `made` maps parameters on the meta device to the real ones."""
    fresh = False
    for name, param in list(part._parameters.items()):
        if param is None or param.device.type != "meta":
            continue
        if param not in made:
            made[param] = Parameter(
                torch.empty_like(param, device=device), requires_grad=param.requires_grad
            )
            fresh = True
        setattr(part, name, made[param])  # recurrent networks keep a list of them
    for name, buffer in part._buffers.items():
        if buffer is not None and buffer.device.type == "meta":
            part._buffers[name] = torch.empty_like(buffer, device=device)
            fresh = True
    return fresh


def starts(
    subtree: list[Module], fresh: list[Module], initialize: Callable[[Module], object] | None
) -> Collection[Callable[[], object]]:
    """Returns the functions that give fresh modules their first values: children first, as when a
    module is made."""
    if initialize is not None:
        return [functools.partial(initialize, part) for part in reversed(fresh)]
    starts: dict[Module, Callable[[], object]] = {}
    for part in reversed(fresh):
        # The owner of a list initializes what the list holds.
        for maker in dict.fromkeys([part, subtree[0]]):
            for name in ("reset_parameters", "_reset_parameters"):
                if maker not in starts and hasattr(maker, name):
                    starts[maker] = getattr(maker, name)
            if maker in starts:
                break
        else:
            raise ValueError(
                f"{type(part).__name__} is on the meta device and has no reset_parameters(): pass "
                "initialize=... to give its weights their first values"
            )
    return starts.values()
