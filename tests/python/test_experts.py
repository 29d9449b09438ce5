"""Experts on demand: of the fused weights of a model's experts, only those that the router has
chosen are read."""

import contextlib

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tensorferry.transformers import from_pretrained, weights_of

WORDS, WIDTH, INNER, LAYERS, EXPERTS, CHOSEN = 200, 64, 64, 2, 64, 2
EXPERT_BYTES = 3 * WIDTH * INNER * 4
PAGES = 3 * 2 * 4096  # what reads of whole pages may take besides, of the tensors of an expert

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("experts")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=WORDS, hidden_size=WIDTH, moe_intermediate_size=INNER, intermediate_size=128,
        num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_experts=EXPERTS, num_experts_per_tok=CHOSEN,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(path, max_shard_size="1MB")
    return path


def in_memory(folder):
    return transformers.Qwen3MoeForCausalLM.from_pretrained(
        folder, experts_implementation="tensorferry"
    )


@contextlib.contextmanager
def on_demand(folder, experts=24, **options):
    """With memory for all layers and so many experts."""
    model = from_pretrained(folder, 512 * 1024 + experts * 72 * 1024, **options)
    yield model
    stats = weights_of(model).stats()
    assert stats["written_bytes"] == 0 and stats["overflows"] == 0
    assert stats["resident_bytes"] <= stats["buffer_bytes"]
    weights_of(model).close()


def tokens(count, seed=1):
    return torch.randint(WORDS, (1, count), generator=torch.Generator().manual_seed(seed))


def spent(model, given, **more):
    """What one pass reads, and the bytes of the experts that it uses: in (read, used, chosen)."""
    chosen = []
    routers = [layer.mlp.gate for layer in model.model.layers]
    hooks = [
        router.register_forward_hook(lambda _, __, out: chosen.append(out[-1].unique().numel()))
        for router in routers
    ]
    before = weights_of(model).stats()
    with torch.no_grad():
        model(given, **more)
    for hook in hooks:
        hook.remove()
    after = weights_of(model).stats()
    return (*(after[n] - before[n] for n in ("read_bytes", "expert_bytes")), sum(chosen))


@pytest.mark.parametrize("guess", [False, True])
def test_bits_are_those_of_the_same_implementation_in_memory(folder, guess):
    expected = in_memory(folder)
    with on_demand(folder, guess_experts=guess) as model, torch.no_grad():
        for seed in range(3):
            words = tokens(7, seed)
            assert torch.equal(model(words).logits, expected(words).logits)
        said = [
            m.generate(tokens(5), max_new_tokens=12, do_sample=False) for m in (model, expected)
        ]
        assert torch.equal(*said)


def test_a_token_reads_no_more_than_what_it_uses(folder):
    with on_demand(folder) as model:
        spent(model, tokens(1))  # the layers come, too, and stay
        for seed in range(2, 8):
            read, used, chosen = spent(model, tokens(1, seed))
            assert chosen == LAYERS * CHOSEN and used == chosen * EXPERT_BYTES
            assert read <= used + chosen * PAGES
        stats = weights_of(model).stats()
        assert stats["wasted_bytes"] == 0 and stats["misses"] > stats["hits"] / 3


def test_a_prompt_reads_each_expert_once(folder):
    with on_demand(folder, experts=4) as model:
        spent(model, tokens(1))
        read, used, chosen = spent(model, tokens(60))
        assert chosen > EXPERTS and used == chosen * EXPERT_BYTES
        assert read <= used + chosen * PAGES + (1 << 20)  # layers may have to give way


def test_experts_in_memory_are_not_read_again(folder):
    with on_demand(folder) as model:
        spent(model, tokens(1))
        spent(model, tokens(1))
        assert spent(model, tokens(1))[0] == 0


