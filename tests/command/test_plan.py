"""tensorferry plan: the parameters of models, the bytes of a step, settings that really work."""

import json
import subprocess

import pytest
from test_results import validate
from warm_python import WARM_PYTHON

MACHINE = ("--drive-read", "4G", "--drive-write", "3G", "--memory", "64G", "--flops", "1T")


def plan(ferry, *arguments, code=0):
    """(what it said, its results)"""
    said = ferry("plan", *arguments, "--json", "plan.json", code=code)
    results = json.loads((ferry.place / "plan.json").read_text())
    validate(results)
    return said.stdout, results


def config_of(kind):
    import transformers

    small = dict(vocab_size=512, hidden_size=64, num_hidden_layers=3, num_attention_heads=4)
    gated = small | dict(intermediate_size=176, num_key_value_heads=2)
    experts = gated | dict(moe_intermediate_size=48, num_experts=8, num_experts_per_tok=2)
    return {
        "llama": lambda: transformers.LlamaConfig(**gated),
        "llama-tied": lambda: transformers.LlamaConfig(
            **gated, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=24
        ),
        "mistral": lambda: transformers.MistralConfig(**gated),
        "mixtral": lambda: transformers.MixtralConfig(**gated, num_local_experts=4),
        "qwen2": lambda: transformers.Qwen2Config(**gated),
        "qwen3": lambda: transformers.Qwen3Config(**gated, head_dim=32),
        "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
            **experts, shared_expert_intermediate_size=80
        ),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**experts, head_dim=32),
        "gpt2": lambda: transformers.GPT2Config(
            vocab_size=512, n_embd=64, n_layer=3, n_head=4, n_positions=128
        ),
        "t5": lambda: transformers.T5Config(
            vocab_size=512, d_model=64, d_kv=16, d_ff=128, num_layers=3, num_heads=4
        ),
        "t5-gated": lambda: transformers.T5Config(
            vocab_size=512,
            d_model=64,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_decoder_layers=3,
            num_heads=4,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
        ),
    }[kind]()


KINDS = "llama llama-tied mistral mixtral qwen2 qwen3 qwen2_moe qwen3_moe gpt2 t5 t5-gated"


@pytest.mark.parametrize("kind", KINDS.split())
def test_parameters_are_counted_as_transformers_builds_them(ferry, kind):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = config_of(kind)
    config.save_pretrained(ferry.place)
    causal = transformers.AutoModelForCausalLM
    maker = transformers.AutoModelForSeq2SeqLM if kind.startswith("t5") else causal
    with torch.device("meta"):
        model = maker.from_config(config)
    _, results = plan(ferry, "--model", "config.json", *MACHINE)
    assert results["settings"]["task"]["parameters"] == sum(p.numel() for p in model.parameters())


def test_an_unknown_architecture_is_an_error_with_a_way_out(ferry):
    (ferry.place / "config.json").write_text('{"model_type": "whisper"}')
    said = ferry("plan", "--model", "config.json", *MACHINE, code=1)
    assert "whisper" in said.stderr and "--parameters" in said.stderr and "llama" in said.stderr


def test_the_choices_are_beside_each_other_and_say_what_goes_where(ferry):
    said, results = plan(ferry, "--parameters", "2B", "--tokens-per-step", "4K", *MACHINE)
    assert [choice["name"] for choice in results["choices"]] == [
        "fastest",
        "balance",
        "least memory",
    ]
    for word in ("fastest", "weights", "moments", "activations", "limit", "one more drive"):
        assert word in said, word
    fastest, balance, least = results["choices"]
    assert fastest["memory_bytes"] >= balance["memory_bytes"] >= least["memory_bytes"]
    for choice in results["choices"]:
        together = sum(place["drive_bytes"] for place in choice["places"])
        assert choice["drive_bytes"] == pytest.approx(together, rel=1e-6)


