"""Models, gradients and the reference that optimizers with states on NVMe are held against."""

import copy

import tensorferry.optim
import torch
from tensorferry.optim.stored_gradient import StoredGradient

MiB = 1 << 20

# On a busy machine threads that wait for each other take a hundred times as long as the work. The
# numbers are the same; one test asks for more of them.
torch.set_num_threads(1)

# Small enough that every parameter of these tests is cut, and every step waits.
TINY = dict(buffer_count=1, buffer_bytes=1)

SHAPES = {
    "scalar": (),
    "one": (1,),
    "empty": (0, 3),
    "odd": (7, 13),
    "page": (1024,),
    "past a page": (4097,),
    "cut": (3, 5003),
    "four": (2, 3, 5, 7),
}


def parameters(dtype=torch.float32, seed=0, shapes=SHAPES):
    """Parameters of many shapes, among them ones that are dense but not contiguous."""
    generator = torch.Generator().manual_seed(seed)

    def values(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    tensors = [values(*shape) for shape in shapes.values()]
    tensors.append(values(4, 6, 5, 5).to(memory_format=torch.channels_last))
    tensors.append(values(70, 90).t())
    tensors.append(values(6, 7, 8).permute(1, 2, 0))
    return [torch.nn.Parameter(tensor) for tensor in tensors]


def copies(params):
    """Parameters of their own with the same values in the same order of memory."""
    return [torch.nn.Parameter(param.detach().clone(), param.requires_grad) for param in params]


def give_gradients(step, *sides, skip=()):
    """The same gradients to the parameters of each side; none to those numbered in `skip`.

    Some of the first side lie in memory in another order than their parameter, which is ours to
    get right; torch's fused kernels take them for what they are not."""
    for side, params in enumerate(sides):
        generator = torch.Generator().manual_seed(1000 + step)
        for number, param in enumerate(params):
            gradient = torch.randn(param.shape, generator=generator).to(param.dtype)
            if number in skip:
                param.grad = None
            elif side == 0 and number % 3 == 2:
                param.grad = gradient
            else:
                param.grad = torch.empty_like(param).copy_(gradient)


def compute_gradients(step, *sides):
    """The same gradients to the parameters of each side, as a backward pass brings them."""
    for params in sides:
        generator = torch.Generator().manual_seed(1000 + step)
        factors = [torch.randn(p.shape, generator=generator).to(p.dtype) for p in params]
        sum((param * factor).sum() for param, factor in zip(params, factors)).backward()


def on_drive(param):
    """Whether offload_gradients has taken its gradient."""
    return isinstance(param.grad, StoredGradient)


def assert_same(ours, theirs, when=""):
    """Equal to the last bit."""
    assert len(ours) == len(theirs)
    for number, (one, other) in enumerate(zip(ours, theirs)):
        assert one.dtype == other.dtype and one.shape == other.shape
        same = torch.equal(one.detach(), other.detach())
        assert same, f"parameter {number} of shape {tuple(one.shape)} differs {when}"


def assert_same_states(ours, theirs):
    """The state_dict()s of two optimizers, to the last bit; masters where both have them."""
    one, other = ours["state"], theirs["state"]
    for number in other:
        if number not in one:  # an empty parameter has none with us
            assert all(value.numel() == 0 or value.dim() == 0 for value in other[number].values())
            continue
        names = [name for name in one[number] if name != "master" or name in other[number]]
        assert sorted(names) == sorted(other[number]), number
        for name in names:
            mine, their = one[number][name], other[number][name]
            if isinstance(their, torch.Tensor):
                assert mine.dtype == their.dtype and mine.shape == their.shape, (number, name)
                assert torch.equal(mine, their), (number, name)
            else:
                assert mine == their, (number, name)


def both(tmp_path, make, params=None, **options):
    """(our parameters, our optimizer, torch's parameters, torch's optimizer), from the same
    `make(params)`."""
    mine = parameters() if params is None else params
    theirs = copies(mine)
    ours = tensorferry.optim.offload(make(mine), tmp_path, **(TINY | options))
    return mine, ours, theirs, make(theirs)


def small_model(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(33, 130),
        torch.nn.LayerNorm(130),
        torch.nn.GELU(),
        torch.nn.Linear(130, 70, bias=False),
        torch.nn.Tanh(),
        torch.nn.Linear(70, 5),
    )
    return model.to(dtype)


def twin(model):
    return copy.deepcopy(model)


def batch(step, dtype=torch.float32, rows=9):
    generator = torch.Generator().manual_seed(77 + step)
    return torch.randn(rows, 33, generator=generator).to(dtype)


def loss_of(model, step, rows=9):
    dtype = next(model.parameters()).dtype
    return model(batch(step, dtype, rows)).float().pow(2).mean()
