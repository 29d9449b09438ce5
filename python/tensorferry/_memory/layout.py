"""How tensors lie in memory and on the drive: pages, cuts, strides, the part of a rank."""

import mmap

import torch

PAGE = mmap.PAGESIZE

# Parameters are cut at multiples of this: whole pages for any dtype, and whole vectors, so that
# torch's kernels compute the same bits as over the whole parameter.
CUT = PAGE


def page_up(count):
    return -(-count // PAGE) * PAGE


def local(tensor):
    """The part of a distributed tensor that this rank has; any other tensor as it is."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def distributed_like(tensor, param):
    """What this rank has, distributed as the parameter is; of any other parameter as it is."""
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


def is_dense(tensor):
    """Whether its elements fill a stretch of memory, in whichever order."""
    by_stride = sorted((tensor.stride(i), tensor.size(i), i) for i in range(tensor.dim()))
    return tensor.permute([i for _, _, i in reversed(by_stride)]).is_contiguous()


def check_dense(param):
    if not is_dense(param):
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} and strides {param.stride()} is not dense: "
            "make it contiguous"
        )


def flat(tensor):
    """The elements of a dense tensor in the order of its memory, without a copy."""
    return tensor.as_strided((tensor.numel(),), (1,))


def flat_as(tensor, stride):
    """The elements of a tensor in the order that they have in memory with these strides."""
    if tensor.stride() != stride or not is_dense(tensor):
        tensor = torch.empty_strided(
            tensor.size(), stride, dtype=tensor.dtype, device=tensor.device
        ).copy_(tensor)
    return flat(tensor)
