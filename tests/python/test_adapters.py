"""Adapters of peft on weights that stay in their checkpoint: the numbers of the same training with
the weights in memory, with each trainer that people use."""

import contextlib

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

import tensorferry.optim
from tensorferry.transformers import from_pretrained, save_merged, weights_of

WORDS, STEPS = 200, 4

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=160, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path, max_shard_size="200KB")
    return path


def with_adapters(model):
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, config)


def adapters(model):
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def batches(count=STEPS):
    made = torch.Generator().manual_seed(2)
    return [torch.randint(3, WORDS, (2, 10), generator=made) for _ in range(count)]


@contextlib.contextmanager
def both(folder):
    """The model with its weights in the files, and in memory, with the same new adapters."""
    model = from_pretrained(folder, 160 << 10, keep_bytes=512)
    expected = transformers.LlamaForCausalLM.from_pretrained(folder)
    weights = weights_of(model)
    yield with_adapters(model), with_adapters(expected)
    stats = weights.stats()
    assert stats["written_bytes"] == 0 and stats["read_bytes"] > 2 * stats["weight_bytes"]
    weights.close()


def compare(model, expected):
    mine, wanted = adapters(model), adapters(expected)
    assert mine.keys() == wanted.keys()
    assert all(torch.equal(mine[name], wanted[name]) for name in wanted)
    assert any(value.abs().sum() > 0 for name, value in mine.items() if "lora_B" in name)


def trained(model, optimizer):
    model.train()
    losses = []
    for words in batches():
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["", "checkpoint", "reentrant"])
@pytest.mark.parametrize("ours", [False, True], ids=["torch", "tensorferry"])
def test_adapters_train_on_weights_in_files(tmp_path, folder, ours, checkpointing):
    with both(folder) as (model, expected):
        for one in (model, expected):
            if checkpointing is not None:
                one.enable_input_require_grads()
                one.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        losses = trained(expected, torch.optim.AdamW(expected.parameters(), lr=1e-2, fused=True))
        if ours:
            optimizer = tensorferry.optim.AdamW(
                [p for p in model.parameters() if p.requires_grad], lr=1e-2, nvme_path=tmp_path
            )
            with contextlib.closing(optimizer):
                assert trained(model, optimizer) == losses
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
            assert trained(model, optimizer) == losses
        compare(model, expected)
        assert losses[-1] != losses[0]


def test_adapters_train_on_weights_that_were_written_to_the_drive(tmp_path, folder):
    model, expected = (transformers.LlamaForCausalLM.from_pretrained(folder) for _ in range(2))
    weights = tensorferry.offload.parameters(model, tmp_path, 160 << 10, keep_bytes=512)
    model, expected = with_adapters(model), with_adapters(expected)
    written = weights.stats()["written_bytes"]
    losses = [
        trained(one, torch.optim.AdamW(one.parameters(), lr=1e-2, fused=True))
        for one in (model, expected)
    ]
    assert losses[0] == losses[1] and losses[0][-1] != losses[0][0]
    compare(model, expected)
    stats = weights.stats()
    assert stats["written_bytes"] == written  # frozen weights do not go back
    assert stats["read_bytes"] > 2 * stats["weight_bytes"]
    weights.close()


def test_adapters_are_saved_and_merged(tmp_path, folder):
    base = from_pretrained(folder, 160 << 10)
    model = with_adapters(base)
    expected = with_adapters(transformers.LlamaForCausalLM.from_pretrained(folder))
    for one in (model, expected):
        trained(one, torch.optim.AdamW(one.parameters(), lr=1e-2, fused=True))
    model.save_pretrained(tmp_path / "adapters")
    again = from_pretrained(folder, 160 << 10)
    loaded = peft.PeftModel.from_pretrained(again, tmp_path / "adapters").eval()
    words = batches(1)[0]
    with torch.no_grad():
        assert torch.equal(loaded(words).logits, expected.eval()(words).logits)
        with pytest.raises(RuntimeError):  # the files stay as they are
            loaded.merge_adapter()
            loaded(words)
    weights_of(again).close()
    weights_of(base).close(restore=True)
    for name, one in (("ours", model), ("theirs", expected)):
        one.merge_and_unload().save_pretrained(tmp_path / name)
    mine, theirs = (
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / name).state_dict()
        for name in ("ours", "theirs")
    )
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def equal_files(mine, theirs):
    """The same tensors, names and configuration."""
    from safetensors.torch import load_file

    assert (mine / "config.json").read_text() == (theirs / "config.json").read_text()
    one, other = (
        {k: v for path in sorted(at.glob("*.safetensors")) for k, v in load_file(path).items()}
        for at in (mine, theirs)
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """A model whose first and last layer share their weight."""
    path = tmp_path_factory.mktemp("tied")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=160, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("targets", [["embed_tokens"], ["embed_tokens", "lm_head"]])
def test_merged_adapters_change_all_layers_that_share_a_weight(tmp_path, tied, targets):
    def adapted(model):
        torch.manual_seed(3)
        config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
        return peft.get_peft_model(model, config)

    model = adapted(from_pretrained(tied, 160 << 10, keep_bytes=512))
    save_merged(model, tmp_path / "ours")
    weights_of(model.get_base_model()).close()
    expected = adapted(transformers.LlamaForCausalLM.from_pretrained(tied))
    expected.merge_and_unload().save_pretrained(tmp_path / "theirs")
    equal_files(tmp_path / "ours", tmp_path / "theirs")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("targets", [["q_proj", "down_proj"], ["embed_tokens", "lm_head"]])
def test_adapters_are_merged_while_the_weights_stay_in_their_files(
    tmp_path, folder, dtype, targets
):
    """Two adapters are active, one of them is not."""
    config = peft.LoraConfig(
        r=4, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False
    )

    def adapted(model):
        torch.manual_seed(3)
        model = peft.get_peft_model(model, config)
        for name in ("second", "third"):
            model.add_adapter(name, config)
        model.base_model.set_adapter(["default", "third"])
        return model

    model = adapted(from_pretrained(folder, 160 << 10, keep_bytes=512, dtype=dtype))
    expected = adapted(transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype))
    words = batches(1)[0]
    with torch.no_grad():
        before = model(words).logits
        save_merged(model, tmp_path / "ours", max_shard_size="200KB")
        assert torch.equal(model(words).logits, before)
    weights = weights_of(model.get_base_model())
    assert weights.stats()["written_bytes"] == 0
    weights.close()
    expected.merge_and_unload().save_pretrained(tmp_path / "theirs", max_shard_size="200KB")
    equal_files(tmp_path / "ours", tmp_path / "theirs")


