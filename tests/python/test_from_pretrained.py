"""tensorferry.transformers.from_pretrained: models that run from their checkpoint as it lies, made
from configurations and saved by transformers."""

import contextlib
import copy
import logging
import os
import pickle
import threading

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tensorferry.transformers import from_pretrained, weights_of

WORDS = 300
LAYERS = dict(num_hidden_layers=2, num_attention_heads=4, hidden_size=64, intermediate_size=128)
GROUPED = LAYERS | dict(num_key_value_heads=2, head_dim=16, vocab_size=WORDS)
EXPERTS = GROUPED | dict(moe_intermediate_size=96, num_experts=8, num_experts_per_tok=2)

pytestmark = pytest.mark.usefixtures("one_thread")


def seq2seq():
    return transformers.T5Config(
        d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=WORDS,
        decoder_start_token_id=0,
    )  # fmt: skip


def whisper():
    return transformers.WhisperConfig(
        d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, num_mel_bins=16,
        max_source_positions=50, max_target_positions=40, vocab_size=WORDS, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=3, suppress_tokens=None,
        begin_suppress_tokens=None,
    )  # fmt: skip


def seeing():
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    vision = dict(
        depth=2, hidden_size=64, intermediate_size=128, num_heads=4, out_hidden_size=64,
        deepstack_visual_indexes=[0],
    )  # fmt: skip
    return transformers.Qwen3VLMoeConfig(
        text_config=EXPERTS | {"rope_parameters": rope}, vision_config=vision
    )


# The conversions of transformers: none, names, stacks of experts, halves of a tensor, transposes.
MODELS = {
    "LlamaForCausalLM": lambda: transformers.LlamaConfig(**GROUPED),
    "LlamaForCausalLM, tied": lambda: transformers.LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "GPT2LMHeadModel": lambda: transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, n_positions=64, vocab_size=WORDS
    ),
    "Qwen2MoeForCausalLM": lambda: transformers.Qwen2MoeConfig(
        **EXPERTS, shared_expert_intermediate_size=96
    ),
    "MixtralForCausalLM": lambda: transformers.MixtralConfig(**GROUPED, num_local_experts=4),
    "GptOssForCausalLM": lambda: transformers.GptOssConfig(
        **GROUPED | {"intermediate_size": 64}, num_local_experts=4, num_experts_per_tok=2
    ),
    "Gemma2ForCausalLM": lambda: transformers.Gemma2Config(**GROUPED),
    "MambaForCausalLM": lambda: transformers.MambaConfig(
        hidden_size=64, num_hidden_layers=2, state_size=8, vocab_size=WORDS
    ),
    "T5ForConditionalGeneration": seq2seq,
    "WhisperForConditionalGeneration": whisper,
    "Qwen3VLMoeForConditionalGeneration": seeing,
    "ViTForImageClassification": lambda: transformers.ViTConfig(
        **LAYERS, image_size=32, patch_size=8
    ),
    "Dinov2Model": lambda: transformers.Dinov2Config(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        use_swiglu_ffn=True,
    ),  # fmt: skip
}


def inputs(model):
    torch.manual_seed(4)
    tokens = torch.randint(3, WORDS, (2, 9))
    pixels = torch.randn(2, 3, 32, 32)
    name = type(model).__name__
    if name.startswith(("ViT", "Dino")):
        return {"pixel_values": pixels}
    if name.startswith("Whisper"):
        return {"input_features": torch.randn(2, 16, 100), "decoder_input_ids": tokens}
    return {"input_ids": tokens} | ({"decoder_input_ids": tokens} if "T5" in name else {})