def run_lines(ferry, lines, model, loss="model(x).float().square().mean()"):
    """Runs lines that the plan printed, and three steps. Returns what was printed."""
    program = f"""
import torch, tensorferry
{model}
{lines}
x = torch.ones(4, 64, dtype=next(model.parameters()).dtype)
for step in range(3):
    {loss}.backward()
    optimizer.step()
    optimizer.zero_grad()
print("stepped", next(model.parameters()).dtype)
"""
    done = subprocess.run(
        [*WARM_PYTHON, "-c", program],
        cwd=ferry.place,
        env=ferry.env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{lines}\n{done.stderr}"
    return done.stdout


SMALL = "model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))"


def lines_in(said):
    """The lines of Python after the settings' head."""
    part = said[said.index(": the lines that set it up\n") :].splitlines()[1:]
    return "\n".join(part[: part.index("")] if "" in part else part)


@pytest.mark.parametrize(
    "options",
    [
        ("--dtype", "bf16"),
        ("--dtype", "fp32", "--weights", "drive", "--weight-bytes", "1M"),
        ("--dtype", "bf16", "--moments", "int8", "--gradients", "drive", "--weights", "memory"),
        ("--dtype", "fp16", "--optimizer", "sgd", "--buffer-count", "3", "--max-cpu-bytes", "0"),
        ("--dtype", "fp32", "--optimizer", "adam", "--buffer-bytes", "16M", "--separate"),
    ],
)
def test_the_lines_that_it_prints_run(ferry, options):
    pytest.importorskip("torch")
    said, _ = plan(ferry, "--parameters", "16640", "--nvme-path", ".", *options, *MACHINE)
    done = run_lines(ferry, lines_in(said), SMALL)
    assert "stepped" in done, said


@pytest.mark.parametrize(
    "options",
    [
        ("--dtype", "bf16", "--weights", "memory", "--gradients", "memory"),
        ("--dtype", "fp32", "--weights", "drive", "--gradients", "drive"),
        ("--dtype", "fp32", "--optimizer", "sgd", "--weights", "memory", "--gradients", "memory"),
    ],
)
def test_initialize_takes_the_configuration(ferry, options):
    pytest.importorskip("torch")
    said, results = plan(
        ferry,
        *("--parameters", "16640", "--nvme-path", ".", "--write-config", "ds_config.json"),
        *("--accumulation", "1", *options, *MACHINE),
    )
    (line,) = [line for line in said.splitlines() if "tensorferry.initialize(" in line]
    loss = "loss = model(x).float().square().mean(); optimizer"
    done = run_lines(
        ferry, line, SMALL, loss.replace("; optimizer", "; optimizer.backward(loss) #")
    )
    assert "stepped" in done
    config = json.loads((ferry.place / "ds_config.json").read_text())
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "nvme"


def test_experts_in_some_layers_only_are_counted_as_transformers_builds_them(ferry):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = config_of("qwen3_moe")
    config.decoder_sparse_step, config.mlp_only_layers = 1, [1]
    config.save_pretrained(ferry.place)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    _, results = plan(ferry, "--model", "config.json", *MACHINE)
    assert results["settings"]["task"]["parameters"] == sum(p.numel() for p in model.parameters())


def test_a_model_that_fits_nowhere_says_by_how_much(ferry):
    said, results = plan(
        ferry,
        *("--parameters", "70B", "--drive-read", "4G", "--drive-write", "3G", "--memory", "16G"),
        *("--drive-size", "100G"),
        code=1,
    )
    (choice,) = results["choices"]
    for shortage in choice["shortages"]:
        missing = (shortage["needed_bytes"] - shortage["there_bytes"]) / 2**30
        assert shortage["needed_bytes"] > shortage["there_bytes"]
        assert f"{shortage['place']}: " in said and "are missing" in said
        assert f"{missing:.1f} GiB" in said or f"{missing / 1024:.1f} TiB" in said
    assert choice["shortages"]


def test_without_drives_everything_must_be_in_memory(ferry):
    said, results = plan(ferry, "--parameters", "1B", "--drives", "0", "--memory", "64G")
    assert "without a drive" in said and results["choices"][0]["drive_bytes"] == 0
    said, _ = plan(ferry, "--parameters", "70B", "--drives", "0", "--memory", "64G", code=1)
    assert "memory of a node" in said and "are missing" in said
    assert "one more drive" not in said, "nobody said how fast it would be"
    speeds = ("--drive-read", "4G", "--drive-write", "3G")
    said, _ = plan(
        ferry, "--parameters", "70B", "--drives", "0", "--memory", "256G", *speeds, code=1
    )
    assert "one more drive" in said


@pytest.mark.parametrize("flag", ["--weights", "--gradients", "--activations"])
def test_without_drives_nothing_can_be_on_one(ferry, flag):
    done = ferry("plan", "--parameters", "1B", "--drives", "0", flag, "drive", code=2)
    assert f"{flag} drive needs a drive" in done.stderr


MODEL = ("--parameters", "7B")


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((), "--parameters or --model"),
        (("--parameters", "7X"), "70B"),
        (("--parameters", "0"), "must not be 0"),
        (("--parameters", "-3"), "not a number"),
        (("--parameters", "1e300"), "more than 1e18"),
        (("--parameters", "1e308P"), "not a number"),
        (("--parameters", "9000T"), "no model has more"),
        ((*MODEL, "--tokens-per-step", "nan"), "not a number"),
        ((*MODEL, "--dtype", "int4"), "bf16, fp16 or fp32"),
        ((*MODEL, "--memory", "0"), "512G"),
        ((*MODEL, "--ranks", "0"), "not in range"),
        ((*MODEL, "--buffer-count", "0"), "not in range"),
        ((*MODEL, "--buffer-count", "4K"), "not in range"),
        ((*MODEL, "--buffer-bytes", "0"), "must not be 0"),
        ((*MODEL, "--model", "config.json"), "excludes"),
        (("--model", "config.json", "--layers", "3"), "needs --parameters"),
        ((*MODEL, "--batch", "3"), "needs --inference"),
        ((*MODEL, "--moments", "int8", "--optimizer", "sgd"), "needs adamw or adam"),
        ((*MODEL, "--max-gpu-bytes", "1G"), "--gpu-memory"),
        ((*MODEL, "--inference", "--write-config", "ds_config.json"), "does not train"),
        ((*MODEL, "--drives", "0", "--write-config", "ds_config.json"), "needs a drive"),
    ],
)
def test_wrong_usage_says_what_is_wrong(ferry, arguments, words):
    assert words in ferry("plan", *arguments, code=2).stderr


