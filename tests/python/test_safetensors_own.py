"""The tests of the package safetensors itself, unchanged, on tensorferry.

They are in its source distribution, not in its wheel: unpack safetensors-0.8.0.tar.gz of PyPI and
set TENSORFERRY_SAFETENSORS_SOURCE to the folder.
"""

import os
import re
import shutil
from pathlib import Path

import pytest
from programs import run_python

pytest.importorskip("safetensors")
pytest.importorskip("torch")

SOURCE = os.environ.get("TENSORFERRY_SAFETENSORS_SOURCE", "")
# Those of frameworks that tensorferry leaves to safetensors.
OTHERS = ["flax", "mlx", "paddle", "tf"]


@pytest.mark.skipif(not SOURCE, reason="TENSORFERRY_SAFETENSORS_SOURCE is not set")
def test_they_pass(tmp_path):
    shutil.copytree(Path(SOURCE) / "bindings/python/tests", tmp_path / "tests")
    (tmp_path / "tests/data").mkdir(exist_ok=True)
    for name in OTHERS:
        (tmp_path / f"tests/test_{name}_comparison.py").unlink(missing_ok=True)
    done = run_python(
        """
        import os, sys
        import tensorferry.safetensors
        tensorferry.safetensors.enable()
        import pytest, safetensors
        assert issubclass(safetensors.safe_open, tensorferry.safetensors.safe_open)
        os.chdir(sys.argv[1])
        sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests"]))
        """,
        tmp_path,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 50, done.stdout
