"""offload.checkpoint: files that change while they are in use, and weights that must not change."""

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors.torch")

import tensorferry.optim
from models_in_files import WithBuffers, WithReset, check, linears, on_meta, run, save
from offload_models import WIDTH, nothing_is_in_use, same
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")


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