@pytest.mark.parametrize(
    "options, what",
    [
        (dict(use_dora=True), "DoRA"),
        (dict(modules_to_save=["norm"]), "ModulesToSaveWrapper"),
        (dict(target_parameters=["layers.1.self_attn.q_proj.weight"]), "ParamWrapper"),
    ],
)
def test_adapters_that_cannot_be_merged_are_refused_by_name(tmp_path, folder, options, what):
    base = from_pretrained(folder, 160 << 10)
    config = peft.LoraConfig(target_modules=["o_proj"], **options)
    with weights_of(base).gather():  # for DoRA, peft computes norms of the weights
        model = peft.get_peft_model(base, config)
    with pytest.raises(ValueError, match=what):
        save_merged(model, tmp_path / "no")
    assert not (tmp_path / "no").exists()
    weights_of(base).close()


def test_a_copy_of_a_module_whose_weights_are_in_files_is_refused(folder):
    base = from_pretrained(folder, 160 << 10, keep_bytes=512)
    with pytest.raises(TypeError, match=r"NVMe cannot be copied: call close\(restore=True\)"):
        peft.get_peft_model(base, peft.LoraConfig(modules_to_save=["lm_head"]))
    weights_of(base).close()


def test_merging_takes_the_memory_of_a_weight_and_not_of_the_model(tmp_path):
    import threading
    import time

    def anonymous_bytes():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=512, intermediate_size=2048, num_hidden_layers=8,
        num_attention_heads=8,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(
        from_pretrained(tmp_path / "base", 16 << 20),
        peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
    )
    most, done, before = 0, threading.Event(), anonymous_bytes()

    def watch():
        nonlocal most
        while not done.is_set():
            most = max(most, anonymous_bytes())
            time.sleep(0.001)

    watching = threading.Thread(target=watch)
    watching.start()
    save_merged(model, tmp_path / "merged", max_shard_size="20MB")
    done.set()
    watching.join()
    weights = weights_of(model.get_base_model())
    assert weights.stats()["weight_bytes"] > 128 << 20
    assert most - before < 60 << 20, f"{(most - before) >> 20} MiB"
    weights.close()


def test_the_trainer_of_transformers(tmp_path, folder):
    pytest.importorskip("accelerate")

    def train(model):
        arguments = transformers.TrainingArguments(
            output_dir=tmp_path / "trainer", use_cpu=True, max_steps=STEPS, logging_steps=1,
            per_device_train_batch_size=2, save_strategy="no", report_to=[], disable_tqdm=True,
            seed=3, gradient_checkpointing=True, learning_rate=1e-2,
        )  # fmt: skip
        rows = [{"input_ids": row, "labels": row} for words in batches() for row in words]
        trainer = transformers.Trainer(model, arguments, train_dataset=rows)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    with both(folder) as (model, expected):
        assert train(model) == train(expected)
        compare(model, expected)


def test_the_loop_of_accelerate(folder):
    accelerate = pytest.importorskip("accelerate")

    def train(model):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        loader = torch.utils.data.DataLoader(torch.cat(batches()), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        model.train()
        for words in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(input_ids=words, labels=words).loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    with both(folder) as (model, expected):
        train(model)
        train(expected)
        compare(model, expected)


def test_lightning(tmp_path, folder):
    lightning = pytest.importorskip("pytorch_lightning")

    class Module(lightning.LightningModule):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def training_step(self, words, _):
            return self.model(input_ids=words, labels=words).loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)

    def train(model):
        trainer = lightning.Trainer(
            accelerator="cpu", max_steps=STEPS, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(Module(model), torch.utils.data.DataLoader(torch.cat(batches()), batch_size=2))

    with both(folder) as (model, expected):
        train(model)
        train(expected)
        compare(model, expected)
