"""torch.compile of models whose weights are on NVMe: the numbers of the same graphs in memory."""

import contextlib

import pytest

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

import tensorferry.offload
import tensorferry.optim
from offload_models import nothing_is_in_use, same
from torch import nn
from torch._dynamo.utils import counters

WIDTH = 96
WORDS = 60

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_compiler")


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.config.error_on_recompile = False
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(torch.tanh(x) * 3)


def net():
    torch.manual_seed(0)
    return Net()


def words(seed=1):
    return torch.randint(WORDS, (2, 7), generator=torch.Generator().manual_seed(seed))


def from_swap(model, path, units):
    return tensorferry.offload.parameters(model, path, 100_000, keep_bytes=64, units=units)


def from_files(model, path, units):
    state = {name: v.clone() for name, v in model.state_dict().items() if name != "head.weight"}
    safetensors_torch.save_file(state, path / "model.safetensors")
    return tensorferry.offload.checkpoint(model, path, 100_000, keep_bytes=64, units=units)


@torch.compiler.disable
def border(*_):
    pass


def with_borders(model, like, weights, units):
    """Ends graphs where those of the offloaded model end: at modules whose weights come."""
    whole = [module for module in like.modules() if isinstance(module, units)]
    inside = {part for module in whole for part in module.modules()} - set(whole)
    for mine, theirs in zip(model.modules(), like.modules()):
        if (theirs in weights._needs) and theirs not in inside:
            mine.register_forward_pre_hook(border, prepend=True)
            mine.register_forward_hook(border, always_call=True)
    return model


def compiled(model, way, backend="aot_eager"):
    if way == "torch.compile":
        return torch.compile(model, backend=backend)
    for module in model.blocks if way == "layers" else [model]:
        module.compile(backend=backend)
    return model


@contextlib.contextmanager
def compiled_once():
    torch._dynamo.config.error_on_recompile = True
    before = counters["stats"]["unique_graphs"]
    yield
    torch._dynamo.config.error_on_recompile = False
    assert counters["stats"]["unique_graphs"] == before > 0


def losses(model, params, optimizer=None, steps=1):
    found = []
    for seed in range(steps):
        loss = model(words(seed)).square().mean()
        loss.backward()
        found.append(loss.detach())
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(found), [p.grad for p in params]


WAYS = pytest.mark.parametrize("way", ["torch.compile", "model.compile", "layers"])
UNITS = pytest.mark.parametrize("units", [(), (Block,)], ids=["modules", "blocks"])


@WAYS
@UNITS
@pytest.mark.parametrize("offload", [from_swap, from_files])
def test_inference_gives_the_same_bits(tmp_path, way, units, offload):
    model, other = net().eval(), net().eval()
    with offload(model, tmp_path, units) as weights, torch.no_grad():
        wanted = compiled(with_borders(other, model, weights, units), way)
        mine = compiled(model, way)
        for number in range(4):
            same(mine(words(number)), wanted(words(number)))
            if number == 1:
                with compiled_once():
                    same(mine(words(7)), wanted(words(7)))
        assert nothing_is_in_use(weights)
        assert weights.stats()["overflows"] == 0


@WAYS
@UNITS
def test_training_gives_the_same_bits(tmp_path, way, units):
    model, other = net(), net()
    with from_swap(model, tmp_path, units) as weights:
        wanted = compiled(with_borders(other, model, weights, units), way)
        mine = compiled(model, way)
        for number in range(3):
            with compiled_once() if number == 2 else contextlib.nullcontext():
                found = losses(mine, list(model.parameters()))
                expected = losses(wanted, list(other.parameters()))
            same(found[0], expected[0])
            for gradient, like in zip(found[1], expected[1]):
                same(gradient, like)
        assert nothing_is_in_use(weights)


def test_states_and_gradients_may_be_on_the_drive_too(tmp_path):
    model, other = net(), net()
    with from_swap(model, tmp_path, (Block,)) as weights:
        optimizer = tensorferry.optim.AdamW(
            model.parameters(), nvme_path=tmp_path, offload_gradients=True
        )
        wanted = compiled(with_borders(other, model, weights, (Block,)), "torch.compile")
        mine = compiled(model, "torch.compile")
        fused = torch.optim.AdamW(other.parameters(), lr=1e-3, weight_decay=1e-2, fused=True)
        same(
            losses(mine, [], optimizer, steps=4)[0],
            losses(wanted, [], fused, steps=4)[0],
        )
        for name, value in model.state_dict().items():
            same(value, other.state_dict()[name])
        optimizer.close()


def test_a_part_of_a_unit_may_be_compiled_alone(tmp_path):
    """Nobody holds its weights then, so its own hooks do."""
    model, other = net().eval(), net().eval()
    x = torch.randn(3, WIDTH)
    with from_swap(model, tmp_path, (Block,)) as weights, torch.no_grad():
        part, like = (torch.compile(m.blocks[1].up, backend="aot_eager") for m in (model, other))
        for _ in range(3):
            same(part(x), like(x))
            same(model(words()), other(words()))
        assert nothing_is_in_use(weights)


def test_an_error_inside_a_graph_leaves_nothing_in_use(tmp_path):
    model = net().eval()
    with from_swap(model, tmp_path, (Block,)) as weights, torch.no_grad():
        mine = compiled(model, "torch.compile")
        expected = mine(words())
        with pytest.raises((IndexError, RuntimeError)):
            mine(words() + WORDS)
        assert nothing_is_in_use(weights)
        same(mine(words()), expected)


def test_inductor_gives_the_same_bits(tmp_path):
    model, other = net(), net()
    with from_swap(model, tmp_path, (Block,)) as weights:
        wanted = compiled(with_borders(other, model, weights, (Block,)), "layers", "inductor")
        mine = compiled(model, "layers", "inductor")
        for _ in range(2):
            found = losses(mine, list(model.parameters()))
            expected = losses(wanted, list(other.parameters()))
        same(found[0], expected[0])
        for gradient, like in zip(found[1], expected[1]):
            same(gradient, like)


def test_a_llama_of_transformers_compiled_by_inductor_gives_the_same_bits(tmp_path):
    """Compiling takes most of its time: no other test has the default backend on such a model."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    other = transformers.LlamaForCausalLM(config).eval()
    other.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).eval()
    block = (transformers.models.llama.modeling_llama.LlamaDecoderLayer,)
    with tensorferry.offload.checkpoint(model, tmp_path, 40_000, keep_bytes=64, units=block) as w:
        wanted = torch.compile(with_borders(other, model, w, block))
        mine = torch.compile(model)
        with torch.no_grad():
            for seed in range(2):
                tokens = words(seed)
                same(mine(tokens, use_cache=False).logits, wanted(tokens, use_cache=False).logits)
        assert w.stats()["written_bytes"] == 0 and w.stats()["read_bytes"] > 0
