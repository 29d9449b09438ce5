"""Tensors that autograd saves on NVMe: the same bits, less memory, and torch's errors."""

import contextlib
import errno
import gc
import threading
import time

import pytest

torch = pytest.importorskip("torch")

import tensorferry.offload
from drives import failing_drive, fill_up, loop_mount
from offload_models import MODELS, make, same, weight_bytes
from programs import check_python
from torch import nn
from torch.utils.checkpoint import checkpoint
from warm_python import WARM_PYTHON

MiB = 1 << 20

pytestmark = pytest.mark.usefixtures("one_thread")


@contextlib.contextmanager
def activations(path, max_cpu_bytes=64 << 10, keep_bytes=1, **options):
    """With room for a few of the tensors of these models, so that most go to the drive."""
    made = tensorferry.offload.activations(path, max_cpu_bytes, keep_bytes=keep_bytes, **options)
    yield made
    made.close()


def gradients(model, data, around, passes=2):
    """The loss and all gradients, also that of the data."""
    torch.manual_seed(11)
    for _ in range(passes):
        model.zero_grad()
        x = data()
        with around:
            loss = model(x).float().square().mean()
        loss.backward()
    grads = [param.grad for param in model.parameters()]
    return [loss.detach(), *(grad for grad in [*grads, x.grad] if grad is not None)]


def deep(layers=12, width=256):
    """Saves an input and an output for each layer: 24 tensors of width KiB for 256 rows."""
    torch.manual_seed(3)
    linear = (nn.Linear(width, width) for _ in range(layers))
    return nn.Sequential(*(part for one in linear for part in (one, nn.Tanh())))


def check_all_same(actual, expected):
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected):
        same(one, other)


def is_empty(saved):
    """Whether nothing is left. A buffer is free a moment after its operation has ended."""
    for _ in range(1000):
        stats = saved.stats()
        if stats["tensors"] == stats["buffer_bytes_used"] == 0:
            return True
        time.sleep(0.01)
    return False


# --- the same bits ---


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("max_cpu_bytes", [4096, 8 << 10])
def test_gradients_are_those_of_memory(tmp_path, name, max_cpu_bytes):
    data = MODELS[name][1]
    expected = gradients(make(name), data, contextlib.nullcontext())
    with activations(tmp_path, max_cpu_bytes) as saved:
        check_all_same(gradients(make(name), data, saved), expected)
        gc.collect()
        assert saved.stats()["read_bytes"] > 0
        assert is_empty(saved)


class Within(nn.Module):
    """A part of a model whose forward passes run in a block of their own."""

    def __init__(self, part, around):
        super().__init__()
        self.part = part
        self.around = around

    def forward(self, x):
        with self.around:
            return self.part(x)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", ["mlp", "tied", "reentrant", "not_reentrant", "own_weights"])
def test_weights_on_the_drive_beside_them_are_not_saved_as_activations(tmp_path, name, inside):
    """Hooks of either kind come first; each takes its own tensors."""
    data = MODELS[name][1]
    expected = gradients(make(name), data, contextlib.nullcontext())
    with activations(tmp_path) as saved:
        gradients(make(name), data, saved)
        alone = saved.stats()["saved_bytes"]
    with activations(tmp_path) as saved:
        model = Within(make(name), saved if inside else contextlib.nullcontext())
        limit = weight_bytes(model) // 3
        weights = tensorferry.offload.parameters(model, tmp_path, limit, keep_bytes=1024)
        optimizer = tensorferry.optim.AdamW(model.parameters(), nvme_path=tmp_path)
        actual = gradients(model, data, contextlib.nullcontext() if inside else saved)
        check_all_same(actual, expected)
        assert 0 < saved.stats()["saved_bytes"] <= alone
        optimizer.close()
        weights.close()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_activation_checkpointing_around_it_and_inside_it(tmp_path, reentrant, inside):
    model = deep(layers=4)
    x = torch.randn(64, 256, requires_grad=True)

    def run(around):
        def part(y):
            with around if inside else contextlib.nullcontext():
                return model(y)

        model.zero_grad()
        with contextlib.nullcontext() if inside else around:
            y = checkpoint(part, x * 2, use_reentrant=reentrant)
            loss = checkpoint(part, y, use_reentrant=reentrant).square().mean()
        loss.backward()
        return [param.grad.clone() for param in model.parameters()]

    expected = run(contextlib.nullcontext())
    with activations(tmp_path) as saved:
        check_all_same(run(saved), expected)
        stats = saved.stats()
        # What is computed again is not saved, except by the backward pass of a reentrant one, which
        # computes it where no hooks of torch are.
        if inside and not reentrant:
            assert stats["saved_bytes"] == 0
        elif not inside:
            assert 0 < stats["saved_bytes"] < 8 * x.nbytes


def test_a_compiled_model_saves_there_too(tmp_path):
    torch._dynamo.reset()
    x = torch.randn(64, 256)
    results = []
    with activations(tmp_path) as saved:
        for around in (contextlib.nullcontext(), saved):
            model = deep(layers=3)
            compiled = torch.compile(model, backend="aot_eager")
            with around:
                loss = compiled(x).square().mean()
            loss.backward()
            results.append([param.grad for param in model.parameters()])
        check_all_same(*results)
        assert saved.stats()["read_bytes"] > 0
    torch._dynamo.reset()


