"""Takes over where transformers would read the weights of a model that it has built."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..offload import OffloadedParameters
from ..offload.in_place import InPlace
from ..offload.places import place_of
from ..offload.stored_files import StoredFiles
from .conversions import converted_sources
from .experts import NAME, attach, expert_modules, is_chosen


class _Active(threading.local):
    loading: Loading | None = None


_active = _Active()
_replaced = threading.Lock()


class Loading:
    """Inside `with`, a from_pretrained() of transformers in this thread leaves the weights in their
    files."""

    def __init__(
        self,
        device: torch.device | str | int,
        max_cpu_bytes: int,
        max_gpu_bytes: int | None,
        keep_bytes: int,
        units: Sequence[type[torch.nn.Module]] | None,
        experts: bool,
        guess_experts: bool,
    ) -> None:
        """`experts`: those of a module come one by one, if they can."""
        self._experts = experts
        self._guess_experts = guess_experts
        self._place = (device, max_cpu_bytes, max_gpu_bytes)
        self._keep_bytes = keep_bytes
        self._units = units
        self.weights: OffloadedParameters | None = None

    def __enter__(self) -> Loading:
        _replace_functions()
        self._outer, _active.loading = _active.loading, self
        return self

    def __exit__(self, *_: object) -> None:
        _active.loading = self._outer

    def load(self, model: Any, checkpoint_files: list[str], config: Any) -> None:
        """Makes the weights of the model those of these files."""
        if config.hf_quantizer is not None:
            raise ValueError(
                f"{type(model).__name__} is quantized: such models cannot run from their files "
                "yet; load it with transformers itself"
            )
        files = StoredFiles(checkpoint_files, {})
        try:
            sources = converted_sources(files, model, config.weight_mapping or [])
            missing = set(model.state_dict()) - sources.keys()
            model.tie_weights(missing_keys=missing, recompute_mapping=False)
            dtypes = _dtypes(model, config.dtype_plan or {})
            device, max_bytes = place_of(model, *self._place)
            in_place = InPlace(model, files, sources, device, lambda name, _: dtypes[name])
            in_place.match(missing_is_error=True, extra_is_error=False)
            units = _layers_of(model) if self._units is None else tuple(self._units)
            stacks = self._stacks(model)
            self.weights = in_place.run(max_bytes, self._keep_bytes, units, None, stacks)
            for module, weights in in_place.experts.items():
                weights.guess(self._guess_experts)
                attach(module, weights)
        except BaseException:
            files.close()
            raise

    def _stacks(self, model: Any) -> dict[torch.nn.Module, Callable[[], bool]]:
        """Makes transformers ask for single experts, if they are to come one by one. Returns the
        modules that have some."""
        modules = expert_modules(model) if self._experts else []
        if modules:
            model.set_experts_implementation(NAME)
        return {module: functools.partial(is_chosen, module) for module in modules}


def _layers_of(model: torch.nn.Module) -> tuple[type[torch.nn.Module], ...]:
    """Returns the classes of the layers, which transformers never splits over two devices."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return tuple({type(module) for module in model.modules() if type(module).__name__ in names})


def _dtypes(model: torch.nn.Module, plan: dict[str, torch.dtype]) -> dict[str, torch.dtype]:
    """Returns the dtype of each parameter and buffer: that of the model on the meta device, but for
    those that transformers keeps in fp32."""
    from transformers.core_model_loading import build_glob_alternation

    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    if plan:
        pattern, groups, _ = build_glob_alternation(list(plan))
        for name in dtypes:
            if (found := pattern.search(name)) is not None:
                dtypes[name] = plan[groups[found.lastgroup]]
    return dtypes


# Of transformers' PreTrainedModel: one fills a model, the other looks what it lacks.
_LOADING_FUNCTIONS = ("_load_pretrained_model", "_finalize_model_loading")


def _replace_functions() -> None:
    """Makes transformers ask here first; once in a process."""
    if not _replaced.acquire(blocking=False):
        return
    from transformers import PreTrainedModel

    load, finalize = (getattr(PreTrainedModel, name) for name in _LOADING_FUNCTIONS)

    @functools.wraps(load)
    def our_load(
        model: Any,
        state_dict: Any,
        checkpoint_files: Any,
        load_config: Any,
        *more: Any,
        **named: Any,
    ) -> Any:
        loading = _active.loading
        if loading is None or not checkpoint_files:
            return load(model, state_dict, checkpoint_files, load_config, *more, **named)
        loading.load(model, checkpoint_files, load_config)
        return _nothing_missing(), None

    @functools.wraps(finalize)
    def our_finalize(model: Any, load_config: Any, loading_info: Any) -> Any:
        loading = _active.loading
        if loading is None or loading.weights is None:
            return finalize(model, load_config, loading_info)
        return loading_info

    replacements: list[Callable[..., Any]] = [our_load, our_finalize]
    for name, ours in zip(_LOADING_FUNCTIONS, replacements):
        setattr(PreTrainedModel, name, staticmethod(ours))


def _nothing_missing() -> Any:
    """Returns what transformers wants to know of a load."""
    from transformers.modeling_utils import LoadStateDictInfo

    empty = {
        "missing_keys": set,
        "unexpected_keys": set,
        "mismatched_keys": set,
        "skipped_pp_keys": set,
        "error_msgs": list,
        "conversion_errors": dict,
    }
    names = [field.name for field in dataclasses.fields(LoadStateDictInfo)]
    return LoadStateDictInfo(**{name: empty[name]() for name in names if name in empty})