def test_guessing_reads_the_experts_of_the_last_token_and_counts_what_was_in_vain(folder):
    with on_demand(folder, experts=-1, guess_experts=True) as model:
        total = [spent(model, tokens(1, seed)) for seed in range(12)]
        stats = weights_of(model).stats()
        assert stats["wasted_bytes"] > 0
        layers = stats["weight_bytes"] - LAYERS * EXPERTS * EXPERT_BYTES
        read, used = (sum(column) for column in list(zip(*total))[:2])
        # Whatever was read was used, or wasted, or waits in memory.
        rounding = sum(chosen for *_, chosen in total) * 2 * PAGES
        assert read <= used + stats["wasted_bytes"] + stats["resident_bytes"] + layers + rounding
    with on_demand(folder, experts=-1, guess_experts=True) as model:
        same = [spent(model, tokens(1)) for _ in range(6)]
        assert weights_of(model).stats()["wasted_bytes"] == 0  # the guess is right
        assert same[-1][0] <= same[-1][1] + PAGES * LAYERS * CHOSEN


def test_no_tokens_are_no_error(folder):
    with on_demand(folder) as model, torch.no_grad():
        for one in (model, in_memory(folder)):
            experts = one.model.layers[0].mlp.experts
            nothing = torch.empty(0, WIDTH)
            found = experts(nothing, torch.empty(0, CHOSEN, dtype=torch.int64), nothing[:, :CHOSEN])
            assert found.shape == (0, WIDTH)


def test_another_implementation_gets_all_experts(folder):
    expected = transformers.Qwen3MoeForCausalLM.from_pretrained(folder)
    model = from_pretrained(folder, 64 << 20)
    model.set_experts_implementation("eager")
    expected.set_experts_implementation("eager")
    with torch.no_grad():
        assert torch.equal(model(tokens(4)).logits, expected(tokens(4)).logits)
    weights_of(model).close()
    with on_demand(folder, experts=200, experts_implementation="batched_mm") as model:
        expected.set_experts_implementation("batched_mm")
        with torch.no_grad():
            assert torch.equal(model(tokens(4)).logits, expected(tokens(4)).logits)
        assert weights_of(model).stats()["expert_bytes"] == 0


def test_the_weights_are_there_as_a_whole(folder):
    expected = in_memory(folder)
    model = from_pretrained(folder, 1 << 20)
    weights = weights_of(model)
    wanted = expected.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
    experts, others = model.model.layers[1].mlp.experts, expected.model.layers[1].mlp.experts
    assert experts.down_proj.isnan().all()
    with weights.gather(experts):
        assert torch.equal(experts.down_proj, others.down_proj)
    weights.close(restore=True)
    with torch.no_grad():
        assert torch.equal(model(tokens(6)).logits, expected(tokens(6)).logits)


def test_gradients_pass_through_frozen_experts(folder):
    found = []
    with on_demand(folder, experts=6) as model:
        for one in (model, in_memory(folder)):
            one.requires_grad_(False)
            given = one.get_input_embeddings()(tokens(9)).clone().requires_grad_()
            one(inputs_embeds=given).logits.square().mean().backward()
            found.append(given.grad)
        assert torch.equal(*found) and found[0].abs().sum() > 0
        model.model.layers[1].mlp.experts.gate_up_proj.requires_grad_()
        with pytest.raises(RuntimeError, match=r"layers.1.mlp.experts.gate_up_proj\[\d+\] cannot"):
            model(tokens(3)).logits.mean().backward()


def test_a_bias_and_transposed_weights(tmp_path):
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=16,
        num_experts_per_tok=2,
    )  # fmt: skip
    transformers.GptOssForCausalLM(config).save_pretrained(tmp_path)
    expected = transformers.GptOssForCausalLM.from_pretrained(
        tmp_path, experts_implementation="tensorferry"
    )
    for keep_bytes in (64 << 10, 0):  # the biases stay in memory, or come with the others
        with on_demand(tmp_path, experts=8, keep_bytes=keep_bytes) as model, torch.no_grad():
            assert torch.equal(model(tokens(7)).logits, expected(tokens(7)).logits)
            assert weights_of(model).stats()["expert_bytes"] > 0


def test_compiled_models_bring_experts_between_graphs(folder):
    with on_demand(folder) as model, torch.no_grad():
        expected = model(tokens(5)).logits
        compiled = torch.compile(model, backend="eager")
        for _ in range(2):
            assert torch.equal(compiled(tokens(5)).logits, expected)


def test_experts_over_several_devices_are_refused(folder):
    model = in_memory(folder)
    model.model.layers[0].mlp.experts._is_expert_parallel = True
    with pytest.raises(ValueError, match="does not spread experts over several devices"):
        model(tokens(2))
