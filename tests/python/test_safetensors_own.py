"""The tests of the packages safetensors and accelerate themselves, unchanged, on tensorferry.

They are in the source distributions, not in the wheels: unpack safetensors-0.8.0.tar.gz of PyPI,
and the sources of the accelerate that is installed, and set TENSORFERRY_SAFETENSORS_SOURCE and
TENSORFERRY_ACCELERATE_SOURCE to the folders.
"""

import os
import re
import shutil
from pathlib import Path

import pytest
from programs import run_python

pytest.importorskip("safetensors")
pytest.importorskip("torch")

# Those of frameworks that tensorferry leaves to safetensors.
OTHERS = ["flax", "mlx", "paddle", "tf"]
# Offloading and big models.
OF_ACCELERATE = ["test_offload.py", "test_modeling_utils.py", "test_big_modeling.py"]

RUN = """
import os, sys
import tensorferry.safetensors
tensorferry.safetensors.enable()
import pytest, safetensors
assert issubclass(safetensors.safe_open, tensorferry.safetensors.safe_open)
os.chdir(sys.argv[1])
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests"]))
"""


def source(name):
    """The folder that a variable names."""
    folder = os.environ.get(name)
    if not folder:
        pytest.skip(f"{name} is not set")
    return Path(folder)


def run(folder, least):
    done = run_python(RUN, folder, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > least, done.stdout


def test_those_of_safetensors_pass(tmp_path):
    tests = source("TENSORFERRY_SAFETENSORS_SOURCE") / "bindings/python/tests"
    shutil.copytree(tests, tmp_path / "tests")
    (tmp_path / "tests/data").mkdir(exist_ok=True)
    for name in OTHERS:
        (tmp_path / f"tests/test_{name}_comparison.py").unlink(missing_ok=True)
    run(tmp_path, 50)


def test_those_of_accelerate_pass(tmp_path):
    pytest.importorskip("accelerate")
    tests = source("TENSORFERRY_ACCELERATE_SOURCE") / "tests"
    (tmp_path / "tests").mkdir()
    for name in OF_ACCELERATE:
        shutil.copy(tests / name, tmp_path / "tests")
    run(tmp_path, 20)  # those that are slow skip themselves, unless RUN_SLOW says otherwise
