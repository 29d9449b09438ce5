"""offload.checkpoint: models that run from the files of a checkpoint, which are never written."""

import os
import shutil
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

import tensorferry.checkpoint
import tensorferry.offload
import tensorferry.optim
from offload_models import MODELS, WIDTH, Holder, Tied, make, nothing_is_in_use, same, weight_bytes
from torch import nn

EVERY_MODEL = pytest.mark.parametrize("name", MODELS)
pytestmark = pytest.mark.usefixtures("one_thread")


def plain_state(model):
    """The state with memory of its own for each name, as safetensors wants it."""
    return {name: value.clone().contiguous() for name, value in model.state_dict().items()}


def save(model, path):
    safetensors_torch.save_file(plain_state(model), path)
    return path


def other(name):
    """The same model with other values."""
    torch.manual_seed(99)
    return MODELS[name][0]()


def run(model, path, share=3, **options):
    options.setdefault("units", (Holder,))
    options.setdefault("keep_bytes", 1024)
    limit = sum(param.numel() for param in model.parameters()) * 4 // share
    return tensorferry.offload.checkpoint(model, path, limit, **options)


def passes(model, name, count=3):
    torch.manual_seed(5)
    results = []
    with torch.no_grad():
        for _ in range(count):
            results.append(model(MODELS[name][1]()))
    return torch.stack([result.float() for result in results])


def linears(count=6):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


def on_meta(build):
    with torch.device("meta"):
        return build()


def check(model, expected, x=None):
    x = torch.ones(3, WIDTH) if x is None else x
    with torch.no_grad():
        same(model(x), expected(x))


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
    import json

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


class WithBuffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.full((WIDTH,), 0.25))
        self.register_buffer("angles", torch.arange(WIDTH) / 10, persistent=False)

    def forward(self, x):
        return self.inner(x) * self.angles.cos() + self.mean


class WithReset(WithBuffers):
    def reset_parameters(self):
        self.angles.copy_(torch.arange(WIDTH) / 10)


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
    with pytest.raises(ValueError, match="meta device has no 1.weight, 2.bias"):
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


# ---- files that change ---------------------------------------------------------------------------


def running(tmp_path):
    expected, model = linears(8), on_meta(lambda: linears(8))
    path = save(expected, tmp_path / "model.safetensors")
    old = path.stat().st_mtime_ns - 10**9
    os.utime(path, ns=(old, old))
    weights = run(model, path, share=4)
    check(model, expected)
    return expected, model, path, weights


def overwrite(path):
    with open(path, "r+b") as file:
        file.seek(-50000, os.SEEK_END)
        file.write(b"x" * 100)


def test_a_file_that_is_overwritten_is_an_error(tmp_path):
    _, model, path, weights = running(tmp_path)
    overwrite(path)
    for _ in range(2):
        with pytest.raises(OSError, match=r"the file has changed: somebody has written.*"):
            check(model, model)
    assert nothing_is_in_use(weights)
    weights.close()


