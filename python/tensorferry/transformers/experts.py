"""An implementation of experts for transformers, which needs one expert after the other: so experts
on the drive come when a router has chosen them, and the others stay where they are."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from .._memory.graphs import outside_graphs
from .._memory.stored_parameter import stored_parameter_of
from ..offload.experts import ExpertWeights

NAME = "tensorferry"  # of the implementation, for experts_implementation=

# What transformers gives to classes of experts.
_CHOSEN, _GATE, _IS_PARALLEL = "_experts_implementation", "_apply_gate", "_is_expert_parallel"

_on_drive: weakref.WeakKeyDictionary[torch.nn.Module, ExpertWeights] = weakref.WeakKeyDictionary()


def register() -> None:
    """Makes the implementation known to transformers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def expert_modules(model: torch.nn.Module) -> list[Any]:
    """Returns the modules of a model that ask transformers for an implementation of experts."""
    return [module for module in model.modules() if hasattr(module, _IS_PARALLEL)]


def is_chosen(module: Any) -> bool:
    """Returns whether calls of a module of experts come here."""
    return bool(getattr(module.config, _CHOSEN, None) == NAME)


def attach(module: torch.nn.Module, weights: ExpertWeights) -> None:
    """Says where the weights of a module of experts are."""
    _on_drive[module] = weights


def experts_forward(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Computes what the other implementations do, one expert after the other."""
    computed: torch.Tensor = _forward(module, hidden_states, top_k_index, top_k_weights)
    return computed


@outside_graphs
def _forward(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    if getattr(module, _IS_PARALLEL):
        raise ValueError(
            f'experts_implementation="{NAME}" does not spread experts over several devices: choose '
            '"grouped_mm"'
        )
    tokens, chosen = top_k_index.shape
    ids, order = torch.sort(top_k_index.reshape(-1))
    inputs = hidden_states[order // chosen]
    counts = torch.bincount(ids, minlength=module.num_experts).tolist()
    parts = {e: part for e, part in enumerate(inputs.split(counts)) if len(part)}
    weights = _weights_on_drive(module)
    if weights is not None:
        weights.choose(list(parts))
    if not parts:
        return hidden_states.clone()
    computed = torch.cat([_output(module, weights, e, part) for e, part in parts.items()])
    if module.has_post_expert_norm:
        computed = module.post_expert_norm(computed)
    weighted = computed * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    summed = weighted[back].view(tokens, chosen, -1).sum(dim=1)
    return summed.to(hidden_states.dtype)


def _weights_on_drive(module: Any) -> ExpertWeights | None:
    """Returns where the weights of the experts are; None if they are all in memory."""
    parameters = module.parameters(recurse=False)
    on_drive = any(stored_parameter_of(param) is not None for param in parameters)
    return _on_drive.get(module) if on_drive else None


def _output(
    module: Any, weights: ExpertWeights | None, expert: int, inputs: torch.Tensor
) -> torch.Tensor:
    """Computes one expert. Its memory is free afterwards."""
    if weights is None:
        parameters = module.named_parameters(recurse=False)
        return _projected(module, inputs, {name: param[expert] for name, param in parameters})
    with weights.use(module, expert) as found:
        return _projected(module, inputs, found)


def _projected(module: Any, inputs: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Computes one expert."""
    name = "gate_up_proj" if module.has_gate else "up_proj"
    up = _linear(module, inputs, weights, name)
    inner = getattr(module, _GATE)(up) if module.has_gate else module.act_fn(up)
    return _linear(module, inner, weights, "down_proj")


def _linear(
    module: Any, inputs: torch.Tensor, weights: dict[str, torch.Tensor], name: str
) -> torch.Tensor:
    weight = weights[name]
    if not module.is_transposed:
        weight = weight.transpose(0, 1)
    output = torch.mm(inputs.to(weight.dtype), weight)
    return output + weights[f"{name}_bias"] if module.has_bias else output
