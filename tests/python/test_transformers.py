"""Models of Hugging Face transformers, made from a config, with their weights on NVMe."""

import contextlib

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import tensorferry.offload
import tensorferry.optim

WORDS = 500

pytestmark = pytest.mark.usefixtures("one_thread")


def llama(**options):
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **options,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2(**options):
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_positions=128,
        n_embd=128,
        n_layer=4,
        n_head=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **options,
    )
    return transformers.GPT2LMHeadModel(config)


MODELS = {
    "llama": llama,
    "llama, tied": lambda: llama(tie_word_embeddings=True),
    "gpt2": gpt2,
    "gpt2, plain attention": lambda: gpt2(attn_implementation="eager"),
}
EVERY_MODEL = pytest.mark.parametrize("name", MODELS)


def make(name):
    torch.manual_seed(0)
    return MODELS[name]()


@contextlib.contextmanager
def offloaded(model, path, **options):
    """With a third of the weights in memory."""
    limit = sum(param.nbytes for param in model.parameters()) // 3
    weights = tensorferry.offload.parameters(model, path, limit, keep_bytes=1024, **options)
    yield weights
    stats = weights.stats()
    assert stats["weight_bytes"] > 2.9 * limit
    assert stats["resident_bytes"] <= max(limit, stats["buffer_bytes"])
    weights.close()


def tokens(seed, *shape):
    return torch.randint(3, WORDS, shape, generator=torch.Generator().manual_seed(seed))


@EVERY_MODEL
def test_forward_gives_the_same_bits(tmp_path, name):
    model, other = make(name).eval(), make(name).eval()
    with offloaded(model, tmp_path), torch.no_grad():
        for seed in range(3):
            words = tokens(seed, 2, 17)
            mine, wanted = (one(words, labels=words) for one in (model, other))
            assert torch.equal(mine.logits, wanted.logits)
            assert torch.equal(mine.loss, wanted.loss)


@EVERY_MODEL
@pytest.mark.parametrize(
    "way",
    [
        {"do_sample": False},
        {"do_sample": True, "temperature": 1.5, "top_k": 40},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": False, "use_cache": False},
    ],
    ids=["greedy", "sampled", "beams", "no cache"],
)
def test_generate_gives_the_same_tokens(tmp_path, name, way):
    model, other = make(name).eval(), make(name).eval()
    prompt = tokens(5, 2, 7)
    mask = torch.ones_like(prompt)
    mask[0, :3] = 0
    said = []
    with offloaded(model, tmp_path) as weights:
        written = weights.stats()["written_bytes"]
        for one in (model, other):
            torch.manual_seed(3)
            said.append(one.generate(prompt, attention_mask=mask, max_new_tokens=20, **way))
        assert weights.stats()["written_bytes"] == written
    assert said[0].shape[1] > 7
    assert torch.equal(*said)


@EVERY_MODEL
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["", "checkpoint", "reentrant"])
@pytest.mark.parametrize("offload_gradients", [False, True])
def test_five_steps_of_training_give_the_same_losses(
    tmp_path, name, checkpointing, offload_gradients
):
    def train(model, optimizer):
        torch.manual_seed(1)  # for dropout
        if checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.train()
        losses = []
        for step in range(5):
            words = tokens(step, 2, 12)
            loss = model(words, labels=words).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model, other = make(name), make(name)
    expected = train(other, torch.optim.AdamW(other.parameters(), lr=1e-3, fused=True))
    with offloaded(model, tmp_path):
        optimizer = tensorferry.optim.AdamW(
            model.parameters(),
            lr=1e-3,
            nvme_path=tmp_path,
            offload_gradients=offload_gradients,
            buffer_bytes=1 << 20,
        )
        assert train(model, optimizer) == expected
        optimizer.close()
    assert expected[-1] != expected[0]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_saved_weights_are_those_of_the_model(tmp_path, name):
    model, other = make(name), make(name)
    with offloaded(model, tmp_path):
        model.save_pretrained(tmp_path / "saved")
    loaded = type(model).from_pretrained(tmp_path / "saved").eval()
    words = tokens(9, 1, 5)
    assert torch.equal(loaded(words).logits, other.eval()(words).logits)


def test_a_model_without_memory_starts_as_transformers_says(tmp_path):
    with torch.device("meta"):
        model = make("gpt2")
    with offloaded(model, tmp_path, initialize=model._init_weights) as weights, torch.no_grad():
        state = model.state_dict()
        assert all(values.isfinite().all() for values in state.values())
        assert 0.015 < state["transformer.wte.weight"].std() < 0.025
        with weights.gather(model.transformer.h[1].ln_1) as norm:
            assert norm.weight.eq(1).all() and norm.bias.eq(0).all()
        assert model(tokens(1, 1, 9)).logits.isfinite().all()


@pytest.mark.parametrize("weights_too", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_trainer_clips_gradients_on_the_drive(tmp_path, weights_too, accumulate):
    """With its default max_grad_norm, against the same run in memory."""
    pytest.importorskip("accelerate")

    def train(model, optimizer):
        arguments = transformers.TrainingArguments(
            output_dir=tmp_path / "trainer",
            use_cpu=True,
            max_steps=5,
            logging_steps=1,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=accumulate,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=3,
        )
        assert arguments.max_grad_norm == 1.0
        words = tokens(1, 40, 12)
        trainer = transformers.Trainer(
            model,
            arguments,
            optimizers=(optimizer, None),
            train_dataset=[{"input_ids": row, "labels": row} for row in words],
        )
        trainer.train()
        return [(e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "loss" in e]

    model, other = make("llama"), make("llama")
    for one in (model, other):
        with torch.no_grad():  # so that there is something to clip
            one.lm_head.weight.mul_(20)
    expected = train(other, torch.optim.AdamW(other.parameters(), lr=1e-3, fused=True))
    with offloaded(model, tmp_path) if weights_too else contextlib.nullcontext():
        optimizer = tensorferry.optim.AdamW(
            model.parameters(),
            lr=1e-3,
            nvme_path=tmp_path,
            offload_gradients=True,
            buffer_bytes=1 << 20,
        )
        assert train(model, optimizer) == expected
        mine, wanted = model.state_dict(), other.state_dict()
        assert all(torch.equal(mine[name], wanted[name]) for name in wanted)
        optimizer.close()
    assert len(expected) == 5 and all(norm > 1.0 for _, norm in expected)
