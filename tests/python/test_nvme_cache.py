"""tensorferry.transformers.NvmeCache: keys and values on the drive, with the bits of
DynamicCache."""

import contextlib
import copy
import errno
import os
import pickle
import resource
import signal
import subprocess

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from cache_models import (
    HEADS,
    LAYERS,
    SIZES,
    TOKEN_BYTES,
    WIDTH,
    WORDS,
    layers,
    llama,
    said,
    tokens,
)
from tensorferry._memory.weight_memory import WeightMemory
from tensorferry.transformers import NvmeCache
from transformers import DynamicCache, EncoderDecoderCache
from warm_python import WARM_PYTHON

pytestmark = pytest.mark.usefixtures("one_thread")


def check(cache):
    """That it was on the drive, and within its memory."""
    stats = cache.stats()
    assert stats["read_bytes"] > 0 and stats["written_bytes"] > 0
    assert stats["resident_bytes"] <= stats["buffer_bytes"] < stats["state_bytes"]


@pytest.mark.parametrize(
    "attention, held, batch", [("sdpa", 2, 1), ("sdpa", 3, 3), ("eager", 4, 1), ("eager", 2, 3)]
)
def test_generation_gives_the_bits_of_a_dynamic_cache(tmp_path, attention, held, batch):
    model = llama(attn_implementation=attention)
    prompt = tokens(200, batch)
    more = dict(output_scores=True, return_dict_in_generate=True, max_new_tokens=70)
    expected = said(model, DynamicCache(config=model.config), prompt, **more)
    with NvmeCache(model.config, tmp_path, layers(held, 270, batch)) as cache:
        found = said(model, cache, prompt, **more)
        check(cache)
        assert cache.get_seq_length() == expected.past_key_values.get_seq_length()
        for layer, wanted in zip(cache.layers, expected.past_key_values.layers):
            assert torch.equal(layer.keys, wanted.keys) and torch.equal(layer.values, wanted.values)
    assert torch.equal(found.sequences, expected.sequences)
    assert all(torch.equal(a, b) for a, b in zip(found.scores, expected.scores))
    assert os.listdir(tmp_path) == []


def test_what_fits_is_never_written(tmp_path):
    model = llama()
    with NvmeCache(model.config, tmp_path, layers(LAYERS + 2, 120)) as cache:
        wanted = said(model, DynamicCache(config=model.config), tokens(90))
        assert torch.equal(said(model, cache, tokens(90)), wanted)
        assert cache.stats()["written_bytes"] == cache.stats()["read_bytes"] == 0


def test_a_step_reads_what_is_on_the_drive_once(tmp_path):
    model = llama()
    length = 640
    with NvmeCache(model.config, tmp_path, layers(4, length)) as cache, torch.no_grad():
        model(tokens(length), past_key_values=cache)
        for _ in range(2):
            before = cache.stats()["read_bytes"]
            model(tokens(1), past_key_values=cache)
        read = cache.stats()["read_bytes"] - before
        assert 0 < read <= (LAYERS - 2 + 1) * length * TOKEN_BYTES  # two layers stay


def test_prompts_may_come_in_parts(tmp_path):
    model = llama()
    prompt = tokens(500, 2)
    caches = [NvmeCache(model.config, tmp_path, layers(2, 520, 2)), DynamicCache()]
    with torch.no_grad():
        for cut in ((0, 3), (3, 70), (70, 320), (320, 321), (321, 500)):
            logits = [model(prompt[:, slice(*cut)], past_key_values=c).logits for c in caches]
            assert torch.equal(*logits)
    check(caches[0])
    caches[0].close()


@pytest.mark.parametrize("removed", [1, 10, 130, 290])
def test_cropping(tmp_path, removed):
    model = llama()
    caches = [NvmeCache(model.config, tmp_path, layers(2, 320)), DynamicCache()]
    with torch.no_grad():
        for cache in caches:
            model(tokens(300), past_key_values=cache)
            cache.crop(-removed)
            assert cache.get_seq_length() == 300 - removed
        for seed in range(3):
            given = tokens(40, seed=seed)
            logits = [model(given, past_key_values=cache).logits for cache in caches]
            assert torch.equal(*logits)
    with pytest.raises(ValueError, match="negative number of tokens"):
        caches[0].crop(5)
    caches[0].close()


