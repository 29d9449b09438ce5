"""`tensorferry snapshot`, on snapshots of a run that has ended."""

import json
import subprocess

import pytest
from ferry_program import WITH_PACKAGE
from warm_python import WARM_PYTHON

MAKER = """
import os, tensorferry.offload, tensorferry.optim, tensorferry.snapshot, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.BatchNorm1d(512))
os.mkdir("nvme")
weights = tensorferry.offload.parameters(model, "nvme", keep_bytes=4096, checksums=True)
optimizer = tensorferry.optim.AdamW(model.parameters(), nvme_path="nvme", checksums=True)
for name in ("first", "second"):
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    tensorferry.snapshot.take("snapshots", model=model, optimizer=optimizer, name=name)
torch.save({name: value.clone() for name, value in model.state_dict().items()}, "model.pt")
weights.close()
optimizer.close()
"""


@pytest.fixture
def made(ferry):
    subprocess.run([*WARM_PYTHON, "-c", MAKER], cwd=ferry.place, env=WITH_PACKAGE, check=True)
    return ferry.place


def test_snapshots_are_listed_verified_exported_and_dropped(made, ferry):
    listed = json.loads(ferry("snapshot", "list", "snapshots", "--json").stdout)["snapshots"]
    assert [one["name"] for one in listed] == ["first", "second"]
    assert "second" in ferry("snapshot", "list", "snapshots").stdout
    assert "sound: " in ferry("snapshot", "verify", "snapshots").stdout
    said = ferry("snapshot", "export", "snapshots", "weights.safetensors").stdout
    assert "wrote 7 tensors" in said
    ferry("checkpoint", "compare", "model.pt", "weights.safetensors")
    ferry("snapshot", "export", "snapshots", "weights.pt", "--name", "first", "--json")
    ferry("checkpoint", "compare", "model.pt", "weights.pt", code=1)
    ferry("snapshot", "export", "snapshots", "folder", "--format", "dcp")
    ferry("checkpoint", "compare", "model.pt", "folder")
    refused = ferry("snapshot", "drop", "snapshots", "third", code=2).stderr
    assert "has no snapshot 'third': it has first, second" in refused
    assert "dropped first" in ferry("snapshot", "drop", "snapshots", "first").stdout
    [file] = made.glob("nvme/tensorferry-snapshots-*/*.model-0.0")
    with open(file, "r+b") as changed:
        changed.write(b"damaged")
    assert "checksum is wrong" in ferry("snapshot", "verify", "snapshots", code=1).stderr
    ferry("snapshot", "drop", "snapshots", "second")
    assert ferry("snapshot", "list", "snapshots").stdout == "no snapshots\n"
    assert not list(made.glob("nvme/tensorferry-snapshots-*/*"))
