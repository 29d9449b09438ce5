"""Programs that use safetensors, transformers and accelerate, on tensorferry by enable()."""

from pathlib import Path

import pytest

pytest.importorskip("safetensors")
pytest.importorskip("torch")

from programs import check_python, run_python
from warm_python import WARM_PYTHON

START = """
import sys, torch
import tensorferry.safetensors
from tensorferry._shared_handle import shared_handle

def moved():
    stats = shared_handle().stats()
    return stats["read_bytes"], stats["written_bytes"]

def is_ours(thing):
    return getattr(thing, "__code__", None) in CODES or (
        isinstance(thing, type) and issubclass(thing, tensorferry.safetensors.safe_open))

import tensorferry.safetensors.torch
import tensorferry.safetensors.numpy
CODES = {
    f.__code__
    for m in (tensorferry.safetensors, tensorferry.safetensors.torch, tensorferry.safetensors.numpy)
    for f in vars(m).values() if hasattr(f, "__code__")
}
"""

# Copies that a program imported by name, before or after enable().
NAMES = """
import safetensors, safetensors.torch, safetensors.numpy
from safetensors import safe_open
from safetensors.torch import load_file as my_load, save_file, load_model
things = [safetensors.safe_open, safetensors.serialize_file, safetensors.torch.save_file,
          safetensors.torch.load_file, safetensors.torch.save_model, safetensors.numpy.load_file,
          safe_open, my_load, save_file, load_model]
"""


@pytest.mark.parametrize("first", ["enable", "import"])
def test_names_are_ours_and_are_given_back(first):
    enable = "tensorferry.safetensors.enable()\n"
    check = """
def things():
    return [safetensors.safe_open, safetensors.serialize_file, safetensors.torch.save_file,
            safetensors.torch.load_file, safetensors.torch.save_model, safetensors.numpy.load_file,
            safe_open, my_load, save_file, load_model]

assert all(map(is_ours, things())), things()
tensorferry.safetensors.enable()
assert all(map(is_ours, things())), things()
import pickle
assert pickle.loads(pickle.dumps(my_load)) is my_load
tensorferry.safetensors.disable()
assert not any(map(is_ours, things())), things()
tensorferry.safetensors.disable()
from safetensors._safetensors_rust import safe_open as theirs
assert safe_open is theirs is safetensors.safe_open
"""
    parts = [enable, NAMES] if first == "enable" else [NAMES, enable]
    check_python(START + "".join(parts) + check, python=WARM_PYTHON)


def test_who_imported_from_tensorferry_keeps_it():
    check_python(
        START
        + """
from tensorferry.safetensors import safe_open
from tensorferry.safetensors.torch import load_file
import safetensors.torch
tensorferry.safetensors.enable()
tensorferry.safetensors.disable()
assert is_ours(safe_open) and is_ours(load_file)
assert not is_ours(safetensors.torch.load_file)
""",
        python=WARM_PYTHON,
    )


def test_with_mapping_only_saving_is_ours():
    check_python(
        START
        + """
import safetensors.torch
tensorferry.safetensors.enable(mapping=True)
assert is_ours(safetensors.torch.save_file)
assert not is_ours(safetensors.torch.load_file) and not is_ours(safetensors.safe_open)
tensorferry.safetensors.enable()
assert is_ours(safetensors.torch.load_file)
""",
        python=WARM_PYTHON,
    )


@pytest.mark.parametrize("value, wanted", [("1", True), ("0", False), ("", False)])
def test_a_variable_enables_it_at_the_start(tmp_path, value, wanted):
    start = Path(__file__).resolve().parents[2] / "python/tensorferry-deepspeed.pth"
    code = (
        start.read_text()
        + "from safetensors.torch import load_file\n"
        + START
        + f"assert is_ours(load_file) is {wanted}\n"
    )
    check_python(code, python=WARM_PYTHON, TENSORFERRY_SAFETENSORS=value)


def test_torch_is_imported_only_where_it_is_needed():
    check_python(
        """
import sys, tensorferry
tensorferry.safetensors.enable()
assert "torch" not in sys.modules and "numpy" not in sys.modules
from safetensors.numpy import load_file
assert "torch" not in sys.modules and load_file.__module__ == "safetensors.numpy"
assert load_file.__code__.co_filename.endswith("tensorferry/safetensors/numpy.py")
from safetensors.torch import load_file
assert load_file.__code__.co_filename.endswith("tensorferry/safetensors/torch.py")
tensorferry.safetensors.disable()
assert not load_file.__code__.co_filename.endswith("tensorferry/safetensors/torch.py")
tensorferry.safetensors.enable()
tensorferry.safetensors.disable()
assert not any("tensorferry" in type(finder).__module__ for finder in sys.meta_path)
"""
    )