def test_a_graph_can_be_used_again_and_differentiated_twice(tmp_path):
    model = deep(layers=4)
    x = torch.randn(64, 256, requires_grad=True)

    def run(around):
        with around:
            loss = (model(x) ** 3).mean()
            twice = [torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2)]
            slope = torch.autograd.grad(loss, x, create_graph=True)[0]
            return [*twice, *torch.autograd.grad(slope.square().sum(), [*model.parameters()])]

    expected = run(contextlib.nullcontext())
    with activations(tmp_path) as saved:
        check_all_same(run(saved), expected)


def test_threads_share_it(tmp_path):
    model = deep(layers=4)
    inputs = [torch.randn(32, 256, requires_grad=True) for _ in range(4)]
    expected = [torch.autograd.grad(model(x).square().sum(), x)[0] for x in inputs]
    results = {}

    def run(number):
        for _ in range(5):
            with saved:
                loss = model(inputs[number]).square().sum()
            results[number] = torch.autograd.grad(loss, inputs[number])[0]

    with activations(tmp_path, 128 << 10) as saved:
        threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        check_all_same([results[number] for number in range(4)], expected)
        assert is_empty(saved)


# --- what is saved, and what stays ---


def test_one_storage_is_saved_once_whoever_saves_what_of_it(tmp_path):
    x = torch.randn(256, 256, requires_grad=True)
    with activations(tmp_path, MiB) as saved:
        with saved:
            y = x + 1
            q, k, v = y.chunk(3, dim=1)
            out = y.exp() * y.view(-1, 512).sin().view(256, 256) * y.t()
            out = out.sum() + (q.square() * k.square()).sum() + v.square().sum()
        # y, exp(y), sin(y) and their product; two squares
        assert saved.stats()["saved_bytes"] == 4 * 256 * 256 * 4 + 2 * 256 * 86 * 4
        out.backward()


def test_parameters_leaves_and_small_tensors_stay(tmp_path):
    layer = nn.Linear(256, 256)
    x = torch.randn(64, 256, requires_grad=True)
    with activations(tmp_path, keep_bytes=64 * 256 * 4 + 1) as saved:
        with saved:
            y = layer(x)
            loss = (y @ layer.weight.t() * y.exp()).sum()
        stats = saved.stats()
        assert stats["saved_bytes"] == 0
        assert stats["kept_bytes"] >= 2 * layer.weight.nbytes + x.nbytes
        loss.backward()
    with activations(tmp_path, keep_bytes=1) as saved:
        with saved:
            loss = layer(x).sum() + (x.view(-1) * x.view(-1)).sum()
        assert saved.stats()["saved_bytes"] == 0
        loss.backward()


def test_a_part_of_a_large_storage_is_saved_without_the_rest(tmp_path):
    data = torch.randn(1000, 256)
    layer = nn.Linear(256, 256)
    with activations(tmp_path) as saved:
        with saved:
            loss = layer(data[10:20]).sum()
        assert saved.stats()["saved_bytes"] == 10 * 256 * 4
        loss.backward()
        same(layer.weight.grad, torch.ones(256, 10) @ data[10:20])


def test_what_fits_into_half_of_the_memory_is_not_written(tmp_path):
    with activations(tmp_path, 64 * MiB) as saved:
        gradients(deep(), lambda: torch.randn(256, 256), saved)
        stats = saved.stats()
        assert stats["saved_bytes"] > 0
        assert stats["written_bytes"] == stats["read_bytes"] == stats["waited_seconds"] == 0


def test_what_is_in_memory_is_not_read_and_the_rest_is_read_once(tmp_path):
    model, x = deep(), torch.randn(256, 256)
    with activations(tmp_path, 2 * MiB) as saved:
        gradients(model, lambda: x, saved, passes=1)
        stats = saved.stats()
        assert stats["overflow_bytes"] == 0
        assert stats["written_bytes"] <= stats["saved_bytes"] - MiB
        assert stats["read_bytes"] <= stats["saved_bytes"] - 2 * MiB + x.nbytes


def test_a_graph_that_nobody_uses_takes_nothing(tmp_path):
    model = deep(layers=4)
    with activations(tmp_path) as saved:
        with saved:
            out = model(torch.randn(64, 256))
        assert saved.stats()["tensors"] > 0
        del out
        gc.collect()
        assert is_empty(saved)


def test_it_lives_as_long_as_a_graph_needs_it(tmp_path):
    model = deep(layers=4)
    x = torch.randn(64, 256)
    expected = gradients(model, lambda: x, contextlib.nullcontext(), passes=1)
    model.zero_grad()
    with tensorferry.offload.activations(tmp_path, 64 << 10, keep_bytes=1):
        loss = model(x).square().mean()
    assert list(tmp_path.iterdir())
    loss.backward()
    check_all_same([param.grad for param in model.parameters()], expected[1:])
    del loss
    gc.collect()
    assert not list(tmp_path.glob("*/*"))


