"""Trains a GPT whose weights, gradients and optimizer states live on NVMe.

    python examples/train_larger_than_memory.py /mnt/nvme
    python examples/train_larger_than_memory.py /mnt/nvme --layers 24 --width 2048 --memory 1G

The model is made without any weights in memory, so it may be larger than that.
"""

import argparse
import sys
import time

import gpt
import tensorferry.offload
import tensorferry.optim
import torch


def parse_size(text):
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(float(text[:-1]) * units[text[-1].upper()]) if text[-1].isalpha() else int(text)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("nvme_path", nargs="+", help="directories, one on each drive")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--memory", type=parse_size, default="128M", help="for weights, e.g. 1G")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    return parser.parse_args()


class Progress:
    """One line that is written over on a terminal; one line a step elsewhere."""

    def __init__(self, steps):
        self.steps = steps
        self.start = time.monotonic()

    def __call__(self, step, loss, moved_bytes, seconds):
        resident, _ = gpt.resident_bytes()
        share = step / self.steps
        left = (time.monotonic() - self.start) / step * (self.steps - step)
        filled = int(share * 24)
        line = (
            f"[{'#' * filled}{'.' * (24 - filled)}] step {step}/{self.steps}  loss {loss:.3f}  "
            f"memory {gpt.size_text(resident)}  drive {gpt.size_text(moved_bytes / seconds)}/s  "
            f"{left:.0f} s left"
        )
        last = step == self.steps
        if sys.stdout.isatty():
            print("\r\033[K" + line, end="\n" if last else "", flush=True)
        else:
            print(line, flush=True)


def main():
    options = arguments()
    torch.manual_seed(0)
    with torch.device("meta"):
        model = gpt.GPT(options.layers, options.width, length=options.length)
    weights = tensorferry.offload.parameters(
        model, options.nvme_path, max_cpu_bytes=options.memory, initialize=gpt.initialize
    )
    optimizer = tensorferry.optim.AdamW(
        model.parameters(),
        lr=3e-4,
        nvme_path=options.nvme_path,
        offload_gradients=True,
        pipeline_write=True,
    )
    total = weights.stats()["weight_bytes"]
    print(
        f"{gpt.size_text(total)} of weights, {gpt.size_text(options.memory)} of memory for them; "
        f"{gpt.size_text(4 * total)} with gradients and states"
    )
    progress = Progress(options.steps)
    moved = 0
    for step in range(1, options.steps + 1):
        start = time.monotonic()
        optimizer.zero_grad()
        loss = gpt.loss_of(model, gpt.text(step, options.batch, options.length))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        before = moved
        moved = sum(
            part.stats()[name]
            for part in (weights, optimizer)
            for name in ("read_bytes", "written_bytes")
        )
        progress(step, loss.item(), moved - before, time.monotonic() - start)
    _, peak = gpt.resident_bytes()
    written = weights.stats()["written_bytes"] + optimizer.stats()["written_bytes"]
    print(f"peak memory {gpt.size_text(peak)}; {gpt.size_text(written)} written to the drive")
    optimizer.close()
    weights.close()


if __name__ == "__main__":
    main()
