"""A small GPT and a text to train it on, for the examples."""

import math

import torch
from torch.nn import functional


class Block(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = torch.nn.LayerNorm(width)
        self.attention = torch.nn.Linear(width, 3 * width)
        self.output = torch.nn.Linear(width, width)
        self.norm2 = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.attention(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(torch.nn.Module):
    """The word embedding is the output layer too."""

    def __init__(self, layers, width, heads=8, words=256, length=128):
        super().__init__()
        self.words = torch.nn.Embedding(words, width)
        self.places = torch.nn.Embedding(length, width)
        self.blocks = torch.nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def initialize(module):
    """How the weights of a GPT start; for models that are made without any."""
    if isinstance(module, torch.nn.LayerNorm):
        module.reset_parameters()
    elif hasattr(module, "weight"):
        torch.nn.init.normal_(module.weight, std=0.02)
        if getattr(module, "bias", None) is not None:
            torch.nn.init.zeros_(module.bias)


def text(step, batch, length):
    """Synthetic text with something to learn: sawtooth waves of many periods."""
    generator = torch.Generator().manual_seed(step)
    period = torch.randint(3, 24, (batch, 1), generator=generator)
    start = torch.randint(0, 200, (batch, 1), generator=generator)
    return (start + torch.arange(length + 1) % period * 7) % 256


def loss_of(model, tokens):
    scores = model(tokens[:, :-1])
    return functional.cross_entropy(scores.flatten(0, 1).float(), tokens[:, 1:].flatten())


def weight_bytes(layers, width, itemsize=4):
    return (12 * layers * width * width + 384 * width) * itemsize


def size_text(count):
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.{0 if unit == 'B' else 1}f} {unit}"
        count /= 1000
    return math.nan


def resident_bytes():
    """What this process has in memory, and the most it ever had."""
    figures = {}
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            name, _, value = line.partition(":")
            if name in ("VmRSS", "VmHWM"):
                figures[name] = int(value.split()[0]) * 1024
    return figures["VmRSS"], figures["VmHWM"]