def test_a_file_that_is_overwritten_in_secret_is_an_error(tmp_path):
    _, model, path, weights = running(tmp_path)
    before = path.stat()
    overwrite(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(OSError, match="model.safetensors") as raised:
        check(model, model)
    assert raised.value.filename == str(path)
    weights.close()


def test_a_file_that_is_cut_is_an_error(tmp_path):
    _, model, path, weights = running(tmp_path)
    size = path.stat().st_size
    os.truncate(path, size // 3)
    with pytest.raises(OSError, match=f"it had {size} bytes and has {size // 3} now"):
        check(model, model)
    weights.close()


def test_a_file_that_is_replaced_or_removed_goes_on(tmp_path):
    expected, model, path, weights = running(tmp_path)
    other_file = save(linears(2), tmp_path / "other")
    os.replace(other_file, path)
    check(model, expected)
    os.link(path, tmp_path / "second name")
    path.unlink()
    check(model, expected)
    weights.close()


def test_a_file_that_is_renamed_goes_on(tmp_path):
    expected, model, path, weights = running(tmp_path)
    path.rename(tmp_path / "moved")
    check(model, expected)
    overwrite(tmp_path / "moved")
    with pytest.raises(OSError, match="has changed"):
        check(model, expected)
    weights.close()


PROCESS = """
import sys, torch, tensorferry.offload
with torch.device("meta"):
    model = torch.nn.Sequential(*(torch.nn.Linear(192, 192) for _ in range(6)))
weights = tensorferry.offload.checkpoint(model, sys.argv[1], 300000, keep_bytes=1024)
torch.set_num_threads(1)
with torch.no_grad():
    for _ in range(20):
        result = model(torch.ones(3, 192))
print(result.sum().item().hex(), weights.stats()["written_bytes"])
"""


def test_several_processes_run_one_checkpoint(tmp_path):
    expected = linears()
    path = save(expected, tmp_path / "model.safetensors")
    path.chmod(0o444)
    command = [sys.executable, "-c", PROCESS, str(path)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = {process.communicate(timeout=120)[0] for process in started}
    with torch.no_grad():
        assert said == {f"{expected(torch.ones(3, WIDTH)).sum().item().hex()} 0\n"}


# ---- training and changes ------------------------------------------------------------------------


class Adapted(nn.Module):
    """A low-rank adapter beside a frozen layer."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.down = nn.Parameter(torch.randn(4, WIDTH) / 20)
        self.up = nn.Parameter(torch.zeros(WIDTH, 4))

    def forward(self, x):
        return self.inner(x) + x @ self.down.t() @ self.up.t()


def adapted(model):
    torch.manual_seed(3)
    return nn.Sequential(*(Adapted(layer) for layer in model))


@pytest.mark.parametrize("ours", [False, True])
def test_adapters_train_beside_weights_in_files(tmp_path, ours):
    base = linears().requires_grad_(False)
    path = save(base, tmp_path / "model.safetensors")
    model = on_meta(linears).requires_grad_(False)
    with run(model, path) as weights:
        states = []
        for one, is_ours in ((adapted(base), False), (adapted(model), ours)):
            if is_ours:
                optimizer = tensorferry.optim.AdamW(one.parameters(), nvme_path=tmp_path)
            else:
                optimizer = torch.optim.AdamW(one.parameters(), fused=True)
            torch.manual_seed(1)
            for _ in range(4):
                optimizer.zero_grad()
                one(torch.randn(5, WIDTH)).square().mean().backward()
                optimizer.step()
            states.append([p.detach().clone() for p in one.parameters() if p.requires_grad])
            if is_ours:
                optimizer.close()
            adapters = {n: v for n, v in one.state_dict().items() if "inner" not in n}
            one.load_state_dict(adapters, strict=False)  # as peft does
        for mine, wanted in zip(*states):
            same(mine, wanted)
        assert len(states[0]) == 12 and weights.stats()["written_bytes"] == 0


def test_training_a_weight_in_a_file_is_refused_by_name(tmp_path):
    expected = linears(3)
    path = save(expected, tmp_path / "model.safetensors")
    model = on_meta(lambda: linears(3))
    with run(model, path) as weights:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"2.weight cannot change: .*model.safetensors"):
                model(torch.ones(1, WIDTH)).sum().backward()
        assert all(param.grad is None for param in model.parameters() if param.numel() > WIDTH)
        model.requires_grad_(False)
        model[0].weight.requires_grad_(True)
        with pytest.raises(RuntimeError, match=r"0.weight cannot change: .*requires_grad_"):
            model(torch.ones(1, WIDTH)).sum().backward()
        model[0].weight.grad = torch.ones(WIDTH, WIDTH)
        with pytest.raises(RuntimeError, match="0.weight cannot change"):
            torch.optim.SGD(model.parameters()).step()
        optimizer = tensorferry.optim.AdamW([model[0].weight], nvme_path=tmp_path)
        with pytest.raises(RuntimeError, match="0.weight cannot change"):
            optimizer.step()
        model[0].weight.grad = None
        check(model, expected)
        assert nothing_is_in_use(weights)


def test_changes_are_refused_and_do_not_stay(tmp_path):
    expected = linears(3)
    model = on_meta(lambda: linears(3)).requires_grad_(False)
    with run(model, save(expected, tmp_path / "model.safetensors"), share=1) as weights:
        with pytest.raises(RuntimeError, match="0.weight cannot change"):
            model.load_state_dict(linears(3).state_dict())
        with pytest.raises(RuntimeError, match="weight cannot change"):
            with weights.gather(modify=True):
                pass
        with pytest.raises(RuntimeError, match="1.weight cannot change"):
            with weights.gather():
                model[1].weight.mul_(2)
        check(model, expected)
        with torch.inference_mode(), pytest.raises(RuntimeError, match="1.weight cannot change"):
            with weights.gather():
                model[1].weight.mul_(2)
        check(model, expected)
        assert nothing_is_in_use(weights) and weights.stats()["written_bytes"] == 0


def test_a_failed_call_leaves_the_model_as_it_was(tmp_path, monkeypatch):
    expected, model = WithBuffers(), WithBuffers()
    model.load_state_dict(expected.state_dict())
    path = save(other_buffers := WithBuffers(), tmp_path / "model.safetensors")
    from tensorferry.offload import in_place

    def fail(*_):
        raise MemoryError("as if")

    monkeypatch.setattr(in_place, "WeightMemory", fail)
    with pytest.raises(MemoryError):
        run(model, path)
    check(model, expected)
    meta = on_meta(WithReset)
    with pytest.raises(MemoryError):
        run(meta, path)
    assert all(tensor.is_meta for tensor in (*meta.parameters(), *meta.buffers()))
    monkeypatch.undo()
    with run(model, path):
        check(model, other_buffers)
    assert len(os.listdir("/proc/self/fd")) < 200


def test_a_model_on_the_drive_is_refused(tmp_path):
    model = linears(2)
    path = save(model, tmp_path / "model.safetensors")
    with run(model, path), pytest.raises(ValueError, match="on NVMe already"):
        run(model, path)
