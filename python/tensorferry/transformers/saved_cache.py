"""Caches in a folder: keys and values of a long prompt, computed once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from ..checkpoint import save
from ..offload.stored_files import StoredFiles
from .cache_layer import NvmeLayer
from .cache_states import Saved

_FORMAT = "tensorferry cache 1"
_FACTS = "cache.json"
# Of each weight so many samples tell models apart, of so many elements.
_SAMPLES = 8
_SAMPLE = 16


def save_cache(layers: Sequence[Any], path: str, model: Any, input_ids: torch.Tensor) -> None:
    """Writes a folder that appears as a whole."""
    length = max(layer.get_seq_length() for layer in layers)
    _check_length(input_ids, length)
    _check_inputs(model.config, input_ids)
    if os.path.exists(path):
        raise FileExistsError(f"{path} exists: remove it, or save to another folder")
    parent = os.path.dirname(os.path.abspath(path))
    folder = tempfile.mkdtemp(prefix=".tensorferry-cache-", dir=parent)
    try:
        filled = []
        for number, layer in enumerate(layers):
            if (states := _states_of(number, layer)) is not None:
                filled.append(number)
                save(states, os.path.join(folder, f"layer-{number:05}.safetensors"))
        facts = {
            "format": _FORMAT,
            "model": _digest(model),
            "length": length,
            "layers": filled,
            "tokens": input_ids[:, :length].tolist(),
        }
        with open(os.path.join(folder, _FACTS), "w") as file:
            json.dump(facts, file)
            file.flush()
            os.fsync(file.fileno())
        _sync(folder)
        os.rename(folder, path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    _sync(parent)


def _states_of(number: int, layer: Any) -> dict[str, torch.Tensor] | None:
    """Returns the keys and values of a layer by their names in the folder."""
    if not isinstance(layer, (NvmeLayer, DynamicSlidingWindowLayer)):
        raise ValueError(
            f"layer {number} of the cache is a {type(layer).__name__}, which cannot be saved"
        )
    ours = isinstance(layer, NvmeLayer)
    keys, values = layer.copies() if ours else (layer.keys, layer.values)
    if keys is None or values is None:
        return None
    if ours and (states := layer.states) is not None:
        # Rows of whole blocks, which are read where they lie.
        more = -states.length % states.block
        keys, values = (torch.nn.functional.pad(one, (0, 0, 0, more)) for one in (keys, values))
    return {f"{number}.keys": keys.contiguous(), f"{number}.values": values.contiguous()}


class SavedCache:
    """A cache in a folder, which fits the model and begins the tokens."""

    def __init__(self, path: str, model: Any, input_ids: torch.Tensor) -> None:
        with open(os.path.join(path, _FACTS)) as file:
            facts = json.load(file)
        if not isinstance(facts, dict) or facts.get("format") != _FORMAT:
            raise ValueError(f"{path} is not a cache that this version of tensorferry can read")
        if facts["model"] != _digest(model):
            raise ValueError(
                f"{path} was computed by another model: its configuration or its weights differ"
            )
        self._device = model.device
        self._length = facts["length"]
        _check_length(input_ids, self._length + 1)
        tokens = torch.tensor(facts["tokens"])
        given = input_ids[:, : self._length].cpu()
        if given.shape != tokens.shape:
            raise ValueError(
                f"{path} has {len(tokens)} sequences, and input_ids has {len(input_ids)}"
            )
        if not torch.equal(given, tokens):
            row, at = (given != tokens).nonzero()[0].tolist()
            raise ValueError(
                f"{path} was computed of other tokens: token {at} of sequence {row} is "
                f"{tokens[row, at]} there, and {given[row, at]} in input_ids"
            )
        names = sorted(name for name in os.listdir(path) if name.endswith(".safetensors"))
        self._files = StoredFiles([os.path.join(path, name) for name in names], {})
        wanted = {f"{n}.{side}" for n in facts["layers"] for side in ("keys", "values")}
        if wanted != set(self._files.tensors):
            self._files.close()
            missing = sorted(wanted.symmetric_difference(self._files.tensors))
            raise ValueError(f"{path} is damaged: it lacks {', '.join(missing)}, or has too much")

    def fill(self, layers: Sequence[Any]) -> None:
        """Gives the layers of a new cache their tokens."""
        for number, layer in enumerate(layers):
            names = [f"{number}.keys", f"{number}.values"]
            if names[0] not in self._files.tensors:
                continue
            stored = [self._files.stored(name) for name in names]
            if not isinstance(layer, NvmeLayer):
                values = [
                    self._files.values(n, s, s.dtype, s.stride) for n, s in zip(names, stored)
                ]
                layer.update(*(one.read_now(self._device) for one in values))
                layer.cumulative_length = self._length
                continue
            like = [torch.empty(one.size, dtype=one.dtype, device="meta") for one in stored]
            empty = [
                torch.empty(*one.shape[:2], 0, one.shape[3], dtype=one.dtype, device=self._device)
                for one in like
            ]
            layer.lazy_initialization(*empty)
            rows = tuple(
                Saved(s.stretches[0].file, s.stretches[0].offset, one.stride(1) * s.dtype.itemsize)
                for s, one in zip(stored, like)
            )
            assert layer.states is not None
            layer.states.hold(rows, self._length)

    @property
    def read_bytes(self) -> int:
        return int(self._files.stats()["read_bytes"])

    def close(self) -> None:
        self._files.close()


def _check_length(input_ids: torch.Tensor, least: int) -> None:
    if input_ids.dim() != 2 or input_ids.shape[1] < least:
        raise ValueError(
            f"input_ids has the shape {tuple(input_ids.shape)}: it must have two dimensions, and "
            f"at least {least} tokens in each sequence"
        )


def _check_inputs(config: Any, input_ids: torch.Tensor) -> None:
    """Raises ValueError if keys depend on more than the model and its tokens."""
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError("a cache behind an encoder depends on its input, too: it cannot be saved")
    for name in ("image_token_id", "video_token_id", "audio_token_id"):
        token = getattr(config, name, None)
        if token is not None and bool((input_ids == token).any()):
            raise ValueError(
                f"input_ids has the {name} of the model: keys depend on what stands behind it, and "
                "load() could not check that"
            )


def _digest(model: Any) -> str:
    """Returns what tells models apart: their configuration, and samples of all weights."""
    digest = hashlib.sha256()
    config = model.config.to_dict()
    unimportant = ("_name_or_path", "transformers_version", "architectures", "dtype")
    kept = {name: value for name, value in config.items() if name not in unimportant}
    digest.update(json.dumps(kept, sort_keys=True, default=str).encode())
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(_samples(weight).numpy().tobytes())
    return digest.hexdigest()


def _samples(weight: torch.Tensor) -> torch.Tensor:
    """Returns bytes of a weight, from evenly spread places."""
    flat = weight.detach().reshape(-1)
    last = max(flat.numel() - _SAMPLE, 0)
    places = sorted({last * number // (_SAMPLES - 1) for number in range(_SAMPLES)})
    parts = [flat[at : at + _SAMPLE].clone().cpu() for at in places]
    return torch.cat(parts).view(torch.uint8)


def _sync(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
