"""Calls of modules inside modules whose weights are in memory."""

from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")

from offload_models import WIDTH, nothing_is_in_use, offloaded, same
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")


class Nested(nn.Module):
    """Calls itself, and its linear layer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.stop = False

    def forward(self, x, depth=2):
        if self.stop and depth == 0:
            raise KeyboardInterrupt
        x = self.linear(x).tanh()
        return self(x, depth - 1) if depth else x


def test_modules_inside_a_unit_that_call_each_other_and_themselves(tmp_path):
    """Those inside a unit that is in memory add nothing to what the outer call does."""

    def build():
        torch.manual_seed(7)
        return nn.Sequential(Nested(), nn.Tanh(), Nested())

    model, other = build(), build()
    x = torch.randn(3, WIDTH)
    with offloaded(model, tmp_path, units=(Nested,)) as weights:
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            for module, wanted in ((model, other), (model[2], other[2])):
                with mode():
                    same(module(x), wanted(x))
                    assert nothing_is_in_use(weights)
                    model[2].stop = True
                    with pytest.raises(KeyboardInterrupt):
                        module(x)
                    model[2].stop = False
                    same(model[2].linear(x), other[2].linear(x))
                    assert nothing_is_in_use(weights)


class Pair(NamedTuple):
    result: torch.Tensor
    weight: torch.Tensor


class Returns(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = Nested().linear
        self.weight = Weight()

    def forward(self, x):
        self.kept = self.weight()
        return Pair(self.linear(x) @ self.kept, self.kept)


class Weight(nn.Module):
    def __init__(self):
        super().__init__()
        self.values = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self):
        return self.values


def test_a_weight_that_a_module_inside_a_unit_returns_keeps_its_values(tmp_path):
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        model = nn.Sequential(Returns())
        with offloaded(model, tmp_path, units=(Returns,)), mode():
            pair = model(torch.ones(1, WIDTH))
            same(pair.weight, torch.ones(WIDTH, WIDTH))
            same(model[0].kept, torch.ones(WIDTH, WIDTH))


def test_gradients_that_are_switched_on_inside_a_unit(tmp_path):
    class Mixed(Nested):
        def forward(self, x):
            with torch.enable_grad():
                return self.linear(x)

    torch.manual_seed(7)
    model = nn.Sequential(Mixed(), nn.Linear(WIDTH, WIDTH))
    expected = model[0].linear.weight.detach().clone()
    x = torch.randn(3, WIDTH, requires_grad=True)
    with offloaded(model, tmp_path, units=(Mixed,)):
        with torch.no_grad():
            y = model[0](x)
        y.sum().backward()
    torch.testing.assert_close(x.grad, expected.sum(0).expand_as(x))
