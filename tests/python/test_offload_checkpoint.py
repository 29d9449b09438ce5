"""offload.checkpoint: models that run from the files of a checkpoint, which are never written."""

import json
import os
import shutil
import time

import pytest

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

import tensorferry.checkpoint
import tensorferry.offload
from models_in_files import (
    WithBuffers,
    WithReset,
    check,
    linears,
    on_meta,
    other,
    passes,
    plain_state,
    run,
    save,
)
from offload_models import MODELS, WIDTH, Tied, make, nothing_is_in_use, same, weight_bytes
from tensorferry._memory.watched_file import WatchedFile
from tensorferry.offload import in_place
from torch import nn

EVERY_MODEL = pytest.mark.parametrize("name", MODELS)
pytestmark = pytest.mark.usefixtures("one_thread")


# ---- the same bits -------------------------------------------------------------------------------


@EVERY_MODEL
def test_a_model_in_memory_runs_from_a_file(tmp_path, name):
    expected, model = make(name).eval(), other(name).eval()
    file = save(expected, tmp_path / "model.safetensors")
    before = file.stat()
    with run(model, file) as weights:
        same(passes(model, name), passes(expected, name))
        stats = weights.stats()
        assert stats["written_bytes"] == 0 and stats["read_bytes"] > 0
        assert stats["resident_bytes"] <= stats["buffer_bytes"]
        assert nothing_is_in_use(weights)
        weights.close(restore=True)
    same(passes(model, name), passes(expected, name))
    assert os.listdir(tmp_path) == ["model.safetensors"]
    assert (file.stat().st_mtime_ns, file.stat().st_size) == (before.st_mtime_ns, before.st_size)


@pytest.mark.parametrize("name", ["mlp", "lstm", "encoder", "tied", "repeated", "holder"])
def test_a_model_on_the_meta_device_runs_from_a_file(tmp_path, name):
    expected, model = make(name).eval(), on_meta(MODELS[name][0]).eval()
    with run(model, save(expected, tmp_path / "model.safetensors")):
        same(passes(model, name), passes(expected, name))


def test_memory_is_limited_and_the_next_weights_are_read_ahead(tmp_path):
    expected, model = linears(12), on_meta(lambda: linears(12))
    path = save(expected, tmp_path / "model.safetensors")
    with run(model, path) as weights:
        for _ in range(4):
            check(model, expected)
        stats = weights.stats()
        assert stats["buffer_bytes"] <= weight_bytes(expected) // 3 + 4096
        assert stats["overflows"] == 0 and stats["hits"] > stats["misses"]


def test_all_memory_is_within_a_large_limit(tmp_path):
    """Also the slots: these tensors begin where no drive can put them in place."""

    def build():
        return nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(20)])

    path = tmp_path / "model.safetensors"
    safetensors_torch.save_file(plain_state(build()), path, {"odd": "x" * 13})
    model, limit = on_meta(build), 256 << 20
    x = torch.ones(1, 2048)
    before = own_memory()
    with tensorferry.offload.checkpoint(model, path, limit) as weights, torch.no_grad():
        for _ in range(3):
            model(x)
        assert 3 / 4 * limit < weights.stats()["buffer_bytes"] < limit
        assert own_memory() - before <= limit


def test_weights_that_fit_are_read_once(tmp_path, monkeypatch):
    """The slots take nothing from their memory."""
    monkeypatch.setattr(in_place, "_SHARED_FROM", 1)
    expected, model = linears(), on_meta(linears)
    path = save(expected, tmp_path / "model.safetensors")
    with run(model, path, share=1) as weights:
        for _ in range(3):
            check(model, expected)
        assert weights.stats()["read_bytes"] <= 1.1 * path.stat().st_size