@pytest.mark.parametrize(
    "arguments, words",
    [
        (MODEL, "--drive-read"),
        ((*MODEL, "--drive-read", "7G"), "--drive-write"),
        ((*MODEL, "--profile", "nowhere"), "nowhere"),
        ((*MODEL, "--costs", "nowhere.json", *MACHINE), "nowhere.json"),
        ((*MODEL, "--json", "nowhere/plan.json", *MACHINE), "nowhere"),
        (("--model", "nowhere.json", *MACHINE), "nowhere.json"),
        (("--model", ".", *MACHINE), "regular file"),
    ],
)
def test_what_is_missing_is_named(ferry, arguments, words):
    assert words in ferry("plan", *arguments, code=1).stderr


LLAMA = dict(model_type="llama", vocab_size=32000, hidden_size=2048, num_hidden_layers=16)
LLAMA |= dict(intermediate_size=5632, num_attention_heads=16)


@pytest.mark.parametrize(
    "config, words",
    [
        ("", "parse error"),
        ("[]", "model_type"),
        ("null", "model_type"),
        ('{"model_type": "llama", "vocab_size": NaN}', "parse error"),
        ('{"model_type": "llama"}', "hidden_size is missing"),
        (LLAMA | {"vocab_size": "many"}, "vocab_size is"),
        (LLAMA | {"vocab_size": -5}, "vocab_size is -5"),
        (LLAMA | {"vocab_size": 1e30}, "vocab_size is 1e+30"),
        (LLAMA | {"vocab_size": {}}, "vocab_size is {}"),
        (LLAMA | {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        (LLAMA | {"num_hidden_layers": 1.5}, "num_hidden_layers is 1.5"),
        (LLAMA | {"intermediate_size": 10**9, "num_hidden_layers": 10**9}, "no model has that"),
    ],
)
def test_a_hostile_model_is_refused_by_the_key_that_is_wrong(ferry, config, words):
    text = config if isinstance(config, str) else json.dumps(config)
    (ferry.place / "config.json").write_text(text)
    done = ferry("plan", "--model", "config.json", *MACHINE, code=1)
    assert "config.json" in done.stderr and words in done.stderr and not done.stdout


def test_costs_of_a_file_are_taken_and_others_refused(ferry):
    base = ("--parameters", "1B", "--max-cpu-bytes", "0", "--weights", "memory", *MACHINE)
    (ferry.place / "costs.json").write_text('{"adam_seconds": 1e-6}')
    _, results = plan(ferry, *base, "--costs", "costs.json")
    assert results["choices"][0]["stepping_seconds"] > 1000
    (ferry.place / "costs.json").write_text('{"adam": 1}')
    done = ferry("plan", *base, "--costs", "costs.json", code=1)
    assert "adam is no cost" in done.stderr
    for text in ('{"copy_both": 0}', '{"adam_seconds": -1}', '{"adam_seconds": "fast"}'):
        (ferry.place / "costs.json").write_text(text)
        assert "must be a number" in ferry("plan", *base, "--costs", "costs.json", code=1).stderr


def test_inference_reads_experts_that_are_chosen(ferry):
    mixtral = dict(model_type="mixtral", vocab_size=32000, hidden_size=4096, num_hidden_layers=32)
    mixtral |= dict(intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
    mixtral |= dict(num_local_experts=8, num_experts_per_tok=2)
    (ferry.place / "config.json").write_text(json.dumps(mixtral))
    run = ("--model", "config.json", "--inference", "--weights", "drive", "--weight-bytes", "8G")
    _, one = plan(ferry, *run, *MACHINE)
    _, many = plan(ferry, *run, "--batch", "64", *MACHINE)
    assert one["settings"]["task"]["parameters"] == 46_702_792_704
    # Two of eight experts of each layer, and all that is no expert.
    ratio = one["choices"][0]["pass_read_bytes"] / many["choices"][0]["pass_read_bytes"]
    assert 0.25 < ratio < 0.32
    assert one["choices"][0]["tokens_per_second"] > 0