def saved(name, path, dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = getattr(transformers, name.partition(",")[0])(MODELS[name]()).to(dtype)
    model.save_pretrained(path, **options)
    return type(model)


@contextlib.contextmanager
def both(name, path, share=3, **options):
    """The model in memory, and from its files with a share of the memory."""
    expected = getattr(transformers, name.partition(",")[0]).from_pretrained(path, **options)
    limit = sum(param.nbytes for param in expected.parameters()) // share
    model = from_pretrained(path, limit, keep_bytes=256, **options)
    yield model, expected
    stats = weights_of(model).stats()
    assert stats["written_bytes"] == 0 and stats["overflows"] == 0
    weights_of(model).close()


def first(output):
    return output[0] if isinstance(output[0], torch.Tensor) else output.logits


def compare(model, expected):
    assert type(model) is type(expected) and not model.training
    assert {n: p.dtype for n, p in model.named_parameters()} == {
        n: p.dtype for n, p in expected.named_parameters()
    }
    given = inputs(expected)
    with torch.no_grad():
        wanted = first(expected(**given))
        for _ in range(3):
            assert torch.equal(first(model(**given)), wanted)
    if expected.can_generate():
        source = given["input_ids"] if "input_ids" in given else given["input_features"]
        said = [
            one.generate(source, max_new_tokens=6, do_sample=False) for one in (model, expected)
        ]
        assert torch.equal(*said)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_the_same_bits(tmp_path, name):
    saved(name, tmp_path, max_shard_size="100KB")
    with both(name, tmp_path) as (model, expected):
        compare(model, expected)


@pytest.mark.parametrize("name", ["LlamaForCausalLM, tied", "Qwen2MoeForCausalLM"])
def test_dtypes_are_those_of_transformers(tmp_path, name):
    saved(name, tmp_path, torch.bfloat16)
    for dtype in (None, "auto", torch.float32, "bfloat16", torch.float16):
        with both(name, tmp_path, **({} if dtype is None else {"dtype": dtype})) as pair:
            compare(*pair)


def test_experts_are_read_once_for_each_pass(tmp_path):
    saved("MixtralForCausalLM", tmp_path)
    with both("MixtralForCausalLM", tmp_path, share=2) as (model, expected):
        weights = weights_of(model)
        for _ in range(3):
            before = weights.stats()["read_bytes"]
            with torch.no_grad():
                model(**inputs(expected))
        assert weights.stats()["read_bytes"] - before <= weights.stats()["weight_bytes"]


def test_halves_of_a_tensor_are_read_by_themselves(tmp_path):
    saved("Dinov2Model", tmp_path)
    model = from_pretrained(tmp_path, 1, keep_bytes=0)
    weights = weights_of(model)
    before = weights.stats()["read_bytes"]
    with torch.no_grad():
        model(torch.randn(1, 3, 32, 32))
    assert weights.stats()["read_bytes"] - before <= weights.stats()["weight_bytes"]
    weights.close()


def test_options_of_transformers_are_heard(tmp_path):
    kind = saved("LlamaForCausalLM", tmp_path)
    with both("LlamaForCausalLM", tmp_path, attn_implementation="eager") as (model, expected):
        assert model.config._attn_implementation == "eager"
        compare(model, expected)
    auto = from_pretrained(tmp_path, model_class=transformers.AutoModelForCausalLM)
    assert type(auto) is kind
    base = from_pretrained(tmp_path, model_class=transformers.AutoModel, units=())
    assert type(base) is transformers.LlamaModel
    for model in (auto, base):
        weights_of(model).close()


def test_the_model_can_be_saved_and_brought_into_memory(tmp_path):
    kind = saved("Qwen2MoeForCausalLM", tmp_path / "one")
    expected = kind.from_pretrained(tmp_path / "one")
    model = from_pretrained(tmp_path / "one", 100_000)
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected.state_dict()[name]), name
    model.save_pretrained(tmp_path / "two")
    compare(kind.from_pretrained(tmp_path / "two"), expected)
    with pytest.raises(TypeError, match="NVMe cannot be copied"):
        copy.deepcopy(model)
    weights_of(model).close(restore=True)
    compare(model, expected)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        compare(again, expected)
        with pytest.raises(ValueError, match="does not come from"):
            weights_of(again)


def test_transformers_itself_goes_on(tmp_path):
    saved("LlamaForCausalLM", tmp_path)
    model = from_pretrained(tmp_path)
    found = []

    def load():
        found.append(transformers.LlamaForCausalLM.from_pretrained(tmp_path))

    thread = threading.Thread(target=load)
    thread.start()
    load()
    thread.join()
    for other in found:
        assert not hasattr(other, "weights_on_drive")
        assert not any(param.isnan().any() for param in other.parameters())
    with pytest.raises(ValueError, match="does not come from"):
        weights_of(found[0])
    weights_of(model).close()


def test_what_is_missing_is_an_error_and_what_is_extra_a_warning(tmp_path, caplog):
    from safetensors.torch import load_file, save_file

    saved("LlamaForCausalLM", tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    state["more"] = torch.ones(3)
    save_file(state, file, {"format": "pt"})
    with caplog.at_level(logging.WARNING, "tensorferry"):
        weights_of(from_pretrained(tmp_path)).close()
    assert "tensors of the checkpoint: more" in caplog.text
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks model.layers.1.mlp.up_proj.weight"):
        from_pretrained(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="lacks"):
        from_pretrained(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_not_supported_is_refused(tmp_path):
    saved("LlamaForCausalLM", tmp_path)
    with pytest.raises(ValueError, match="device_map= is not supported here: pass device="):
        from_pretrained(tmp_path, device_map="auto")
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    for method in ("bitnet", "gptq"):  # for the latter transformers would ask for a package
        config.quantization_config = {"quant_method": method, "bits": 4}
        config.save_pretrained(tmp_path)
        for model_class in (None, transformers.LlamaForCausalLM):
            with pytest.raises(
                ValueError, match=rf"is quantized \({method}\).*transformers itself"
            ):
                from_pretrained(tmp_path, model_class=model_class)
    del config.quantization_config
    config.architectures = ["NoSuchModel"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="NoSuchModel.*pass model_class="):
        from_pretrained(tmp_path)