# --- changes in place ---


@pytest.mark.parametrize("max_cpu_bytes", [4096, 64 << 10, MiB])
@pytest.mark.parametrize("keep_bytes", [1, MiB])
def test_a_tensor_that_is_changed_in_place_raises_as_torch_does(
    tmp_path, max_cpu_bytes, keep_bytes
):
    """Wherever it is by then: in memory, on its way, on the drive, or where it was."""
    x = torch.randn(64, 256, requires_grad=True)

    def run():
        y = x * 2
        z = y.square()  # saves y
        more = [z]
        for _ in range(8):
            more.append(more[-1].exp())
        with torch.no_grad():
            y.view(-1)[3:5].add_(1)
        more[-1].sum().backward()

    with pytest.raises(RuntimeError) as expected:
        run()
    with activations(tmp_path, max_cpu_bytes, keep_bytes) as saved:
        with saved, pytest.raises(RuntimeError) as caught:
            run()
        assert str(caught.value).partition(" is at version")[0] in str(expected.value)
        assert "is at version 1; expected version 0" in str(caught.value)


def test_a_tensor_that_is_changed_is_saved_anew(tmp_path):
    x = torch.randn(64, 256, requires_grad=True)
    y = torch.randn(64, 256)
    with activations(tmp_path) as saved:
        with saved:
            first = x * y
            other = y.clone()
            y.add_(1)
            second = x * y
        torch.autograd.grad(second.sum(), x)
        same(torch.autograd.grad((x * y).sum(), x)[0], y)
        with saved:
            second = x * y
        same(torch.autograd.grad(second.sum(), x)[0], y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            first.sum().backward()
        assert not torch.equal(other, y)


def test_weights_on_the_drive_do_not_switch_torchs_check_off(tmp_path):
    model = deep(layers=2)
    weights = tensorferry.offload.parameters(model, tmp_path, MiB, keep_bytes=1024)
    out = model(torch.randn(8, 256))
    with torch.no_grad():
        out.add_(1)  # which tanh has saved
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    weights.close()


# --- failures ---


def test_a_closed_one_is_refused_by_name(tmp_path):
    with activations(tmp_path) as saved:
        with saved:
            loss = deep(layers=4)(torch.randn(64, 256)).sum()
        saved.close()
        with pytest.raises(RuntimeError, match=r"call backward\(\) before close"):
            loss.backward()
        with pytest.raises(RuntimeError, match="closed"), saved:
            pass


@pytest.mark.parametrize("max_cpu_bytes", [0, -1, 1.5, "1"])
def test_limits_that_are_none_are_refused(tmp_path, max_cpu_bytes):
    with pytest.raises(ValueError, match="max_cpu_bytes must be a number of bytes"):
        tensorferry.offload.activations(tmp_path, max_cpu_bytes)


def test_a_full_drive_raises_and_training_goes_on_when_there_is_room(tmp_path):
    model, x = deep(), torch.randn(256, 256)
    expected = gradients(model, lambda: x, contextlib.nullcontext(), passes=1)
    with loop_mount(tmp_path, size="64M") as drive, activations(drive, MiB) as saved:
        fill_up(drive / "filler")
        with saved, pytest.raises(OSError) as caught:
            model(x)
        assert caught.value.errno == errno.ENOSPC
        del caught
        gc.collect()
        assert is_empty(saved)
        (drive / "filler").unlink()
        check_all_same(gradients(model, lambda: x, saved, passes=1), expected)


def test_a_drive_that_fails_raises_in_the_pass_that_needs_it(tmp_path):
    model, x = deep(layers=24), torch.randn(512, 256)
    with failing_drive(tmp_path) as drive, activations(drive.point, 2 * MiB) as saved:
        with saved:
            loss = model(x).square().mean()
        drive.lose()
        with pytest.raises(OSError) as caught:
            loss.backward()
        assert caught.value.errno == errno.EIO


# --- memory ---


def test_four_times_the_activations_take_the_memory_of_one(tmp_path):
    """96 MiB of saved tensors pass through 24 MiB: what a pass adds to the peak is that, and what
    torch needs at once."""
    out = check_python(
        """
        import sys, torch, tensorferry.offload
        def peak():
            with open("/proc/self/status") as file:
                return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) << 10
        torch.set_num_threads(1)
        layers = (torch.nn.Linear(256, 256) for _ in range(24))
        model = torch.nn.Sequential(*(part for one in layers for part in (one, torch.nn.Tanh())))
        x = torch.ones(4096, 256)
        model(x[:8]).sum().backward()
        with torch.no_grad():
            model(x)
        before = peak()
        activations = tensorferry.offload.activations(sys.argv[1], 24 << 20)
        for _ in range(3):
            with activations:
                loss = model(x).square().mean()
            loss.backward()
        stats = activations.stats()
        assert stats["saved_bytes"] >= 3 * (96 << 20), stats
        assert stats["buffer_bytes"] == 24 << 20 and stats["overflow_bytes"] == 0, stats
        print(peak() - before)
        activations.close()
        """,
        tmp_path,
        python=WARM_PYTHON,
    )
    assert int(out) < (24 + 24) * MiB
