"""Generates with a model of transformers that runs from its checkpoint as it lies.

    python examples/infer_checkpoint.py /mnt/nvme
    python examples/infer_checkpoint.py /mnt/nvme --layers 16 --width 2048 --memory 256M

It makes a Llama with random weights and saves it, as a stand-in for the folder that you have; the
text is as random. Nothing but that folder is written, and it is removed at the end.
"""

import argparse
import tempfile
import time

import gpt
import tensorferry
import torch
import transformers
from train_larger_than_memory import parse_size


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="where to put the checkpoint, on a drive")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--memory", type=parse_size, default="80M", help="for weights, e.g. 2G")
    parser.add_argument("--tokens", type=int, default=16)
    return parser.parse_args()


def save_model(folder, options):
    """Saves a model in files of at most 64 MB, with their index."""
    config = transformers.LlamaConfig(
        vocab_size=4000,
        hidden_size=options.width,
        intermediate_size=4 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="64MB")


def main():
    options = arguments()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        save_model(folder, options)
        model = tensorferry.transformers.from_pretrained(folder, max_cpu_bytes=options.memory)
        weights = tensorferry.transformers.weights_of(model)
        start = time.monotonic()
        prompt = torch.randint(4000, (1, 8))
        tokens = model.generate(prompt, max_new_tokens=options.tokens, do_sample=False)
        seconds = time.monotonic() - start
        facts = weights.stats()
        print(
            f"{tokens.shape[1] - 8} tokens in {seconds:.1f} s; "
            f"{gpt.size_text(facts['resident_bytes'])} of {gpt.size_text(facts['weight_bytes'])} "
            f"of weights in memory, {gpt.size_text(facts['read_bytes'])} read, "
            f"{facts['written_bytes']} bytes written"
        )
        weights.close()


if __name__ == "__main__":
    main()