def own_memory():
    """Bytes of memory that the process has, but for the pages of files."""
    with open("/proc/self/status") as status:
        found = dict(line.split(":", 1) for line in status)
    return sum(int(found[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


def test_the_next_weights_are_read_while_a_module_computes(tmp_path):
    expected, model = linears(12), on_meta(lambda: linears(12))
    path = save(expected, tmp_path / "model.safetensors")
    with run(model, path) as weights:
        check(model, expected)  # the order is known afterwards
        before, used = weights.stats()["read_bytes"], 0

        def wait(module, _):
            """In the middle of a call: until more has arrived than what was asked for."""
            nonlocal used
            used += module.weight.nbytes
            end = time.monotonic() + 20
            while weights.stats()["read_bytes"] - before <= used:
                assert time.monotonic() < end, f"nothing is read ahead after {used} bytes"
                time.sleep(0.001)

        hooks = [model[number].register_forward_pre_hook(wait) for number in range(4)]
        check(model, expected)
        assert used == 4 * WIDTH * WIDTH * 4
        for hook in hooks:
            hook.remove()


def test_what_stays_in_memory_is_counted(tmp_path):
    expected, model = linears(12), on_meta(lambda: linears(12))
    path = save(expected, tmp_path / "model.safetensors")
    with run(model, path, keep_bytes=WIDTH * 4) as weights:
        biases = sum(p.nbytes for p in expected.parameters() if p.nbytes <= WIDTH * 4)
        stats = weights.stats()
        assert stats["kept_bytes"] == biases > 0
        assert stats["weight_bytes"] == weight_bytes(expected) - biases


@pytest.mark.parametrize("alignment", [0, 1, 2, 8, 64])
def test_tensors_may_begin_anywhere_in_the_file(tmp_path, alignment):
    """Their memory begins as torch's does, so that its kernels give the same bits."""
    expected = linears()
    state = plain_state(expected)
    if alignment:  # a file of torch.save, whose storages are moved by odd bytes
        from torch.utils.serialization import config

        path = tmp_path / "model.pt"
        with config.patch({"save.storage_alignment": alignment}):
            torch.save({"a": torch.zeros(alignment, dtype=torch.uint8), **state}, path)
    else:
        path = tmp_path / "model.safetensors"
        safetensors_torch.save_file(state, path, {"odd": "x" * 13})
    model = on_meta(linears)
    with run(model, path, rename=lambda name: None if name == "a" else name) as weights:
        check(model, expected)
        check(model, expected, torch.ones(1, WIDTH))
        with weights.gather():
            assert all(param.data_ptr() % 64 == 0 for param in model.parameters())


@pytest.mark.parametrize("length", [3, 11, 40, 500])
def test_whole_pages_of_the_file_are_read(tmp_path, length, monkeypatch):
    """Wherever tensors begin in it, if the drive fills such memory in place, as NVMe drives do."""
    monkeypatch.setattr(WatchedFile, "memory_alignment", 4)
    expected = linears()
    path = tmp_path / "model.safetensors"
    state = plain_state(expected) | {"last": torch.zeros(8192, dtype=torch.uint8)}
    safetensors_torch.save_file(state, path, {"odd": "x" * length})
    model = on_meta(linears)
    with run(model, path, rename=lambda name: None if name == "last" else name) as weights:
        check(model, expected)
        read = weights.stats()["read_bytes"]
    assert read >= weight_bytes(expected) and read % 4096 == 0


# ---- formats -------------------------------------------------------------------------------------


def sharded(model, folder):
    """Three files and their index, as transformers writes them."""
    folder.mkdir()
    state = plain_state(model)
    names = list(state)
    weight_map = {}
    for number in range(3):
        part = names[number::3]
        file = f"model-{number}.safetensors"
        safetensors_torch.save_file({name: state[name] for name in part}, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def test_the_forms_of_a_checkpoint(tmp_path):
    expected = linears()
    index = sharded(expected, tmp_path / "sharded")
    no_index = tmp_path / "no_index"
    shutil.copytree(index.parent, no_index)
    (no_index / index.name).unlink()
    one = tmp_path / "one"
    one.mkdir()
    save(expected, one / "model.safetensors")
    torch.save(expected.state_dict(), tmp_path / "model.pt")
    tensorferry.checkpoint.save(expected.state_dict(), tmp_path / "ours.safetensors")
    forms = [
        index.parent,
        str(index),
        sorted(index.parent.glob("*.safetensors")),
        no_index,
        one,
        one / "model.safetensors",
        tmp_path / "model.pt",
        tmp_path / "ours.safetensors",
    ]
    for form in forms:
        model = on_meta(linears)
        with run(model, form) as weights:
            check(model, expected)
            assert weights.stats()["written_bytes"] == 0


def test_a_folder_of_distributed_checkpoint(tmp_path):
    import torch.distributed.checkpoint as dcp

    expected = linears()
    dcp.save(expected.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    model = on_meta(linears)
    with run(model, tmp_path / "dcp"):
        check(model, expected)


def test_a_torch_file_with_views_and_strides(tmp_path):
    expected = linears(3)
    state = expected.state_dict()
    big = torch.randn(2 * WIDTH, 2 * WIDTH)
    big[:WIDTH, :WIDTH] = state["0.weight"]
    state["0.weight"] = big[:WIDTH, :WIDTH]  # rows with gaps
    state["1.weight"] = state["1.weight"].t().contiguous().t()  # columns
    state["2.weight"] = torch.stack([state["2.weight"], big[WIDTH:, WIDTH:]])[0]
    torch.save(state, tmp_path / "model.pt")
    model = on_meta(lambda: linears(3))
    with run(model, tmp_path / "model.pt"):
        check(model, expected)
        for name, value in model.state_dict().items():
            same(value, expected.state_dict()[name])
        assert model[1].weight.size() == (WIDTH, WIDTH)


def test_the_memory_format_of_the_model_stays(tmp_path):
    expected, model = make("conv_net").eval(), other("conv_net").eval()
    with run(model, save(expected, tmp_path / "model.safetensors"), keep_bytes=16) as weights:
        with weights.gather():
            assert model[3].weight.is_contiguous(memory_format=torch.channels_last)
            assert torch.equal(model[3].weight, expected[3].weight)
        same(passes(model, "conv_net"), passes(expected, "conv_net"))


# ---- dtypes --------------------------------------------------------------------------------------


def test_weights_have_the_dtype_of_the_file(tmp_path):
    expected = linears().to(torch.bfloat16)
    model = on_meta(linears)  # fp32
    with run(model, save(expected, tmp_path / "model.safetensors")):
        assert all(param.dtype == torch.bfloat16 for param in model.parameters())
        check(model, expected, torch.ones(3, WIDTH, dtype=torch.bfloat16))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_are_converted_on_the_way(tmp_path, stored, wanted):
    saved = linears().to(stored)
    saved.register_buffer("counts", torch.arange(5))
    saved.register_buffer("scale", torch.rand(5, dtype=stored))
    path = save(saved, tmp_path / "model.safetensors")

    def build():
        made = linears()
        made.register_buffer("counts", torch.zeros(5, dtype=torch.int64))
        made.register_buffer("scale", torch.zeros(5))
        return made

    model = on_meta(build)
    with run(model, path, dtype=wanted) as weights:
        assert model.counts.dtype == torch.int64 and model.scale.dtype == wanted
        assert torch.equal(model.scale, saved.scale.to(wanted))
        for _ in range(2):
            check(model, saved.to(wanted), torch.ones(3, WIDTH, dtype=wanted))
        for name, value in model.state_dict().items():
            assert torch.equal(value, saved.state_dict()[name]), name
        assert weights.stats()["written_bytes"] == 0


def test_quantized_numbers_are_not_converted_without_their_scales(tmp_path):
    weight = torch.randn(8, 8).to(torch.float8_e4m3fn)
    state = {"weight": weight, "bias": torch.ones(8)}
    safetensors_torch.save_file(state, tmp_path / "model.safetensors")
    model = nn.Linear(8, 8, device="meta")
    with tensorferry.offload.checkpoint(model, tmp_path, dtype=torch.bfloat16) as weights:
        assert (model.weight.dtype, model.bias.dtype) == (weight.dtype, torch.bfloat16)
        with weights.gather():
            assert torch.equal(model.weight.view(torch.uint8), weight.view(torch.uint8))


def test_a_large_weight_is_converted_in_pieces(tmp_path):
    weight = torch.randn(3000, 1000)
    safetensors_torch.save_file({"weight": weight}, tmp_path / "model.safetensors")
    for dtype in (torch.bfloat16, torch.float64):
        model = nn.Linear(1000, 3000, bias=False, device="meta")
        with tensorferry.offload.checkpoint(model, tmp_path, 1 << 20, dtype=dtype) as weights:
            with weights.gather():
                assert torch.equal(model.weight, weight.to(dtype))


# ---- names, ties, buffers ------------------------------------------------------------------------


def test_names_are_mapped(tmp_path):
    expected = linears()
    state = {f"module.{name}": value for name, value in plain_state(expected).items()}
    safetensors_torch.save_file(state | {"step": torch.ones(1)}, tmp_path / "model.safetensors")

    def rename(name):
        return name.removeprefix("module.") if name.startswith("module.") else None

    model = on_meta(linears)
    with run(model, tmp_path, rename=rename):
        check(model, expected)
    model = on_meta(linears)
    mapping = {name: name.removeprefix("module.") for name in state}
    with run(model, tmp_path, rename=mapping, strict=False):
        check(model, expected)
    with pytest.raises(ValueError, match=r"makes same of both \S+ and \S+"):
        run(on_meta(linears), tmp_path, rename=lambda name: "same")


def test_one_name_of_a_tied_weight_is_enough(tmp_path):
    expected = make("tied").eval()
    state = plain_state(expected)
    for left_out in ("head.weight", "embedding.weight"):
        path = tmp_path / f"{left_out}.safetensors"
        safetensors_torch.save_file({n: v for n, v in state.items() if n != left_out}, path)
        model = on_meta(Tied).eval()
        with run(model, path):
            assert model.head.weight is model.embedding.weight
            same(passes(model, "tied"), passes(expected, "tied"))


def test_of_two_names_of_a_tied_weight_the_last_counts(tmp_path):
    """As with load_state_dict()."""
    state = plain_state(make("tied"))
    state["head.weight"] = torch.randn_like(state["head.weight"])
    safetensors_torch.save_file(state, tmp_path / "model.safetensors")
    expected = Tied()
    expected.load_state_dict(state)
    model = on_meta(Tied)
    with run(model, tmp_path):
        same(passes(model, "tied"), passes(expected, "tied"))


def fill(module):
    if hasattr(module, "angles"):
        module.angles.copy_(torch.arange(WIDTH) / 10)


def test_buffers_are_loaded_or_computed(tmp_path):
    expected = WithBuffers()
    expected.mean.fill_(3)
    path = save(expected, tmp_path / "model.safetensors")
    for model, options in (
        (WithBuffers(), {}),
        (on_meta(WithReset), {}),
        (on_meta(WithBuffers), {"initialize": fill}),
    ):
        with run(model, path, **options):
            check(model, expected)


def test_a_buffer_that_nobody_computes_is_named(tmp_path):
    path = save(WithBuffers(), tmp_path / "model.safetensors")
    model = on_meta(lambda: nn.Sequential(WithBuffers()))
    for initialize in (None, lambda module: None, lambda module: module.reset_angles):
        with pytest.raises((ValueError, AttributeError), match="angles"):
            run(model, path, rename=lambda name: f"0.{name}", initialize=initialize)
        assert model[0].angles.is_meta and model[0].inner.weight.is_meta

    def half(module):
        if hasattr(module, "angles"):
            module.angles[:7] = 1

    with pytest.raises(ValueError, match="0.angles: no checkpoint has .* initialize="):
        run(model, path, rename=lambda name: f"0.{name}", initialize=half)


def test_a_plain_tensor_on_the_meta_device_is_named(tmp_path):
    def build():
        made = linears(2)
        made[1].table = torch.arange(5.0)
        return made

    path = save(linears(2), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="1.table: a tensor that is neither"):
        run(on_meta(build), path)


# ---- what does not fit ---------------------------------------------------------------------------


def test_missing_and_extra_names_are_listed(tmp_path):
    expected = linears(3)
    state = plain_state(expected)
    del state["1.weight"], state["2.bias"]
    safetensors_torch.save_file(state | {"more": torch.ones(1)}, tmp_path / "model.safetensors")
    model = linears(3)
    with pytest.raises(ValueError) as raised:
        run(model, tmp_path)
    for part in ("lacks 1.weight, 2.bias", "no place for more", "rename=", "strict=False"):
        assert part in str(raised.value)
    check(model, expected)  # nothing has changed
    with pytest.raises(ValueError, match="nor the model has values of 1.weight, 2.bias"):
        run(on_meta(lambda: linears(3)), tmp_path, strict=False)
    with run(model, tmp_path, strict=False):
        check(model, expected)
        model[1].weight.requires_grad_(True).sum().backward()  # it is in memory


def test_other_shapes_are_listed(tmp_path):
    state = plain_state(linears(3))
    state["0.weight"] = torch.ones(WIDTH, 5)
    state["2.bias"] = torch.ones(1, WIDTH)
    safetensors_torch.save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"0.weight has the shape .*\(192, 5\).*2.bias has"):
        run(linears(3), tmp_path)


def test_a_name_in_two_files_is_refused(tmp_path):
    paths = [save(linears(2), tmp_path / f"{n}.safetensors") for n in "ab"]
    with pytest.raises(ValueError, match=r"b.safetensors has 0.bias, and so has a file before it"):
        run(linears(2), paths)


def test_damaged_checkpoints_are_named(tmp_path):
    index = sharded(linears(), tmp_path / "sharded")
    with open(index.parent / "model-1.safetensors", "r+b") as file:
        file.truncate(5000)
    with pytest.raises(OSError, match="model-1.safetensors"):
        run(on_meta(linears), index.parent)
    (index.parent / "model-1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-1.safetensors"):
        run(on_meta(linears), index.parent)
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        run(on_meta(linears), tmp_path / "nothing")
    with pytest.raises(ValueError, match="empty list"):
        run(on_meta(linears), [])
    torch.save(linears().state_dict(), tmp_path / "model.pt")
    data = bytearray((tmp_path / "model.pt").read_bytes())
    at = data.index(b"model/data/2") - 30  # its local header
    data[at : at + 4] = b"XXXX"
    (tmp_path / "model.pt").write_bytes(data)
    with pytest.raises(OSError, match="header of .* is damaged"):
        run(on_meta(linears), tmp_path / "model.pt")
