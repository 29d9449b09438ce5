"""Makes checkpoints for test_checkpoint.py: `python checkpoint_files.py PLACE` fills the folder.

Each format is written by its own makers: torch, safetensors, torch.distributed.checkpoint; and by
tensorferry where that adds checksums. check() compares a file with the tensors that were made, by
the makers' own readers.
"""

import functools
import json
import sys
import warnings
from pathlib import Path

import safetensors.torch
import tensorferry
import torch
import torch.distributed.checkpoint as dcp
from tensorferry.safetensors.torch import save_file

warnings.simplefilter("ignore")


def state():
    """Tensors of every kind that all formats have."""
    torch.manual_seed(7)
    wide = torch.randn(64, 96)
    kinds = {
        "bf16": torch.randn(33, 17).to(torch.bfloat16),
        "f16": torch.randn(5).to(torch.float16),
        "f64": torch.randn(3, 4, 5, dtype=torch.float64),
        "fp8": torch.randn(40).to(torch.float8_e4m3fn),
        "fp8_e5m2": torch.randn(40).to(torch.float8_e5m2),
        "i64": torch.arange(10),
        "u16": torch.arange(10).to(torch.uint16),
        "bool": torch.tensor([True, False, True]),
        "complex": torch.randn(6, dtype=torch.complex64),
        "scalar": torch.tensor(3.25),
        "empty": torch.empty(0, 4),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "name with é": torch.ones(1),
        "large": torch.randn(1300, 4096),  # more than one window, and no whole one
        "transposed": wide.t(),
        "columns": wide[:, 5:50],
        "middle": torch.arange(100.0)[10:20],
    }
    return {f"model.{name}": tensor for name, tensor in kinds.items()}


def make(place):
    tensors = state()
    packed = {name: tensor.contiguous() for name, tensor in tensors.items()}
    torch.save(tensors, place / "model.pt")
    save_file(packed, place / "model.safetensors", checksums=True)
    safetensors.torch.save_file(packed, place / "plain.safetensors", metadata={"format": "pt"})
    dcp.save(tensors, checkpoint_id=place / "theirs")
    dcp.save(tensors, storage_writer=tensorferry.dcp.Writer(place / "ours"))
    dcp.save({**tensors, "step": 7}, checkpoint_id=place / "with_objects")
    training = {"model": {"w": torch.ones(2, 3)}, "optimizer": {"state": {0: {"m": torch.ones(3)}}}}
    torch.save({**training, "step": 7, "betas": (0.9, 0.95)}, place / "training.pt")
    torch.save(torch.nn.Linear(2, 2), place / "module.pt")
    torch.save(tensors, place / "old.pt", _use_new_zipfile_serialization=False)
    make_set(place / "set", packed, ".safetensors", functools.partial(save_file, checksums=True))
    make_set(place / "torch_set", tensors, ".bin", torch.save)
    changed = {name: tensor.clone() for name, tensor in packed.items()}
    changed["model.large"][700, 3000] += 0.5
    changed["model.large"][1, 1] += 0.25
    changed["model.nan"][1] = 0.0
    changed["model.i64"] = changed["model.i64"].to(torch.int32)
    changed["model.f16"] = torch.zeros(6, dtype=torch.float16)
    changed["new"] = changed.pop("model.bool")
    safetensors.torch.save_file(changed, place / "changed.safetensors")


def make_set(folder, tensors, ending, save):
    """Two files, and an index as transformers writes it."""
    folder.mkdir()
    files = {}
    for number, name in enumerate(tensors):
        files.setdefault(f"model-{number % 2 + 1}-of-2{ending}", {})[name] = tensors[name]
    for file, inside in files.items():
        save(inside, folder / file)
    weight_map = {name: file for file, inside in files.items() for name in inside}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / f"model{ending}.index.json").write_text(json.dumps(index))


def load(path):
    if path.suffix == ".safetensors":
        return safetensors.torch.load_file(path)
    if path.suffix == ".pt":
        return torch.load(path)
    blank = {name: torch.zeros_like(tensor).contiguous() for name, tensor in state().items()}
    dcp.load(blank, checkpoint_id=path)  # torch's own reader
    return blank


def check(path):
    """Raises unless the file has the tensors of state(), bit by bit."""
    loaded = load(path)
    assert loaded.keys() == state().keys(), path
    for name, tensor in state().items():
        found = loaded[name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), (path, name)
        bits = [one.contiguous().flatten().view(torch.uint8) for one in (found, tensor)]
        assert torch.equal(*bits), (path, name)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