def test_without_safetensors_the_error_says_what_to_do():
    code = """
import sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "safetensors":
            raise ModuleNotFoundError(f"No module named {name!r}", name="safetensors")

sys.meta_path.insert(0, Hide())
import torch, tensorferry.safetensors.torch as ours
ours.save_file({"a": torch.ones(2)}, sys.argv[1])
assert torch.equal(ours.load_file(sys.argv[1])["a"], torch.ones(2))
try:
    tensorferry.safetensors.safe_open(sys.argv[1], "tf")
except ModuleNotFoundError as error:
    print(error)
import tensorferry
tensorferry.safetensors.enable()
"""
    done = run_python(
        code.replace("import torch,", "import tensorferry, torch,"), "x", python=WARM_PYTHON
    )
    Path("x").unlink()
    assert "pip install safetensors" in done.stdout
    assert "safetensors is not installed: pip install safetensors" in done.stderr


TRANSFORMERS = (
    START
    + """
import logging, os, warnings
warnings.simplefilter("ignore")
before = sys.argv[2] == "before"
if before:
    tensorferry.safetensors.enable()
import transformers
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
if not before:
    import transformers.modeling_utils
    tensorferry.safetensors.enable()
config = transformers.LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, vocab_size=1000, tie_word_embeddings=True)
model = transformers.LlamaForCausalLM(config).eval()
tokens = torch.arange(16)[None]
wanted = model(tokens).logits

def loaded(folder, **options):
    read = moved()[0]
    copy = transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    size = sum(os.path.getsize(f"{folder}/{name}") for name in os.listdir(folder)
               if name.endswith(".safetensors"))
    assert moved()[0] - read >= size * 0.9, (moved()[0] - read, size)
    return copy

for name, options in (("whole", {}), ("shards", {"max_shard_size": "300KB"})):
    folder = f"{sys.argv[1]}/{name}"
    written = moved()[1]
    model.save_pretrained(folder, **options)
    assert moved()[1] > written
    assert (len(os.listdir(folder)) > 4) == (name == "shards")
    assert torch.equal(loaded(folder)(tokens).logits, wanted)
    half = loaded(folder, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16

tensorferry.safetensors.disable()
read = moved()
copy = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
assert torch.equal(copy(tokens).logits, wanted)
copy.save_pretrained(f"{sys.argv[1]}/again")
assert moved() == read
"""
)


@pytest.mark.parametrize("when", ["before", "after"])
def test_transformers_saves_and_loads(tmp_path, when):
    pytest.importorskip("transformers")
    done = run_python(
        TRANSFORMERS, tmp_path, when, timeout=300, python=WARM_PYTHON, OMP_NUM_THREADS="1"
    )
    assert done.returncode == 0, done.stderr


ACCELERATE = (
    START
    + """
import os, warnings
warnings.simplefilter("ignore")
import accelerate
from accelerate.utils import load_checkpoint_in_model, offload_state_dict
from accelerate.utils.offload import OffloadedWeightsLoader
tensorferry.safetensors.enable()

def model():
    torch.manual_seed(1)
    return torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))

first = model()
accelerator = accelerate.Accelerator(cpu=True)
folder = f"{sys.argv[1]}/saved"
written = moved()[1]
accelerator.save_model(first, folder, max_shard_size="300KB")
assert moved()[1] - written > 4 * 256 * 256 * 4
assert "model.safetensors.index.json" in os.listdir(folder)

def same(state):
    return all(torch.equal(state[name], value) for name, value in first.state_dict().items())

for device_map in (None, {"": "cpu"}, {"0": "cpu", "1": "cpu", "2": "cpu", "3": "cpu"}):
    second = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    read = moved()[0]
    load_checkpoint_in_model(second, folder, device_map=device_map)
    assert moved()[0] - read > 4 * 256 * 256 * 4
    assert same(second.state_dict())

# Weights that stay in the file, as accelerate's big-model inference has them.
tensorferry.safetensors.torch.save_file(first.state_dict(), f"{sys.argv[1]}/all.safetensors")
index = {name: {"safetensors_file": f"{sys.argv[1]}/all.safetensors", "weight_name": name}
         for name in first.state_dict()}
read = moved()[0]
weights = OffloadedWeightsLoader(index=index)
assert same(weights) and moved()[0] > read

third = model()
for value in third.parameters():
    torch.nn.init.zeros_(value)
accelerate.load_checkpoint_and_dispatch(third, folder, device_map={"0": "cpu", "1": "disk",
    "2": "cpu", "3": "disk"}, offload_folder=f"{sys.argv[1]}/offload")
with torch.no_grad():
    x = torch.ones(2, 256)
    assert torch.equal(third(x), first(x))

# A state of training.
prepared = accelerator.prepare(first)
accelerator.save_state(f"{sys.argv[1]}/state")
wanted = {name: value.clone() for name, value in first.state_dict().items()}
torch.nn.init.zeros_(first[0].weight)
read = moved()[0]
accelerator.load_state(f"{sys.argv[1]}/state")
assert moved()[0] > read
assert same(wanted)
"""
)


def test_accelerate_saves_loads_and_offloads(tmp_path):
    pytest.importorskip("accelerate")
    done = run_python(ACCELERATE, tmp_path, timeout=300, python=WARM_PYTHON, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
