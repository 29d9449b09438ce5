"""Tensors of known bytes on a GPU."""

import torch

MiB = 1 << 20


def random_bytes(count, seed=0, device="cuda"):
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, device=device, generator=generator)


def bytes_of(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()


def busy(milliseconds):
    """Keeps the current stream busy for about so long, without a word to the CPU."""
    torch.cuda._sleep(int(milliseconds * 1.7e6))
