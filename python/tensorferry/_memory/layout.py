"""How tensors lie in memory and on the drive: pages, cuts, strides, the part of a rank."""

from __future__ import annotations

import mmap

import torch

PAGE = mmap.PAGESIZE

# Parameters are cut at multiples of this: whole pages for any dtype, and whole vectors, so that
# torch's kernels compute the same bits as over the whole parameter.
CUT = PAGE


def page_up(count: int) -> int:
    """Rounds up to whole pages."""
    return -(-count // PAGE) * PAGE


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the part of a distributed tensor that this rank has; any other tensor unchanged."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def distributed_like(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Returns the part of this rank as a tensor that is distributed as the parameter is; unchanged
    if the parameter is not distributed."""
    if not hasattr(param, "to_local") or tensor.shape != param.to_local().shape:
        return tensor
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        tensor,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def is_dense(tensor: torch.Tensor) -> bool:
    """Returns whether its elements fill one stretch of memory, in any order."""
    if tensor.is_contiguous():
        return True
    by_stride = sorted((tensor.stride(i), tensor.size(i), i) for i in range(tensor.dim()))
    return tensor.permute([i for _, _, i in reversed(by_stride)]).is_contiguous()


def check_dense(param: torch.Tensor) -> None:
    if not is_dense(param):
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} and strides {param.stride()} is not dense: "
            "make it contiguous"
        )


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements of a dense tensor in the order of its memory, without a copy."""
    return tensor.as_strided((tensor.numel(),), (1,))


def flat_as(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Returns the elements of a tensor in the order that these strides give them in memory."""
    if tensor.stride() != stride or not is_dense(tensor):
        tensor = torch.empty_strided(
            tensor.size(), stride, dtype=tensor.dtype, device=tensor.device
        ).copy_(tensor)
    return flat(tensor)
