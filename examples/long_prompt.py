"""Generates after a prompt whose keys and values are larger than the memory that they get.

    python examples/long_prompt.py /mnt/nvme
    python examples/long_prompt.py /mnt/nvme --layers 16 --prompt 32768 --cache 256M

The prompt is computed once and saved; then two questions go on from it, as other programs could. It
makes a Llama with random weights, so the answers are as random. All that it writes is removed at
the end.
"""

import argparse
import os
import tempfile
import time

import gpt
import tensorferry
import torch
import transformers
from train_larger_than_memory import parse_size

WORDS = 1000
PART = 1024  # tokens of the prompt at a time: what computes them needs memory, too


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="where to put keys and values, on a drive")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=4096, help="tokens")
    parser.add_argument(
        "--cache", type=parse_size, default="48M", help="memory for keys and values"
    )
    parser.add_argument("--tokens", type=int, default=16)
    return parser.parse_args()


def make_model(options):
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=options.width,
        intermediate_size=2 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        max_position_embeddings=options.prompt + options.tokens + 8,
    )
    return transformers.LlamaForCausalLM(config).eval()


@torch.no_grad()
def read_prompt(model, prompt, cache):
    for part in prompt.split(PART, dim=1):
        model(part, past_key_values=cache, logits_to_keep=1)


def main():
    options = arguments()
    torch.manual_seed(0)
    model = make_model(options)
    prompt = torch.randint(WORDS, (1, options.prompt))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        saved = os.path.join(folder, "prompt")
        kind = tensorferry.transformers.NvmeCache
        with kind(model.config, nvme_path=folder, max_cpu_bytes=options.cache) as cache:
            read_prompt(model, prompt, cache)
            cache.save(saved, model, prompt)
        for number in (1, 2):
            question = torch.cat([prompt, torch.randint(WORDS, (1, 4))], dim=1)
            start = time.monotonic()
            with kind.load(saved, model, question, folder, options.cache) as cache:
                words = model.generate(
                    question,
                    past_key_values=cache,
                    max_new_tokens=options.tokens,
                    do_sample=False,
                    pad_token_id=0,
                )
                facts = cache.stats()
            print(
                f"question {number}: {words.shape[1] - question.shape[1]} tokens in "
                f"{time.monotonic() - start:.1f} s; "
                f"{gpt.size_text(facts['resident_bytes'])} of "
                f"{gpt.size_text(facts['state_bytes'])} of keys and values in memory, "
                f"{gpt.size_text(facts['read_bytes'])} read"
            )


if __name__ == "__main__":
    main()
