"""Which modules of a model have weights, which come together, and how fresh ones start."""

import torch


def unit_modules(module, one_unit, seen):
    """(module, modules whose parameters come with it), parents first, each once."""
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


def _never_called(module):
    """Lists and such: what they hold is used by whoever has them."""
    for child in module.children():
        if type(child).forward is torch.nn.Module.forward:
            yield child
            yield from _never_called(child)


def smallest(model, keep_bytes, most):
    """Parameters so small that they stay in memory."""
    kept = set()
    total = 0
    for param in sorted(model.parameters(), key=lambda p: p.nbytes):
        total += param.nbytes
        if param.nbytes > keep_bytes or total > most:
            break
        kept.add(param)
    return kept


def owners(modules, kept):
    """Which parameters belong to which module: shared ones to the first."""
    owners = {}
    seen = set(kept)
    for module, subtree in modules:
        own = owners.setdefault(module, [])
        for part in subtree:
            for param in part._parameters.values():
                if param is not None and param not in seen and param.numel() > 0:
                    seen.add(param)
                    own.append(param)
    return owners


def units_of(modules, units):
    """The units of what these modules have themselves."""
    params = (param for module in modules for param in module._parameters.values())
    found = (units.get(param) for param in params if param is not None)
    return list(dict.fromkeys(unit for unit in found if unit is not None))


def materialise(part, made, device):
    """Makes what a module has itself on the meta device. Was there anything?"""
    fresh = False
    for name, param in list(part._parameters.items()):
        if param is None or param.device.type != "meta":
            continue
        if param not in made:
            made[param] = torch.nn.Parameter(
                torch.empty_like(param, device=device), requires_grad=param.requires_grad
            )
            fresh = True
        setattr(part, name, made[param])  # recurrent networks note it
    for name, buffer in part._buffers.items():
        if buffer is not None and buffer.device.type == "meta":
            part._buffers[name] = torch.empty_like(buffer, device=device)
            fresh = True
    return fresh


def starts(subtree, fresh, initialize):
    """What gives fresh modules their values: children first, as when a module is made."""
    if initialize is not None:
        return [lambda part=part: initialize(part) for part in reversed(fresh)]
    starts = {}
    for part in reversed(fresh):
        # What a list holds is made by who has it.
        for maker in dict.fromkeys([part, subtree[0]]):
            for name in ("reset_parameters", "_reset_parameters"):
                if maker not in starts and hasattr(maker, name):
                    starts[maker] = getattr(maker, name)
            if maker in starts:
                break
        else:
            raise ValueError(
                f"{type(part).__name__} is on the meta device and has no reset_parameters(): say "
                "with initialize=... how its weights start"
            )
    return starts.values()
