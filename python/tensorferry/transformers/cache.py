"""A cache of keys and values on the drive, for contexts longer than memory."""

from __future__ import annotations

import os
from typing import Any, NoReturn

import torch
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from .._memory.buffers import NvmePath
from .cache_layer import NvmeLayer
from .cache_memory import CacheMemory
from .saved_cache import SavedCache, save_cache

# Layers of transformers that are small, and stay in memory as they are.
_SMALL = (DynamicSlidingWindowLayer, LinearAttentionLayer, DummyLayer)


class NvmeCache(Cache):
    """Keys and values for generate() of transformers: so many bytes of them in memory, the rest on
    the drive. Gives the bits of DynamicCache. ::

        cache = NvmeCache(model.config, nvme_path="/mnt/nvme", max_cpu_bytes=8 << 30)
        tokens = model.generate(**prompt, past_key_values=cache)
        cache.close()

    `config` is that of the model. `nvme_path` is a directory on a drive, or several; the files
    there have no name and end with the program. Of a model on a GPU the keys and values are in
    memory of the GPU, `max_gpu_bytes` of them (default: `max_cpu_bytes`). The keys and values of
    one layer must fit; the next layers are read while one computes, if two do. Beside that memory
    are the last tokens of each layer, fewer than 64 as a rule, which do not fill a block on the
    drive, and a copy of one layer while sequences change places.

    crop() works as with DynamicCache. Beam search and the selection of sequences work, too, but
    read and write all of the cache each time. Layers with a sliding window or a linear attention
    stay in memory, as transformers has them, besides `max_cpu_bytes`. Gradients, and layers that
    use the keys of other layers or keep more than keys and values, are refused.

    A model with an encoder needs `EncoderDecoderCache(cache, another)` of transformers, where
    `another` is a DynamicCache, or an NvmeCache with memory of its own.
    """

    __module__ = "tensorferry.transformers"  # where users find it

    def __init__(
        self,
        config: Any,
        nvme_path: NvmePath,
        max_cpu_bytes: int = 1 << 30,
        *,
        max_gpu_bytes: int | None = None,
        saved: SavedCache | None = None,
    ) -> None:
        """`saved` is for load()."""
        for name, nbytes in (("max_cpu_bytes", max_cpu_bytes), ("max_gpu_bytes", max_gpu_bytes)):
            if nbytes is not None and (not isinstance(nbytes, int) or nbytes < 1):
                raise ValueError(f"{name} must be a number of bytes of at least 1, got {nbytes!r}")
        self._has_encoder = bool(getattr(config, "is_encoder_decoder", False))
        self._last_layer = -1
        text = config.get_text_config(decoder=True)
        if "reuse" in (getattr(text, "kv_sharing_modes", None) or ()):
            raise ValueError(
                f"{type(config).__name__} has layers that use the keys and values of other layers, "
                "which NvmeCache cannot hold so long: use DynamicCache"
            )
        layers = DynamicCache(config=config).layers
        self._memory = CacheMemory(len(layers), nvme_path, max_cpu_bytes, max_gpu_bytes)
        self._saved = saved
        try:
            layers = [self._ours(number, one) for number, one in enumerate(layers)]
            if saved is not None:
                saved.fill(layers)
        except BaseException:
            self._memory.close()
            raise
        super().__init__(layers=layers)

    def _ours(self, number: int, layer: Any) -> Any:
        if type(layer) is DynamicLayer:
            return NvmeLayer(self._memory, number)
        if type(layer) in _SMALL:
            return layer
        raise ValueError(
            f"NvmeCache has no place for a {type(layer).__name__}, which layer {number} of this "
            "model needs: use DynamicCache"
        )

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._memory.check_usable()
        if self._has_encoder and layer_idx == self._last_layer and len(self.layers) > 1:
            raise ValueError(
                "an NvmeCache was given keys of the encoder and of the decoder: pass "
                "past_key_values=EncoderDecoderCache(NvmeCache(...), DynamicCache())"
            )
        self._last_layer = layer_idx
        return super().update(  # type: ignore[no-any-return]
            key_states, value_states, layer_idx, *args, **options
        )

    def stats(self) -> dict[str, int]:
        """Returns how many bytes are where:

        - `state_bytes`: bytes of all keys and values but those of small layers.
        - `resident_bytes`: bytes of the memory that holds some of them, with room to grow.
        - `buffer_bytes`: how many there may be.
        - `drive_bytes`: bytes that the files take.
        - `read_bytes`, `written_bytes`: what was moved.
        """
        stats = self._memory.stats()
        if self._saved is not None:
            stats["read_bytes"] += self._saved.read_bytes
        return stats

    def save(self, path: str | os.PathLike[str], model: Any, input_ids: torch.Tensor) -> None:
        """Writes the cache to a new folder, from which load() makes one in any process. `model` has
        computed it of `input_ids`, whose first tokens are those in the cache."""
        save_cache(self.layers, os.fspath(path), model, input_ids)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: Any,
        input_ids: torch.Tensor,
        nvme_path: NvmePath,
        max_cpu_bytes: int = 1 << 30,
        *,
        max_gpu_bytes: int | None = None,
    ) -> NvmeCache:
        """Returns a cache that begins with a saved one. Its tokens are read from the folder when
        layers need them; new ones go to `nvme_path`.

        Raises ValueError unless the folder comes from this model, and `input_ids` begin with its
        tokens. They must go on after them: generate() computes at least one. The model is
        recognized by its configuration and by samples of its weights."""
        saved = SavedCache(os.fspath(path), model, input_ids)
        try:
            return cls(
                model.config, nvme_path, max_cpu_bytes, max_gpu_bytes=max_gpu_bytes, saved=saved
            )
        except BaseException:
            saved.close()
            raise

    def close(self) -> None:
        """Ends the cache, and frees its memory and its space on the drive."""
        self._memory.close()
        if self._saved is not None:
            self._saved.close()
        self.layers: list[Any] = []

    def __reduce__(self) -> NoReturn:
        raise TypeError("an NvmeCache cannot be pickled: save() it, and load() it where it is used")

    def __deepcopy__(self, _: object) -> NoReturn:
        raise TypeError(
            "an NvmeCache cannot be copied: save() it, and load() it as often as needed"
        )

    def __enter__(self) -> NvmeCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