def test_beams_are_reordered_and_sequences_selected(tmp_path):
    model = llama()
    options = dict(num_beams=3, num_return_sequences=2, max_new_tokens=12)
    wanted = said(model, DynamicCache(), tokens(150), **options)
    with NvmeCache(model.config, tmp_path, layers(2, 170, 3)) as cache:
        assert torch.equal(said(model, cache, tokens(150), **options), wanted)
        check(cache)
    caches = [NvmeCache(model.config, tmp_path, layers(2, 200, 4)), DynamicCache()]
    with torch.no_grad():
        for change in (
            lambda cache: cache.batch_repeat_interleave(2),
            lambda cache: cache.batch_select_indices(torch.tensor([1, 0, 0])),
            lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
            lambda cache: cache.reset(),
        ):
            for cache in caches:
                model(tokens(130, 2), past_key_values=cache)
                change(cache)
            keys = caches[1].layers[0].keys
            given = tokens(5, 2 if keys is None else len(keys))
            logits = [model(given, past_key_values=cache).logits for cache in caches]
            assert torch.equal(*logits)
            for cache in caches:
                cache.reset()
    caches[0].close()


def test_sliding_windows_stay_in_memory(tmp_path):
    torch.manual_seed(0)
    config = transformers.Gemma2Config(**SIZES, sliding_window=32)
    model = transformers.Gemma2ForCausalLM(config).eval()
    wanted = said(model, DynamicCache(config=config), tokens(200))
    with NvmeCache(config, tmp_path, layers(1, 240)) as cache:
        assert sum(cache.is_sliding) == LAYERS // 2
        assert torch.equal(said(model, cache, tokens(200)), wanted)
        check(cache)
        cache.save(tmp_path / "saved", model, wanted)
    longer = torch.cat([wanted, tokens(3)], 1)
    with NvmeCache.load(tmp_path / "saved", model, longer, tmp_path, layers(1, 240)) as cache:
        found = said(model, cache, longer, max_new_tokens=6)
    assert torch.equal(found, said(model, None, longer, max_new_tokens=6))


@pytest.mark.parametrize("beams", [1, 2])
def test_models_with_an_encoder_need_a_cache_of_each_kind(tmp_path, beams):
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=32, d_kv=2 * WIDTH, d_ff=64, num_layers=LAYERS,
        num_heads=HEADS,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).eval()
    options = dict(max_new_tokens=70, do_sample=False, num_beams=beams)
    wanted = model.generate(tokens(90, 2), **options)
    with NvmeCache(config, tmp_path, layers(2, 90, 4 * beams)) as cache:
        both = EncoderDecoderCache(cache, NvmeCache(config, tmp_path, layers(2, 90, 4 * beams)))
        assert torch.equal(model.generate(tokens(90, 2), past_key_values=both, **options), wanted)
        check(both.self_attention_cache)
        check(both.cross_attention_cache)
        with pytest.raises(ValueError, match="behind an encoder depends on its input"):
            cache.save(tmp_path / "saved", model, wanted)
        both.cross_attention_cache.close()
    with NvmeCache(config, tmp_path) as cache:
        with pytest.raises(ValueError, match=r"pass past_key_values=EncoderDecoderCache"):
            model.generate(tokens(90, 2), past_key_values=cache, **options)


def test_sampling_and_assistants_work(tmp_path):
    model, assistant = llama(), llama()
    for options in (dict(do_sample=True, top_k=20), dict(assistant_model=assistant)):
        found = []
        for cache in (DynamicCache(), NvmeCache(model.config, tmp_path, layers(2, 180))):
            torch.manual_seed(3)
            found.append(said(model, cache, tokens(150), **options))
        assert torch.equal(*found)
        cache.close()


def test_what_cannot_work_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="no place for a LinearAttentionAndFullAttentionLayer"):
        config = transformers.LlamaConfig(**SIZES)
        config.layer_types = ["hybrid"] * LAYERS
        NvmeCache(config, tmp_path)
    model = llama()
    with NvmeCache(model.config, tmp_path) as cache:
        with pytest.raises(RuntimeError, match=r"keeps no gradients.*no_grad"):
            model(tokens(3), past_key_values=cache)
        with pytest.raises(TypeError, match="cannot be copied: save"):
            copy.deepcopy(cache)
        with pytest.raises(TypeError, match="cannot be pickled: save"):
            pickle.dumps(cache)
    with NvmeCache(model.config, tmp_path, 64 * TOKEN_BYTES) as cache, torch.no_grad():
        with pytest.raises(RuntimeError, match="one layer take .* raise max_cpu_bytes"):
            model(tokens(300), past_key_values=cache)
    with pytest.raises(FileNotFoundError):
        NvmeCache(model.config, tmp_path / "missing")
    for nbytes in (0, -1, 1e9):
        with pytest.raises(ValueError, match="max_cpu_bytes must be a number of bytes"):
            NvmeCache(model.config, tmp_path, nbytes)


