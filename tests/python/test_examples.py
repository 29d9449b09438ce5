"""The programs in examples/ run as they are, and do what they say."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from warm_python import WARM_PYTHON

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(tmp_path, name, *options):
    done = subprocess.run(
        [*WARM_PYTHON, EXAMPLES / name, str(tmp_path), *map(str, options)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not left
    return done.stdout


def test_pipeline_learns(tmp_path):
    lines = run(tmp_path, "pipeline.py").splitlines()
    losses = [float(line.split()[-1]) for line in lines if line.startswith("step")]
    assert losses == sorted(losses, reverse=True) and len(losses) == 5
    assert "0 layers were prefetched" not in lines[-1].split(", ")


SMALL = ("--layers", 4, "--width", 256, "--memory", "2M")


def test_training_larger_than_memory_learns(tmp_path):
    text = run(tmp_path, "train_larger_than_memory.py", *SMALL, "--steps", 12)
    lines = [line for line in text.splitlines() if "loss" in line]
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines]
    assert len(losses) == 12 and losses[-1] < losses[0]
    assert "memory" in text and "written to the drive" in text


def test_inference_larger_than_memory_runs(tmp_path):
    text = run(tmp_path, "infer_larger_than_memory.py", *SMALL, "--tokens", 4)
    assert text.splitlines()[-1].startswith("4 tokens in")


def test_inference_from_a_checkpoint_runs(tmp_path):
    pytest.importorskip("transformers")
    text = run(tmp_path, "infer_checkpoint.py", *SMALL, "--tokens", 4)
    last = text.splitlines()[-1]
    assert last.startswith("4 tokens in") and last.endswith(" 0 bytes written")


def test_adapters_of_a_checkpoint_learn(tmp_path):
    pytest.importorskip("peft")
    text = run(tmp_path, "adapt_checkpoint.py", *SMALL, "--steps", 6)
    lines = text.splitlines()
    losses = [float(line.split()[-1]) for line in lines if line.startswith("step")]
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert lines[-1].endswith(" 0 bytes written")


def test_a_long_prompt_runs(tmp_path):
    pytest.importorskip("transformers")
    sizes = ("--layers", 4, "--width", 128, "--prompt", 1100, "--cache", "3M", "--tokens", 4)
    lines = run(tmp_path, "long_prompt.py", *sizes).splitlines()
    assert [line.split(":")[0] for line in lines[-2:]] == ["question 1", "question 2"]
    assert all("4 tokens in" in line and " 0 B read" not in line for line in lines[-2:])


@pytest.mark.parametrize("name", ["train_larger_than_memory.py", "infer_larger_than_memory.py"])
def test_a_missing_path_is_said(tmp_path, name):
    done = subprocess.run(
        [*WARM_PYTHON, EXAMPLES / name, str(tmp_path / "missing")], capture_output=True, text=True
    )
    assert done.returncode == 1 and "no such directory" in done.stderr


def test_the_configuration_trains(tmp_path):
    import tensorferry

    with open(EXAMPLES / "ds_config.json") as file:
        config = json.load(file)
    for place in config["zero_optimization"].values():
        place["nvme_path"] = str(tmp_path)
    model, optimizer = tensorferry.initialize(torch.nn.Linear(64, 64), config)
    losses = []
    for _ in range(60):
        loss = model(torch.ones(4, 64, dtype=torch.bfloat16)).float().square().mean()
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    optimizer.close()
    optimizer.weights.close()
