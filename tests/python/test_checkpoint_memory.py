"""How much memory savers and loaders take beside the tensors: their windows, and no more.

A process of its own, whose peak does not depend on what else runs."""

import pytest

pytest.importorskip("torch")

from programs import check_python
from warm_python import WARM_PYTHON

PROGRAM = """
import gc, os, sys, warnings
import torch
import torch.distributed.checkpoint as dcp
from tensorferry import checkpoint
from tensorferry.dcp import Reader, Writer

warnings.simplefilter("ignore")
torch.set_num_threads(1)
os.chdir(sys.argv[1])
MIB = 1 << 20
TENSORS, EACH = 4, 64 * MIB
kind = sys.argv[2]

def facts(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) << 10

def added(call):
    "What a call adds to the peak, and what it returns."
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
    before = facts("VmRSS")
    result = call()
    return facts("VmHWM") - before, result

def save(state):
    if kind in ("torch", "huggingface"):
        dcp.save(state, storage_writer=Writer(kind, layout=kind))
    else:
        checkpoint.save(state, kind)

def load(state):
    if kind not in ("torch", "huggingface"):
        return checkpoint.load(kind)
    dcp.load(state, storage_reader=Reader(kind))
    return state

small = {"x": torch.ones(1000)}
save(small), load(small)  # imports, threads, slots
state = {str(i): torch.full((EACH // 4,), float(i)) for i in range(TENSORS)}
saving, _ = added(lambda: save(state))
blank = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
loading, loaded = added(lambda: load(blank))
for name, tensor in state.items():
    assert torch.equal(loaded[name], tensor)
print(saving // MIB, loading // MIB)
"""


@pytest.mark.parametrize("kind", ["model.pt", "model.safetensors", "torch", "huggingface"])
def test_tensors_of_256_mib_pass_through_half_of_that(tmp_path, kind):
    said = check_python(PROGRAM, tmp_path, kind, python=WARM_PYTHON)
    saving, loading = map(int, said.split())
    assert saving < 128, "a save copies tensors"
    own = 256 if kind.startswith("model") else 0  # what it returns
    assert loading < own + 128, "a load has tensors twice"
