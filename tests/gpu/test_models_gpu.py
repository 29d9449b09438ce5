"""Models of transformers on a GPU: weights in their checkpoint, experts on demand, keys and values
on NVMe."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tensorferry.transformers import NvmeCache, from_pretrained, weights_of

WORDS = 300
SIZES = dict(
    vocab_size=WORDS, hidden_size=128, intermediate_size=256, num_hidden_layers=6,
    num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=4096,
    pad_token_id=0,
)  # fmt: skip


def tokens(count, batch=1):
    made = torch.Generator().manual_seed(1)
    return torch.randint(3, WORDS, (batch, count), generator=made).cuda()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_from_its_files_gives_the_same_bits(tmp_path, dtype):
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).to(dtype).save_pretrained(
        tmp_path
    )
    expected = transformers.LlamaForCausalLM.from_pretrained(tmp_path).cuda()
    limit = sum(param.nbytes for param in expected.parameters()) // 3
    model = from_pretrained(tmp_path, device="cuda", max_gpu_bytes=limit, keep_bytes=1024)
    said = [m.generate(tokens(9, 2), max_new_tokens=12, do_sample=False) for m in (model, expected)]
    assert torch.equal(*said)
    with torch.no_grad():
        assert torch.equal(model(tokens(9)).logits, expected(tokens(9)).logits)
    assert weights_of(model).stats()["written_bytes"] == 0
    weights_of(model).close()


@pytest.mark.parametrize("guess", [False, True])
def test_experts_come_one_by_one(tmp_path, guess):
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=128, num_experts=32, num_experts_per_tok=2
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    expected = transformers.Qwen3MoeForCausalLM.from_pretrained(
        tmp_path, experts_implementation="tensorferry"
    ).cuda()
    model = from_pretrained(tmp_path, device="cuda", max_gpu_bytes=8 << 20, guess_experts=guess)
    said = [m.generate(tokens(5), max_new_tokens=12, do_sample=False) for m in (model, expected)]
    assert torch.equal(*said)
    stats = weights_of(model).stats()
    assert stats["expert_bytes"] > 0 and stats["overflows"] == 0
    weights_of(model).close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_keys_and_values_on_nvme_give_the_bits_of_a_dynamic_cache(tmp_path, dtype, attention):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, attn_implementation=attention)
    model = transformers.LlamaForCausalLM(config).to(dtype).cuda().eval()
    prompt = tokens(500, 2)
    options = dict(max_new_tokens=100, do_sample=False, attention_mask=torch.ones_like(prompt))
    wanted = model.generate(prompt, past_key_values=transformers.DynamicCache(), **options)
    layer = 2 * 640 * 2 * 64 * 2 * dtype.itemsize
    with NvmeCache(config, tmp_path, max_gpu_bytes=3 * layer) as cache:
        assert torch.equal(model.generate(prompt, past_key_values=cache, **options), wanted)
        stats = cache.stats()
        assert stats["read_bytes"] > 0 and stats["resident_bytes"] <= stats["buffer_bytes"]
        cache.save(tmp_path / "saved", model, wanted)
    longer = torch.cat([wanted, prompt[:, :3]], 1)
    with NvmeCache.load(tmp_path / "saved", model, longer, tmp_path, 3 * layer) as cache:
        model.generate(longer, past_key_values=cache, max_new_tokens=3, do_sample=False)
