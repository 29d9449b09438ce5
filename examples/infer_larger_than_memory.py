"""Generates text with a GPT whose weights live on NVMe.

    python examples/infer_larger_than_memory.py /mnt/nvme
    python examples/infer_larger_than_memory.py /mnt/nvme --layers 32 --width 4096 --memory 2G

The weights are random, and so is the text: watch the memory and the drive.
"""

import argparse
import sys
import time

import gpt
import tensorferry.offload
import torch
from train_larger_than_memory import parse_size


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("nvme_path", nargs="+", help="directories, one on each drive")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--memory", type=parse_size, default="160M", help="for weights, e.g. 2G")
    parser.add_argument("--tokens", type=int, default=32)
    return parser.parse_args()


@torch.inference_mode()
def generate(model, tokens, count):
    """One token after the other, the likeliest each time."""
    for _ in range(count):
        scores = model(tokens[:, -128:])
        tokens = torch.cat((tokens, scores[:, -1:].argmax(-1)), dim=1)
        yield tokens[0, -1].item()


def main():
    options = arguments()
    torch.manual_seed(0)
    with torch.device("meta"):
        model = gpt.GPT(options.layers, options.width)
    with tensorferry.offload.parameters(
        model, options.nvme_path, max_cpu_bytes=options.memory, initialize=gpt.initialize
    ) as weights:
        facts = weights.stats()
        print(
            f"{gpt.size_text(facts['weight_bytes'])} of weights, "
            f"{gpt.size_text(options.memory)} of memory for them"
        )
        start = time.monotonic()
        before = facts["read_bytes"]
        tokens = generate(model, gpt.text(1, 1, 16), options.tokens)
        for number, token in enumerate(tokens, 1):  # noqa: B007 (the last one is shown below)
            if sys.stdout.isatty():
                print(f"\r\033[K{number} of {options.tokens} tokens", end="", flush=True)
        seconds = time.monotonic() - start
        facts = weights.stats()
        _, peak = gpt.resident_bytes()
        if sys.stdout.isatty():
            print("\r\033[K", end="")
        print(
            f"{options.tokens} tokens in {seconds:.1f} s, the last one {token}; "
            f"drive {gpt.size_text((facts['read_bytes'] - before) / seconds)}/s, "
            f"peak memory {gpt.size_text(peak)}, "
            f"{facts['hits']} of {facts['hits'] + facts['misses']} layers were there in time"
        )


if __name__ == "__main__":
    main()