@pytest.mark.parametrize(
    "new",
    [
        torch.ones(2, HEADS, 1, WIDTH, dtype=torch.bfloat16),
        torch.ones(1, HEADS, 1, 1, dtype=torch.bfloat16),
        torch.ones(1, HEADS, 1, WIDTH, dtype=torch.float32),  # bfloat16 would lose bits of it
    ],
)
def test_tokens_that_do_not_fit_the_others_are_refused(tmp_path, new):
    with NvmeCache(llama().config, tmp_path, layers(2, 300)) as cache:
        first = torch.ones(1, HEADS, 1, WIDTH, dtype=torch.bfloat16)
        cache.update(first, first, 0)
        with pytest.raises(ValueError, match="heads of 16 torch.bfloat16 on cpu, and was given"):
            cache.update(first, new, 0)
        cache.update(first, first, 0)
        assert cache.get_seq_length() == 2


def test_memory_is_limited_where_a_gpu_would_give_more(tmp_path, monkeypatch):
    monkeypatch.setattr(
        WeightMemory, "take", lambda _, nbytes, __=0: torch.empty(nbytes, dtype=torch.uint8)
    )
    model = llama()
    with NvmeCache(model.config, tmp_path, 64 * TOKEN_BYTES) as cache, torch.no_grad():
        with pytest.raises(RuntimeError, match="one layer take .* raise max_cpu_bytes"):
            model(tokens(300), past_key_values=cache)


