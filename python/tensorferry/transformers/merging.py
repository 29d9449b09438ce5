"""Adapters of peft, merged into weights that stay in their files, and saved."""

from __future__ import annotations

import copy
import mmap
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import torch

_ALIGNMENT = 64


def save_merged(model: Any, weights: Any, folder: str | os.PathLike[str], options: Any) -> None:
    """See tensorferry.transformers.save_merged()."""
    base = model.get_base_model()
    layers = {name: layer for name, layer in base.named_modules() if _is_adapted(name, layer)}
    state = _plain_names(base.state_dict(), layers)
    os.makedirs(folder, exist_ok=True)
    # The merged weights cannot stay in memory, and transformers wants all tensors at once.
    with tempfile.TemporaryFile(dir=folder) as file:
        merged = _mapped([layer.get_base_layer().weight for layer in layers.values()], file)
        started = set()
        for layer in layers.values():
            weight = layer.get_base_layer().weight
            with torch.no_grad(), weights.gather(layer):
                if weight not in started:  # two layers may share it
                    merged[weight].copy_(weight)
                started.add(weight)
                _with_weight(layer, merged[weight]).merge()
        named = _plain_names(dict(base.named_parameters(remove_duplicate=False)), layers)
        state |= {name: merged[weight] for name, weight in named.items() if weight in merged}
        base.save_pretrained(folder, state_dict=state, **options)


def _is_adapted(name: str, module: torch.nn.Module) -> bool:
    """Whether this is a layer with adapters. Raises ValueError for those that cannot be merged."""
    from peft.tuners.lora.layer import Conv1d, Conv2d, Conv3d, Embedding, Linear
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    if not isinstance(module, (BaseTunerLayer, ModulesToSaveWrapper)):
        return False
    refused = ""
    if not isinstance(module, (Linear, Embedding, Conv1d, Conv2d, Conv3d)):
        refused = f"is a {type(module).__name__}"
    elif module.merged_adapters:
        refused = "is merged already"
    elif any(name in module.lora_variant for name in _adapters_of(module)):
        refused = "has a variant of LoRA, such as DoRA"
    elif any(module.lora_bias.get(name) for name in _adapters_of(module)):
        refused = "has a bias of LoRA"
    if refused:
        raise ValueError(
            f"{name} {refused}: save_merged() cannot do that. Call "
            "weights_of(model).close(restore=True), which needs memory for all weights, and then "
            "merge_and_unload()"
        )
    return True


def _with_weight(layer: Any, weight: torch.Tensor) -> Any:
    """The same layer over a base layer with this weight, which peft may merge into."""
    base, changed = copy.copy(layer.get_base_layer()), copy.copy(layer)
    base._parameters = base._parameters | {"weight": torch.nn.Parameter(weight, False)}
    children = dict(layer.named_children()) | {"base_layer": base}
    vars(changed).update(_modules=children, merged_adapters=[])
    return changed


def _adapters_of(layer: Any) -> list[str]:
    """Those that are active."""
    known = {*layer.lora_A, *layer.lora_embedding_A}
    return [name for name in layer.active_adapters if name in known]


def _plain_names(state: dict[str, torch.Tensor], layers: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors without adapters, under the names that they have without them."""
    plain = {}
    for name, tensor in state.items():
        owner = next((one for one in layers if name.startswith(one + ".")), None)
        if owner is None:
            plain[name] = tensor
        elif name.startswith(f"{owner}.base_layer."):
            plain[name.replace(".base_layer.", ".", 1)] = tensor
    return plain


def _mapped(weights: Sequence[torch.Tensor], file: Any) -> dict[torch.Tensor, torch.Tensor]:
    """Tensors like these, whose memory is the file."""
    places, end = {}, 0
    for weight in dict.fromkeys(weights):
        places[weight] = end
        end += -(-weight.nbytes // _ALIGNMENT) * _ALIGNMENT
    if not end:
        return {}
    os.posix_fallocate(file.fileno(), 0, end)  # a full drive raises here, and not in a touch
    memory = mmap.mmap(file.fileno(), end)
    return {
        weight: torch.frombuffer(
            memory, dtype=weight.dtype, count=weight.numel(), offset=place
        ).view(weight.shape)
        for weight, place in places.items()
    }
