"""What state_dict() returns of weights on NVMe: it is read, saved and loaded, and never changed."""

import copy
import io
import pickle

import pytest

torch = pytest.importorskip("torch")

import tensorferry
from offload_models import make, offloaded

MODELS = ["mlp", "conv_net", "tied"]  # contiguous, in another order of memory, shared


def plain(state):
    return {name: value.clone() for name, value in state.items()}


def assert_same(state, wanted):
    assert list(state) == list(wanted)
    for name, value in wanted.items():
        assert type(value) is torch.Tensor and torch.equal(state[name], value), name
        assert state[name].stride() == value.stride()


CHANGES = {
    "zero_": lambda w: w.zero_(),
    "add_": lambda w: w.add_(1),
    "+=": lambda w: w.__iadd__(1),
    "copy_": lambda w: w.copy_(torch.ones(w.shape)),
    "copy_ after detach": lambda w: w.detach().copy_(torch.ones(w.shape)),
    "data": lambda w: w.data.zero_(),
    "other data": lambda w: setattr(w, "data", torch.zeros(w.shape)),
    "an element": lambda w: w.__setitem__((0, 0), 1.0),
    "a row": lambda w: w[0].fill_(0),
    "flat": lambda w: w.view(-1).mul_(2),
    "transposed": lambda w: w.t().zero_(),
    "out": lambda w: torch.add(w, 1, out=w),
    "foreach": lambda w: torch._foreach_mul_([torch.ones(2), w], 0.5),
    "init": torch.nn.init.zeros_,
    "index": lambda w: w.index_fill_(0, torch.tensor([0]), 1.0),
    "numpy": lambda w: w.numpy().fill(0),
    "shared": lambda w: w.share_memory_(),
    "dlpack": lambda w: torch.from_dlpack(w).zero_(),
    "optimizer": lambda w: step(torch.nn.Parameter(w)),
}


def step(param):
    param.sum().backward()
    torch.optim.SGD([param], lr=0.1).step()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_in_place_is_refused(tmp_path, name, mode):
    if name == "optimizer" and mode is not torch.enable_grad:
        pytest.skip("there is no backward pass")
    model = make("mlp")
    wanted = plain(model.state_dict())
    with offloaded(model, tmp_path):
        state = model.state_dict()
        with pytest.raises((RuntimeError, ValueError)) as caught, mode():
            CHANGES[name](state["0.weight"])
        if name == "numpy":
            assert "read-only" in str(caught.value)
        else:
            assert "weight on NVMe" in str(caught.value) and "clone()" in str(caught.value)
        assert_same(state, wanted)
        assert_same(model.state_dict(), wanted)


FILLS = {
    "read": lambda w, path: tensorferry.Handle().read(w, path).wait(),
    "read_now": lambda w, path: tensorferry.Handle().read_now(w, path),
    "read_many": lambda w, path: tensorferry.Handle().read_many([(w, path)]).wait(),
    "a view": lambda w, path: tensorferry.Handle().read_now(w[1:], path),
    "detached": lambda w, path: tensorferry.Handle().read_now(w.detach(), path),
    "a parameter": lambda w, path: tensorferry.Handle().read_now(torch.nn.Parameter(w), path),
    "aio_read": lambda w, path: tensorferry.aio_read(w, str(path), 1 << 20, 8, False, True, False),
    "aio_handle": lambda w, path: tensorferry.aio_handle().sync_pread(w, str(path)),
    "copy": lambda w, path: tensorferry.copy(w, torch.ones(w.shape)),
    "swap space": lambda w, path: swap_in(w, path.parent),
}


def swap_in(weight, directory):
    with tensorferry.SwapSpace(directory, buffer_bytes=1 << 20) as space:
        space.put("ones", torch.ones(weight.shape)).wait()
        space.get("ones", weight).wait()


@pytest.mark.parametrize("name", FILLS)
def test_a_read_into_it_is_refused(tmp_path, name):
    model = make("mlp")
    wanted = plain(model.state_dict())
    file = tmp_path / "ones"
    torch.ones(wanted["0.weight"].shape).numpy().tofile(file)
    with offloaded(model, tmp_path):
        state = model.state_dict()
        with pytest.raises(RuntimeError, match="a read into this tensor would change .* clone()"):
            FILLS[name](state["0.weight"], file)
        assert_same(state, wanted)
        with tensorferry.Handle() as handle:  # it may be written, and a copy of it read into
            handle.write(state["0.weight"], tmp_path / "saved").wait()
            handle.read(state["0.weight"].clone(), file).wait()
        assert (tmp_path / "saved").read_bytes() == wanted["0.weight"].numpy().tobytes()


