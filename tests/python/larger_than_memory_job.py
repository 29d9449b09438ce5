"""A GPT of 1 GiB of weights that is trained or run, in a memory cgroup or not.

python larger_than_memory_job.py train|run memory|DIRECTORY [cgroup=FOLDER] [limit=BYTES]

With a directory the weights, gradients and states are on the drive, and `limit` bytes of weights in
memory. Prints what it computes to the last bit.
"""

import os
import sys

OPTIONS = dict(word.split("=") for word in sys.argv[3:])
if "cgroup" in OPTIONS:  # before torch: its memory counts
    with open(os.path.join(OPTIONS["cgroup"], "tasks"), "w") as tasks:
        tasks.write(str(os.getpid()))

import torch
from torch import nn

WIDTH, LAYERS, WORDS, LENGTH = 1024, 21, 4096, 32
REPORTED = ("weight_bytes", "resident_bytes", "overflows")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.join = nn.Linear(WIDTH, WIDTH)
        self.between = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        parts = self.mix(self.before(x)).unflatten(-1, (3, 16, -1)).movedim(2, 0).transpose(2, 3)
        seen = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).flatten(2))
        return x + self.narrow(nn.functional.gelu(self.widen(self.between(x))))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.end = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.end(x))


def start(module):
    """The same values wherever a module is made."""
    for name, param in module.named_parameters(recurse=False):
        if isinstance(module, nn.LayerNorm) or name == "bias":
            nn.init.constant_(param, float(name == "weight"))
        else:
            generator = torch.Generator().manual_seed(param.numel())
            nn.init.normal_(param, 0, 0.02, generator=generator)


def main():
    mode, place = sys.argv[1:3]
    torch.set_num_threads(1)  # two of these programs run beside each other
    with torch.device("meta"):
        model = Gpt()
    weights = None
    adamw = {"lr": 1e-3}
    if place == "memory":
        model.to_empty(device="cpu")
        model.head.weight = model.words.weight  # torch makes two of them
        model.apply(start)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **adamw)
    else:
        import tensorferry.offload
        import tensorferry.optim

        weights = tensorferry.offload.parameters(
            model, place, int(OPTIONS["limit"]), initialize=start
        )
        if mode == "train":
            optimizer = tensorferry.optim.AdamW(
                model.parameters(),
                nvme_path=place,
                offload_gradients=True,
                buffer_count=2,
                buffer_bytes=34 << 20,
                **adamw,
            )
    tokens = torch.randint(WORDS, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    for step in range(3):
        if mode == "train":
            logits = model(tokens)
            loss = nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print("loss", step, loss.item().hex(), flush=True)
        else:
            with torch.inference_mode():
                logits = model(tokens.roll(step))
            print("logits", step, logits.double().sum().item().hex(), flush=True)
    stats = weights.stats() if weights else {}
    print(" ".join(f"{key}={stats[key]}" for key in stats if key in REPORTED))


main()
