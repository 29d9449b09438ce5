"""Docstrings have examples, and they run."""

import doctest
import importlib
import inspect
import re

import pytest
import tensorferry
import tensorferry.aio
import tensorferry.deepspeed


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run_examples(owner, name):
    finder = doctest.DocTestFinder(recurse=False)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in finder.find(owner, name, module=False, globs={}):
        runner.run(test)
    return runner.summarize(verbose=False)


@pytest.mark.parametrize(
    "name",
    ["", "Handle", "File", "Operation", "PinnedBuffer", "SwapSpace", "aio_handle", "pin_handle"],
)
def test_examples(name):
    owner = getattr(tensorferry, name) if name else tensorferry
    result = run_examples(owner, name or "tensorferry")
    assert result.attempted > 0 and result.failed == 0


def test_examples_with_deepspeed():
    pytest.importorskip("deepspeed")
    from programs import run_python

    done = run_python(
        "import doctest, tensorferry.deepspeed as d; print(doctest.testmod(d))",
        DS_ACCELERATOR="cpu",
        timeout=300,
    )
    assert re.search(r"failed=0, attempted=[1-9]", done.stdout), done.stdout + done.stderr


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["", "Reader", "Stager", "Writer"])
def test_examples_of_distributed_checkpoints(name):
    pytest.importorskip("torch")
    owner = getattr(tensorferry.dcp, name) if name else tensorferry.dcp
    result = run_examples(owner, name or "tensorferry.dcp")
    assert result.attempted > 0 and result.failed == 0


def test_everything_public_is_explained():
    for name in tensorferry.__all__:
        thing = getattr(tensorferry, name)
        if name.startswith("__"):
            continue
        assert inspect.getdoc(thing), name
        if inspect.isclass(thing) and not issubclass(thing, Exception):
            for member, value in vars(thing).items():
                if member.startswith(("_", "get_")):
                    continue
                if callable(value):
                    assert inspect.getdoc(value), f"{name}.{member}"


@pytest.mark.parametrize("name", ["", ".torch", ".numpy"])
def test_examples_of_safetensors(name):
    pytest.importorskip("torch")
    pytest.importorskip("numpy")
    module = importlib.import_module("tensorferry.safetensors" + name)
    result = run_examples(module, module.__name__)
    assert result.attempted > 0 and result.failed == 0
    for public in module.__all__:
        assert inspect.getdoc(getattr(module, public)), public


@pytest.mark.parametrize("owner", ["checkpoint", "optim", "optim.offload", "offload"])
def test_examples_with_torch(owner):
    module = importlib.import_module("tensorferry." + owner.split(".")[0])
    result = run_examples(module.offload if "." in owner else module, owner)
    assert result.attempted > 0 and result.failed == 0
