"""Models for the tests of offload.parameters, and how they are trained and compared."""

import contextlib

import tensorferry.offload
import tensorferry.optim
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 192


def mlp():
    return nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH),
        nn.GELU(),
        nn.LayerNorm(4 * WIDTH),
        nn.Linear(4 * WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
    )


def conv_net():
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.ConvTranspose2d(64, 32, 3),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(512, WIDTH),
    )
    return net.to(memory_format=torch.channels_last)


class LastOutput(nn.Module):
    """The output of a recurrent network without its state."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


def lstm():
    return LastOutput(nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True))


def encoder():
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 3)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


class Tied(nn.Module):
    """The head is the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(300, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 300)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(torch.relu(self.middle(self.embedding(tokens))))


class Repeated(nn.Module):
    """One module several times in a pass, and one that has two parents."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.first = nn.Sequential(self.block, nn.Linear(WIDTH, WIDTH))
        self.second = nn.Sequential(self.block, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        for _ in range(3):
            x = self.block(x)
        return self.second(self.first(x)) + x


class RandomDepth(nn.Module):
    """Another order, and another number of layers, in each pass."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x):
        order = torch.randperm(8).tolist()
        for number in order[: 2 + order[0]]:
            x = x + torch.tanh(self.layers[number](x))
        return x


class OwnWeights(nn.Module):
    """Weights of the model itself, in lists, returned by a module and inside frozen ones."""

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

        def forward(self):
            return self.rows

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.listed = nn.ParameterList([torch.randn(WIDTH, WIDTH) / WIDTH for _ in range(2)])
        self.named = nn.ParameterDict({"a": torch.randn(WIDTH, WIDTH) / WIDTH})
        self.table = self.Table()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.old_normed = nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        for weight in [self.scale, *self.listed, self.named["a"], self.table()]:
            x = x + x @ weight + weight[0] * weight.exp()[1]
        return self.old_normed(self.normed(self.frozen(x)))


class Checkpointed(nn.Module):
    """Layers that are computed again in the backward pass."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, WIDTH),
                nn.LayerNorm(WIDTH),
                nn.Tanh(),
                nn.Dropout(0.1),
                nn.Unflatten(-1, (3, 8, 8)),
                nn.Conv2d(3, 3, 3, padding=1),
                nn.Flatten(),
            )
            for _ in range(5)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class Holder(nn.Module):
    """A forward that uses the weights of its children without calling them."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.other(nn.functional.linear(x, self.inside.weight))


def rows(*shape):
    return lambda: torch.randn(*shape)


MODELS = {
    "mlp": (mlp, rows(5, WIDTH)),
    "conv_net": (conv_net, rows(4, 3, 8, 8)),
    "lstm": (lstm, rows(3, 7, WIDTH)),
    "encoder": (encoder, rows(2, 6, WIDTH)),
    "attention": (Attention, rows(2, 6, WIDTH)),
    "tied": (Tied, lambda: torch.randint(300, (3, 9))),
    "repeated": (Repeated, rows(4, WIDTH)),
    "random_depth": (RandomDepth, rows(4, WIDTH)),
    "own_weights": (OwnWeights, rows(4, WIDTH)),
    "reentrant": (lambda: Checkpointed(True), lambda: torch.randn(4, WIDTH, requires_grad=True)),
    "not_reentrant": (lambda: Checkpointed(False), rows(4, WIDTH)),
    "holder": (Holder, rows(4, WIDTH)),
}


def make(name):
    torch.manual_seed(7)
    return MODELS[name][0]()


def weight_bytes(model):
    return sum(param.nbytes for param in model.parameters())


def limit_of(model, share):
    return {"third": weight_bytes(model) // 3, "less": 5000, "all": 1 << 30}[share]


@contextlib.contextmanager
def offloaded(model, path, share="third", **options):
    limit = limit_of(model, share)
    options.setdefault("keep_bytes", 1024)
    options.setdefault("units", (Holder,))
    weights = tensorferry.offload.parameters(model, path, limit, **options)
    yield weights
    weights.close()


def same(actual, expected):
    """Equal to the last bit, and numbers at all."""
    assert not expected.isnan().any()
    assert torch.equal(actual, expected), (actual - expected).abs().max()


def nothing_is_in_use(weights):
    return all(unit.users == 0 for unit in weights._residency.units)


def train(model, steps, data, optimizer=None, micro_batches=1, after=lambda: None):
    """Losses, and the gradients of the last step where nobody has taken them."""
    torch.manual_seed(11)
    losses = []
    for _ in range(steps):
        if optimizer is not None:
            optimizer.zero_grad()
        for _ in range(micro_batches):
            loss = model(data()).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
        after()
        if optimizer is not None:
            optimizer.step()
    return torch.stack(losses), [param.grad for param in model.parameters()]


@contextlib.contextmanager
def adamw(model, path, lr=1e-2, **options):
    optimizer = tensorferry.optim.AdamW(model.parameters(), lr=lr, nvme_path=path, **options)
    yield optimizer
    optimizer.close()
