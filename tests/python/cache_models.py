"""A small model with a long context, for the tests of NvmeCache."""

import torch
import transformers

WORDS, LAYERS, HEADS, WIDTH = 120, 6, 2, 16
TOKEN_BYTES = HEADS * WIDTH * 4 * 2  # of one layer
SIZES = dict(
    vocab_size=WORDS, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS,
    num_attention_heads=4, num_key_value_heads=HEADS, head_dim=WIDTH, max_position_embeddings=4096,
    pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip


def llama(seed=0, **options):
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **options)).eval()


def tokens(count, batch=1, seed=1):
    made = torch.Generator().manual_seed(seed)
    return torch.randint(3, WORDS, (batch, count), generator=made)


def layers(count, length, batch=1):
    """The bytes of so many layers of a length."""
    return count * batch * (-(-length * 17 // 16 // 64) + 1) * 64 * TOKEN_BYTES


def said(model, cache, given, **options):
    options = dict(max_new_tokens=20, do_sample=False) | options
    mask = torch.ones_like(given)
    return model.generate(given, attention_mask=mask, past_key_values=cache, **options)
