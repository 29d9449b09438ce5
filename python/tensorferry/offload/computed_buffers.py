"""Buffers that no checkpoint has, because modules compute them: made anew for models that were
built on the meta device, where nothing is computed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch.nn import Module, Parameter

Start = Callable[[], object]  # gives a module its first values


def compute_buffers(
    model: Module, device: torch.device, initialize: Callable[[Module], object] | None
) -> dict[tuple[Module, str], torch.Tensor]:
    """Returns the buffers on the meta device that are not persistent, with their values, by module
    and name. Changes nothing. Raises ValueError with the names of those that nobody can compute."""
    computed: dict[tuple[Module, str], torch.Tensor] = {}
    missing: list[str] = []
    starters = _starters(model)
    for prefix, module in model.named_modules():
        names = [
            name
            for name, buffer in module._buffers.items()
            if name in module._non_persistent_buffers_set
            and buffer is not None
            and buffer.device.type == "meta"
        ]
        if not names:
            continue
        found = _computed(module, names, _starts(module, starters.get(module), initialize))
        for name in names:
            if found is None:
                missing.append(f"{prefix}.{name}" if prefix else name)
            else:
                computed[module, name] = found[name].to(device)
    if missing:
        raise ValueError(
            f"{_listed(missing)}: no checkpoint has these buffers (persistent=False), and on the "
            "meta device nobody has computed them. Build the model with its buffers in memory, for "
            "example under accelerate.init_empty_weights(), or pass initialize=..., a function of "
            "a module that fills its buffers"
        )
    return computed


def _starters(model: Module) -> dict[Module, Callable[[Module], object]]:
    """Returns for each module the _init_weights() of the innermost model of transformers around
    it."""
    found: dict[Module, Callable[[Module], object]] = {}

    def visit(module: Module, start: Callable[[Module], object] | None) -> None:
        start = getattr(module, "_init_weights", start)
        if module in found:
            return
        if start is not None:
            found[module] = start
        for child in module.children():
            visit(child, start)

    visit(model, None)
    return found


def _starts(
    module: Module,
    starter: Callable[[Module], object] | None,
    initialize: Callable[[Module], object] | None,
) -> list[Start]:
    if initialize is not None:
        return [functools.partial(initialize, module)]
    starts = [getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters")]
    if starter is not None:
        starts.append(functools.partial(starter, module))
    return [start for start in starts if callable(start)]


def _computed(
    module: Module, names: list[str], starts: list[Start]
) -> dict[str, torch.Tensor] | None:
    """Returns the buffers as the first function makes them that makes them all; None if none does.
    It must give the same values whatever the buffers had before."""
    for start in starts:
        with _without_memory(module):
            one, other = (_filled(module, names, start, value) for value in (0, 1))
        if all(_same(one[name], other[name]) for name in names):
            return one
    return None


def _filled(module: Module, names: list[str], start: Start, value: int) -> dict[str, torch.Tensor]:
    for name in names:
        buffer = module._buffers[name]
        assert buffer is not None
        module._buffers[name] = torch.full_like(buffer, value, device="cpu")
    with torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=[]):
        start()
    return {name: module._buffers[name] for name in names}  # type: ignore[misc]


@contextlib.contextmanager
def _without_memory(module: Module) -> Iterator[None]:
    """Inside, all parameters below a module are on the meta device: nobody can change them."""
    parts = list(module.modules())
    parameters = [dict(part._parameters) for part in parts]
    buffers = [dict(part._buffers) for part in parts]
    try:
        for part, own in zip(parts, parameters):
            for name, param in own.items():
                if param is not None:
                    meta = torch.empty_like(param, device="meta")
                    part._parameters[name] = Parameter(meta, requires_grad=False)
        yield
    finally:
        for part, own, held in zip(parts, parameters, buffers):
            part._parameters.update(own)
            part._buffers.update(held)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.device.type == "meta" or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    ours, theirs = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(ours, theirs)


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
