"""A parameter that FSDP2 has sharded, whose shard of this rank is on the drive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from .._core import Operation, SwapSpace
from .._memory.heap import note_block_freed
from .._memory.layout import distributed_like, page_up
from .._memory.stored_parameter import StoredParameter
from .._memory.values import SwappedValues
from .._memory.weight_memory import WeightBuffer

# Brings the weights of a unit in, and returns their memory.
Fetch = Callable[[], torch.Tensor]


class ShardPlace:
    """Where FSDP2 looks for the shard of a parameter. Knows what torch calls it."""

    def __init__(self, fsdp_param: Any) -> None:
        self._fsdp_param = weakref.ref(fsdp_param)  # does not keep the model alive
        self.padded_size: torch.Size = fsdp_param.padded_sharded_param_size

    @property
    def local(self) -> torch.Tensor | None:
        """The shard that the parameter has; None when nobody has the parameter any more."""
        fsdp_param = self._fsdp_param()
        return None if fsdp_param is None else fsdp_param.sharded_param._local_tensor

    def put(self, local: torch.Tensor, padded: torch.Tensor) -> None:
        """Gives the parameter this shard. `padded`: the same memory in one dimension, as long as
        the longest shard of any rank. FSDP2 would copy a shard whose memory it does not know."""
        if (fsdp_param := self._fsdp_param()) is not None:
            fsdp_param.sharded_param._local_tensor = local
            fsdp_param._sharded_param_data = padded
            if not hasattr(fsdp_param, "_extensions_data"):
                fsdp_param._init_extensions()


class PaddedValues(SwappedValues):
    """The values of a shard in a swap space. Their memory has room for the longest shard of any
    rank, because that is what every rank gives to an all-gather."""

    def __init__(self, shard: torch.Tensor, key: str, space: SwapSpace, padded_bytes: int) -> None:
        super().__init__(shard, key, space)
        self.slot_bytes = page_up(padded_bytes)


class ShardOnDrive(torch.Tensor):
    """The shard that a parameter shows. FSDP2 asks it for its values in each all-gather, also in
    those that are ahead of time and call no hook of a module."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: torch.Tensor, stored: StoredShard) -> ShardOnDrive:
        # .data: each shard counts its changes by itself, not with its neighbours in memory.
        return torch.Tensor._make_subclass(cls, values.data)

    def __init__(self, values: torch.Tensor, stored: StoredShard) -> None:
        self.stored = stored

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor], None]:
        """What this rank gives to an all-gather."""
        if self.device.type == "cpu":  # FSDP2 frees what it gathered before
            note_block_freed(outer_size.numel() * self.itemsize)
        values = self.stored.padded()
        dtype = mp_policy.param_dtype
        if dtype is not None and values.dtype.is_floating_point:
            values = values.to(dtype)
        return (values,), None

    def fsdp_post_all_gather(
        self,
        outputs: tuple[torch.Tensor, ...],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """What an all-gather has brought is the weight itself."""
        return (outputs[0], ()) if out is None else None

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a model with weights on NVMe cannot be pickled: save its state_dict()")


class StoredShard(StoredParameter):
    """A parameter of FSDP2 on the drive. `size` and `stride` are those of the shard."""

    def __init__(
        self,
        param: torch.nn.Parameter | None,
        values: PaddedValues,
        buffer: WeightBuffer,
        offset: int,
        place: ShardPlace,
        fetch: Fetch,
    ) -> None:
        super().__init__(param, values, buffer, offset)
        self._place = place
        self._fetch: Fetch | None = fetch
        self._padded_numel = place.padded_size.numel()
        self._shown: torch.Tensor | None = None  # the shard that show() has given the parameter

    # --- what the parameter shows ---

    @property
    def version(self) -> int | None:
        param, local = self.param, self._place.local
        if param is None or local is None or param.is_inference() or local.is_inference():
            return None
        return param._version + local._version  # to_local() changes only the second

    def check_unchanged(self) -> None:
        local = self._place.local
        if local is None:
            return
        self._check_shard(local)
        if local is not self._shown or not self._is_nothing():
            self._refuse_assigned()

    def _check_shard(self, local: torch.Tensor) -> None:
        same = local.dtype == self.dtype and local.size() == self.size
        if not same or local.device != self.device:
            raise RuntimeError(
                f"a parameter on NVMe was converted: its shard of {self.dtype} and shape "
                f"{tuple(self.size)} on {self.device} became one of {local.dtype} and shape "
                f"{tuple(local.size())} on {local.device}; convert the model before its weights go "
                "to NVMe"
            )

    def show(self, values: torch.Tensor) -> None:
        if values.data_ptr() == self.absent.data_ptr():
            padded = self.absent.as_strided((self._padded_numel,), (0,))
        else:
            padded = values.as_strided((self._padded_numel,), (1,), values.storage_offset())
        self._shown = ShardOnDrive(values, self)
        self._place.put(self._shown, padded.data)

    def restore(self, values: torch.Tensor) -> None:
        padded = values.new_zeros(self._place.padded_size)
        local = padded.view(-1)[: self.numel].view(self.size)
        local.copy_(values)
        self._place.put(local, padded.view(-1))

    def end(self) -> None:
        super().end()
        self._fetch = None

    # --- in the memory of its buffer ---

    def own_values(self) -> torch.Tensor | None:
        return self._place.local

    def is_elsewhere(self, memory: torch.Tensor) -> bool:
        local = self._place.local
        return local is not None and local.data_ptr() != memory.data_ptr() + self._first

    @torch.no_grad()
    def collect(self, memory: torch.Tensor) -> None:
        if (local := self._place.local) is not None:
            self._check_shard(local)
            self.of(memory).copy_(local)

    def save(self, memory: torch.Tensor) -> Iterator[Operation]:
        # A write takes whole pages, some of the padding too, and takes their checksum: padded() may
        # put zeros there while it runs only if zeros are there already.
        self._clear_padding(memory)
        return super().save(memory)

    # --- for FSDP2 ---

    def padded(self) -> torch.Tensor:
        """Brings the values in. Returns them in as much memory as the longest shard takes."""
        if self._fetch is None:
            raise RuntimeError(
                "the weights on NVMe are closed: use close(restore=True) to go on with the model"
            )
        memory = None if self.offset == 0 else self.buffer.settled()
        if memory is None:  # the first of its unit, in the order in which FSDP2 asks
            memory = self._fetch()
        else:
            self.buffer.check_newest()
            self.buffer.note_use()
        self._clear_padding(memory)
        end = self._first + self._padded_numel * self.dtype.itemsize
        return memory[self._first : end].view(self.dtype).view(self._place.padded_size)

    def _clear_padding(self, memory: torch.Tensor) -> None:
        """Pads as torch does, and not with what was in the memory before."""
        end = self._first + self._padded_numel * self.dtype.itemsize
        if end > self._first + self.nbytes:
            rest = memory[self._first + self.nbytes : end]
            with torch.autograd._unsafe_preserve_version_counter(rest):
                rest.zero_()

    # --- on the drive ---

    def view(self) -> torch.Tensor:
        param = self.param
        assert param is not None
        return distributed_like(super().view(), param)