def test_weights_that_stay_in_memory_are_changed_as_with_torch(tmp_path):
    model = make("mlp")
    with offloaded(model, tmp_path, keep_bytes=8192, share="all"):
        model.state_dict()["0.bias"].fill_(2)
        assert (model[0].bias == 2).all()


@pytest.mark.parametrize("name", MODELS)
def test_it_is_saved_and_loaded(tmp_path, name):
    model = make(name)
    wanted = plain(model.state_dict())
    with offloaded(model, tmp_path):
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        assert_same(torch.load(file, weights_only=True), wanted)
        assert_same(pickle.loads(pickle.dumps(model.state_dict())), wanted)
        other = make(name)
        with torch.no_grad():
            for param in other.parameters():
                param.zero_()
        other.load_state_dict(model.state_dict())
        assert_same(other.state_dict(), wanted)
        model.load_state_dict({n: value * 2 for n, value in model.state_dict().items()})
        assert_same(model.state_dict(), {n: value * 2 for n, value in wanted.items()})
        model.load_state_dict(model.state_dict())
        assert_same(model.state_dict(), {n: value * 2 for n, value in wanted.items()})


def test_it_is_loaded_in_inference_mode(tmp_path):
    """Where autograd sees no change."""
    model = make("mlp")
    wanted = {name: value * 2 for name, value in model.state_dict().items()}
    with offloaded(model, tmp_path), torch.inference_mode():
        model.load_state_dict(wanted)
        assert_same(plain(model.state_dict()), wanted)


@pytest.mark.parametrize("name", MODELS)
def test_safetensors_saves_it(tmp_path, name):
    safetensors = pytest.importorskip("safetensors.torch")
    model = make(name)
    wanted = plain(model.state_dict())
    with offloaded(model, tmp_path):
        state = {n: value.contiguous() for n, value in model.state_dict().items()}
        state.pop("head.weight", None)  # safetensors does not save a tensor twice
        safetensors.save_file(state, tmp_path / "saved.safetensors")
        safetensors.save_model(model, tmp_path / "model.safetensors")
        for file in ("saved.safetensors", "model.safetensors"):
            loaded = safetensors.load_file(tmp_path / file)
            assert set(wanted) - set(loaded) <= {"head.weight", "embedding.weight"}
            assert all(torch.equal(loaded[n], wanted[n]) for n in loaded)


@pytest.mark.parametrize("name", MODELS)
def test_it_is_copied_and_converted(tmp_path, name):
    model = make(name)
    wanted = plain(model.state_dict())
    with offloaded(model, tmp_path):
        state = model.state_dict()
        copied = copy.deepcopy(state)
        assert_same(copied, wanted)
        if name == "tied":
            shared = copied["head.weight"], copied["embedding.weight"]
            assert shared[0].data_ptr() == shared[1].data_ptr()
        for value in copied.values():
            assert type(value) is torch.Tensor
            value.zero_()  # it is the user's own
        for n, value in state.items():
            assert torch.equal(value.to("cpu"), wanted[n])
            assert torch.equal(value.to(torch.float64), wanted[n].to(torch.float64))
            assert type(value.to(torch.float64)) is torch.Tensor
            assert torch.equal(torch.from_numpy(value.numpy().copy()), wanted[n])
            assert value.tolist() == wanted[n].tolist()
            assert "tensor(" in repr(value) or "MappedWeight(" in repr(value)
        assert_same(model.state_dict(), wanted)


def test_it_is_computed_with(tmp_path):
    model, x = make("mlp"), torch.ones(2, 192, requires_grad=True)
    expected = model(x)
    expected.sum().backward()
    slope, x.grad = x.grad, None
    with offloaded(model, tmp_path):
        state = model.state_dict()
        fresh = make("mlp")
        result = torch.func.functional_call(fresh, state, x)
        result.sum().backward()
        assert torch.equal(result, expected) and torch.equal(x.grad, slope)
        fresh.load_state_dict(state, assign=True)
        assert torch.equal(fresh(x), expected)
