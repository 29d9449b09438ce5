"""Adapters of peft, merged into weights that stay in their files, and saved."""

from __future__ import annotations

import mmap
import os
import tempfile
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
        places = _mapped({f"{name}.weight": state[f"{name}.weight"] for name in layers}, file)
        for name, layer in layers.items():
            merged = places[f"{name}.weight"]
            with torch.no_grad(), weights.gather(layer):
                merged.copy_(layer.get_base_layer().weight)
                for adapter in _adapters_of(layer):
                    merged += layer.get_delta_weight(adapter)
        base.save_pretrained(folder, state_dict=state | places, **options)


def _is_adapted(name: str, module: torch.nn.Module) -> bool:
    """Whether this is a layer with adapters. Raises ValueError for those that cannot be merged."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    if not isinstance(module, (BaseTunerLayer, ModulesToSaveWrapper)):
        return False
    refused = ""
    if not isinstance(module, LoraLayer):
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


def _adapters_of(layer: Any) -> list[str]:
    """Those that are active, in the order in which peft merges them."""
    known = {*layer.lora_A, *layer.lora_embedding_A}
    return [name for name in layer.active_adapters if name in known]


def _plain_names(state: dict[str, Any], layers: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The state dict without adapters, under the names that it has without them."""
    plain = {}
    for name, tensor in state.items():
        owner = next((one for one in layers if name.startswith(one + ".")), None)
        if owner is None:
            plain[name] = tensor
        elif name.startswith(f"{owner}.base_layer."):
            plain[name.replace(".base_layer.", ".", 1)] = tensor
    return plain


def _mapped(wanted: dict[str, torch.Tensor], file: Any) -> dict[str, torch.Tensor]:
    """Tensors like these, whose memory is the file."""
    places, end = {}, 0
    for name, tensor in wanted.items():
        places[name] = end
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    if not end:
        return {}
    os.posix_fallocate(file.fileno(), 0, end)  # a full drive raises here, and not in a touch
    memory = mmap.mmap(file.fileno(), end)
    return {
        name: torch.frombuffer(
            memory, dtype=wanted[name].dtype, count=wanted[name].numel(), offset=place
        ).view(wanted[name].shape)
        for name, place in places.items()
    }
