"""Objects of all kinds that torch.save can save."""

import collections

import torch

PLAIN_DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.complex128, torch.complex32, torch.uint8, torch.int8, torch.int16, torch.int32),
    *(torch.int64, torch.bool, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu),
]


def of_dtype(dtype, count=1000):
    torch.manual_seed(count)
    size = count * torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8)
    return raw.view(dtype)


def shared_views():
    base = torch.randn(100, 50)
    return dict(base=base, row=base[3], part=base[10:20, ::2], turned=base.t(), same=base)


def module_and_optimizer():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.BatchNorm1d(32))
    model.add_module("tied", torch.nn.Linear(64, 32))
    model.tied.weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model[:2](torch.randn(8, 64)).sum().backward()
    optimizer.step()
    return model, optimizer


def training_state():
    model, optimizer = module_and_optimizer()
    return dict(model=model.state_dict(), optimizer=optimizer.state_dict(), epoch=3, name="run 1")


def quantized():
    with_one = torch.quantize_per_tensor(torch.randn(40), 0.1, 3, torch.qint8)
    scales, zeros = torch.rand(4) + 0.1, torch.zeros(4, dtype=torch.int64)
    return [with_one, torch.quantize_per_channel(torch.randn(4, 9), scales, zeros, 0, torch.qint8)]


# Loaded with weights_only=True too.
SAFE = {
    "number": lambda: 5,
    "text": lambda: "weights",
    "none": lambda: None,
    "nothing in it": dict,
    "tensor": lambda: torch.randn(10, 3),
    "no dimensions": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0, 4),
    "empty among others": lambda: [torch.ones(3), torch.empty(0), torch.ones(5), torch.empty(0)],
    "views": shared_views,
    "a view of a large storage": lambda: torch.arange(100_000)[5:9],
    "parameters": lambda: torch.nn.ParameterList([torch.ones(3), torch.zeros(2)]).state_dict(),
    "a parameter": lambda: torch.nn.Parameter(torch.randn(7), requires_grad=False),
    "requires grad": lambda: torch.randn(5, requires_grad=True),
    "nested": lambda: {"a": [1, (2.0, {"b": torch.ones(2)})], 3: collections.OrderedDict(x=True)},
    "training": training_state,
    "many small": lambda: {f"layer.{i}": torch.full((i % 7 + 1,), i) for i in range(500)},
    "larger than a window": lambda: [torch.randn(3 << 20), torch.randn(5), torch.randn(5 << 20)],
    "sparse": lambda: torch.eye(30).to_sparse(),
    "sparse rows": lambda: torch.eye(30).to_sparse_csr(),
    "quantized": quantized,
    "conjugate": lambda: torch.randn(5, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(5, dtype=torch.complex64).conj().imag,
    "meta": lambda: torch.empty(4, 5, device="meta"),
} | {str(dtype): (lambda dtype=dtype: of_dtype(dtype)) for dtype in PLAIN_DTYPES}


class Holder:
    """An object of a class of the user's, which looks at its tensors when it is loaded."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.total = float(tensor.sum())

    def __setstate__(self, state):
        self.__dict__.update(state)
        assert float(self.tensor.sum()) == self.total


UNSAFE = {
    "module": lambda: module_and_optimizer()[0],
    "untyped storage": lambda: [torch.ones(3).untyped_storage(), torch.zeros(2)],
    "typed storage": lambda: torch.storage.TypedStorage([1.0, 2.0], dtype=torch.float32),
    "class": lambda: [Holder(torch.randn(1000)), Holder(torch.randn(3 << 20))],
    "nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "set": lambda: {1, 2, frozenset({3})},
}
