"""Trains adapters of peft on a model whose weights stay in their checkpoint.

    python examples/adapt_checkpoint.py /mnt/nvme
    python examples/adapt_checkpoint.py /mnt/nvme --layers 16 --width 2048 --memory 256M

It makes a Llama with random weights and saves it, as a stand-in for the folder that you have, and
trains on the text of this program. All that it writes is removed at the end.
"""

import argparse
import os
import tempfile

import gpt
import peft
import tensorferry
import torch
from infer_checkpoint import save_model
from train_larger_than_memory import parse_size

LENGTH = 64


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="where to put the checkpoint, on a drive")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--memory", type=parse_size, default="80M", help="for weights, e.g. 2G")
    parser.add_argument("--steps", type=int, default=10)
    return parser.parse_args()


def add_adapters(model):
    """Returns the model with its weights frozen, and small new ones beside them."""
    config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    return model


def main():
    options = arguments()
    torch.manual_seed(0)
    with open(__file__, "rb") as file:
        text = torch.tensor(list(file.read()))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        base = os.path.join(folder, "base")
        save_model(base, options)
        model = tensorferry.transformers.from_pretrained(base, max_cpu_bytes=options.memory)
        weights = tensorferry.transformers.weights_of(model)
        model = add_adapters(model)
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        for step in range(1, options.steps + 1):
            at = torch.randint(len(text) - LENGTH, (4, 1))
            words = text[at + torch.arange(LENGTH)]
            loss = model(input_ids=words, labels=words).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step}/{options.steps}  loss {loss.item():.3f}", flush=True)
        model.save_pretrained(os.path.join(folder, "adapters"))
        facts = weights.stats()
        print(
            f"{gpt.size_text(sum(param.nbytes for param in trained))} of adapters trained and "
            f"saved beside {gpt.size_text(facts['weight_bytes'])} of weights, "
            f"{gpt.size_text(facts['read_bytes'])} read, {facts['written_bytes']} bytes written"
        )
        weights.close()


if __name__ == "__main__":
    main()
