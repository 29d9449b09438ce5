"""Models of Hugging Face transformers that run from their checkpoint as it lies:

model = tensorferry.transformers.from_pretrained("folder", max_cpu_bytes=4 << 30)
tokens = model.generate(**prompt)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._import_watch import ImportWatch
from ..offload import OffloadedParameters
from .experts import NAME, register
from .loading import Loading

if TYPE_CHECKING:
    from .cache import NvmeCache as NvmeCache
    from .snapshots import SnapshotCallback as SnapshotCallback

__all__ = ["NvmeCache", "SnapshotCallback", "from_pretrained", "save_merged", "weights_of"]

# experts_implementation="tensorferry" also for models that are in memory.
if "transformers.integrations.moe" in sys.modules:
    register()
else:
    ImportWatch("transformers.integrations.moe", register)


def from_pretrained(
    path: str | os.PathLike[str],
    max_cpu_bytes: int = 1 << 30,
    *,
    model_class: type[Any] | None = None,
    max_gpu_bytes: int | None = None,
    device: torch.device | str | int = "cpu",
    keep_bytes: int = 64 << 10,
    units: Sequence[type[torch.nn.Module]] | None = None,
    guess_experts: bool = False,
    **options: Any,
) -> Any:
    """Returns what `from_pretrained(path, **options)` of transformers returns, with its weights in
    the files of the checkpoint: they are read when the model needs them, and nothing is written.

    `model_class` is a class of transformers, also AutoModelForCausalLM and the like; by default the
    first of `architectures` in the configuration. `max_cpu_bytes`, `max_gpu_bytes`, `device` and
    `keep_bytes` are those of offload.checkpoint(). `units` are classes whose weights come together;
    by default the layers of the model (its `_no_split_modules`). `options` are those of
    transformers: dtype, attn_implementation, revision and so on. weights_of(model) has stats() and
    close().

    Experts come one by one, when the router has chosen them, unless `options` have an
    experts_implementation; `guess_experts` also reads those of the last token ahead.

    Tensors that transformers stacks or concatenates are read into one weight. What it transposes or
    permutes is computed at each read, which takes the memory of that weight three times meanwhile.
    Quantized models and device_map are refused.
    """
    for refused in ("device_map", "quantization_config", "state_dict", "gguf_file", "tp_plan"):
        if options.get(refused) is not None:
            raise ValueError(
                f"{refused}= is not supported here: pass device= and max_gpu_bytes=, or load the "
                "model with transformers itself"
            )
    config = _config_of(path, options)
    for name in ("quantization_config", "compression_config"):
        if config.get(name) is not None:
            raise ValueError(
                f"{os.fspath(path)} is quantized ({config[name].get('quant_method', name)}): such "
                "models cannot run from their files yet; load it with transformers itself"
            )
    if model_class is None:
        model_class = _class_of(path, config.get("architectures") or ())
    register()
    experts = options.get("experts_implementation", NAME) == NAME
    with Loading(
        device, max_cpu_bytes, max_gpu_bytes, keep_bytes, units, experts, guess_experts
    ) as loading:
        model = model_class.from_pretrained(path, **options)
    if loading.weights is None:
        raise RuntimeError(
            f"transformers has loaded {model_class.__name__} in a way that this version of "
            "tensorferry does not know: build it on the meta device, and use offload.checkpoint()"
        )
    model.weights_on_drive = loading.weights
    return model


def weights_of(model: torch.nn.Module) -> OffloadedParameters:
    """Returns the weights of a model of from_pretrained(), with stats(), gather() and close()."""
    weights = getattr(model, "weights_on_drive", None)
    if not isinstance(weights, OffloadedParameters):
        raise ValueError("this model does not come from tensorferry.transformers.from_pretrained()")
    return weights


def save_merged(model: Any, folder: str | os.PathLike[str], **options: Any) -> None:
    """Saves what `model.merge_and_unload().save_pretrained(folder, **options)` saves, for a
    PeftModel over a model of from_pretrained(): the weights stay in their files, the model stays as
    it is, and no more of the weights is in memory than at other times.

    Merges the active LoRA adapters, one weight after the other, into a file without a name in
    `folder`, which needs room for those weights twice. Other adapters are refused by name.
    """
    from .merging import save_merged as merged

    merged(model, weights_of(model.get_base_model()), folder, options)


def _config_of(path: str | os.PathLike[str], options: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration as it is in its file."""
    import transformers

    config = options.get("config") or path
    if isinstance(config, transformers.PretrainedConfig):
        return dict(config.to_dict())
    known = ("revision", "subfolder", "token", "cache_dir", "local_files_only")
    asked = {name: options[name] for name in known if name in options}
    found, _ = transformers.PretrainedConfig.get_config_dict(config, **asked)
    return dict(found)


def _class_of(path: str | os.PathLike[str], architectures: Sequence[str]) -> type[Any]:
    """Returns the class that the configuration names."""
    import transformers

    for name in architectures:
        if (found := getattr(transformers, name, None)) is not None:
            return found  # type: ignore[no-any-return]
    raise ValueError(
        f"the configuration of {os.fspath(path)} names no class of transformers "
        f"({list(architectures)}): pass model_class="
    )


if not TYPE_CHECKING:  # it would give every name to type checkers

    def __getattr__(name):
        if name == "NvmeCache":  # its bases are classes of transformers
            from .cache import NvmeCache

            return NvmeCache
        if name == "SnapshotCallback":
            from .snapshots import SnapshotCallback

            return SnapshotCallback
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