def test_a_full_drive_is_an_error(tmp_path):
    """By the limit on the size of a file: a write that fails is told, and never read back."""
    program = f"""
import resource, signal, sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
from cache_models import *
from tensorferry.transformers import NvmeCache
model = llama()
cache = NvmeCache(model.config, {str(tmp_path)!r}, layers(2, 300))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
try:
    said(model, cache, tokens(250))
except OSError as error:
    print(error.errno)
"""
    done = subprocess.run([*WARM_PYTHON, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == str(errno.EFBIG), done.stdout + done.stderr


def test_a_closed_cache_keeps_no_memory(tmp_path):
    def in_memory():
        with open("/proc/self/status") as status:
            return sum(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS"))

    model = llama()
    cache = NvmeCache(model.config, tmp_path, 96 << 20)
    with torch.no_grad():
        model(tokens(400), past_key_values=cache)
    kept = [cache, list(cache.layers)]  # of somebody who goes on
    before = in_memory()
    cache.close()
    cache.close()
    assert before - in_memory() > 64 << 20
    with torch.no_grad(), pytest.raises(RuntimeError, match="this NvmeCache is closed"):
        model(tokens(2), past_key_values=cache)
    with pytest.raises(RuntimeError, match="this NvmeCache is closed"):
        kept[1][0].update(torch.ones(1, HEADS, 1, WIDTH), torch.ones(1, HEADS, 1, WIDTH))


@contextlib.contextmanager
def full_drive():
    """Writes behind the first bytes of a file fail."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)


def test_after_a_write_that_failed_each_use_raises(tmp_path):
    """Whoever catches the error and goes on must not get other numbers."""
    model = llama()
    caches = [NvmeCache(model.config, tmp_path, layers(2, 700)), DynamicCache()]
    with torch.no_grad():
        for cache in caches:
            model(tokens(100), past_key_values=cache)
        failed = 0
        for seed in range(6):
            given = tokens(90, seed=seed)
            wanted = model(given, past_key_values=caches[1]).logits
            with full_drive() if seed == 1 else contextlib.nullcontext():
                try:
                    found = model(given, past_key_values=caches[0]).logits
                except OSError as error:
                    assert error.errno == errno.EFBIG and not failed
                    failed = 1
                except RuntimeError as error:
                    assert failed and "has failed" in str(error) and "make a new one" in str(error)
                    failed += 1
                else:
                    assert torch.equal(found, wanted)
        assert failed > 3
        for use in (
            lambda: caches[0].layers[0].keys,
            lambda: caches[0].crop(-10),
            lambda: caches[0].reorder_cache(torch.tensor([0, 0])),
            lambda: caches[0].save(tmp_path / "saved", model, tokens(1000)),
        ):
            with pytest.raises(RuntimeError, match="an earlier step of this NvmeCache has failed"):
                use()
    caches[0].close()


# --- saved ---


@pytest.fixture
def saved(tmp_path):
    """(model, its prompt, the folder) of a cache of 200 tokens."""
    model, prompt = llama(), tokens(210)
    with NvmeCache(model.config, tmp_path, layers(3, 240)) as cache, torch.no_grad():
        model(prompt[:, :200], past_key_values=cache)
        cache.save(tmp_path / "saved", model, prompt)
    return model, prompt, tmp_path / "saved"


@pytest.mark.parametrize("held", [2, 4])
def test_a_saved_cache_goes_on(tmp_path, saved, held):
    model, prompt, folder = saved
    other = DynamicCache()
    with torch.no_grad():
        model(prompt[:, :200], past_key_values=other)
    wanted = said(model, other, prompt, max_new_tokens=80)
    other.crop(-150)  # into what was saved
    with torch.no_grad():
        logits = model(tokens(7), past_key_values=other).logits
    for _ in range(2):  # it can be used again
        with NvmeCache.load(folder, model, prompt, tmp_path, layers(held, 300)) as cache:
            assert cache.get_seq_length() == 200
            assert torch.equal(said(model, cache, prompt, max_new_tokens=80), wanted)
            cache.crop(-150)
            with torch.no_grad():
                assert torch.equal(model(tokens(7), past_key_values=cache).logits, logits)


def test_another_process_uses_a_saved_cache(tmp_path, saved):
    model, prompt, folder = saved
    wanted = said(model, None, prompt)[0, 210:].tolist()
    program = f"""
import sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
from cache_models import *
from tensorferry.transformers import NvmeCache
torch.set_num_threads(1)
model = llama()
cache = NvmeCache.load({str(folder)!r}, model, tokens(210), {str(tmp_path)!r}, layers(2, 240))
print(said(model, cache, tokens(210))[0, 210:].tolist())
"""
    done = subprocess.run([*WARM_PYTHON, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == str(wanted), done.stdout + done.stderr


def test_a_saved_cache_of_another_model_or_other_tokens_is_refused(tmp_path, saved):
    model, prompt, folder = saved

    def load(model, prompt):
        NvmeCache.load(folder, model, prompt, tmp_path).close()

    with pytest.raises(ValueError, match="another model"):
        load(llama(seed=1), prompt)
    other = llama()
    with torch.no_grad():
        other.model.layers[3].self_attn.v_proj.weight.mul_(1.5)
    with pytest.raises(ValueError, match="another model"):
        load(other, prompt)
    with pytest.raises(ValueError, match="another model"):
        load(llama(rope_parameters={"rope_type": "default", "rope_theta": 7.0}), prompt)
    changed = prompt.clone()
    changed[0, 17] = 2
    with pytest.raises(ValueError, match="token 17 of sequence 0 is .* there, and 2 in input_ids"):
        load(model, changed)
    with pytest.raises(ValueError, match="at least 201 tokens"):
        load(model, prompt[:, :200])
    with pytest.raises(ValueError, match="1 sequences, and input_ids has 2"):
        load(model, prompt.repeat(2, 1))
    with NvmeCache(model.config, tmp_path) as cache:
        with pytest.raises(FileExistsError, match="remove it, or save to another"):
            cache.save(folder, model, prompt)


def test_a_saved_cache_that_lacks_a_layer_is_an_error(tmp_path, saved):
    model, prompt, folder = saved
    os.unlink(folder / "layer-00002.safetensors")
    with pytest.raises(ValueError, match=r"is damaged: it lacks 2.keys, 2.values"):
        NvmeCache.load(folder, model, prompt, tmp_path)


def test_a_saved_cache_that_changes_is_an_error(tmp_path, saved):
    model, prompt, folder = saved
    with NvmeCache.load(folder, model, prompt, tmp_path, layers(2, 240)) as cache:
        with open(folder / "layer-00002.safetensors", "r+b") as file:
            file.seek(-100, os.SEEK_END)
            file.write(b"x")
        with pytest.raises(OSError, match="the file has changed.*") as raised:
            said(model, cache, prompt)
        assert raised.value.errno == errno.EBADMSG
        assert "layer-00002" in str(raised.value)
