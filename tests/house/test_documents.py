"""Every code block of every document runs, or says why it does not; documents.py has the rules."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor

import documents
import pytest
from house import ROOT
from warm_python import WARM_PYTHON

# More than these would be a habit. `pytest -rP -k left_alone` lists them.
LEFT_ALONE_MOST = 3


@pytest.fixture(scope="session")
def plays(request, prefix, tmp_path_factory):
    """Future results of all pages that are asked for. Two at a time: much of it is waiting."""
    with ThreadPoolExecutor(2) as pool:
        pages = [
            item.callspec.params["name"]
            for item in request.session.items
            if item.originalname == "test_the_blocks_run"
        ]
        yield {
            name: pool.submit(play, ROOT / name, prefix, tmp_path_factory.mktemp("page"))
            for name in pages
        }


def play(page, prefix, place):
    return subprocess.run(
        [*WARM_PYTHON, documents.__file__, page, place / "place", prefix],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("name", [name for name in documents.DOCUMENTS if documents.to_run(name)])
def test_the_blocks_run(name, plays):
    marks = [block.marks.get("under", "") for block in documents.blocks(name)]
    if os.geteuid() != 0 and any("unshare" in mark for mark in marks):
        pytest.skip("a block needs root for a file system of its own")
    done = plays[name].result()
    assert done.returncode == 0, done.stdout


def test_few_blocks_are_left_alone_and_each_says_why():
    found = [(name, *facts) for name in documents.DOCUMENTS for facts in documents.left_alone(name)]
    for name, line, language, why in found:
        print(f"{name}:{line}: {language}: {why}")
        assert len(why.split()) >= 3, f"{name}:{line}"
    assert len(found) <= LEFT_ALONE_MOST


def test_every_kind_of_block_is_known():
    for name in documents.DOCUMENTS:
        for block in documents.to_run(name):
            known = block.language and hasattr(documents.Stage, block.language)
            assert known, f"{name}:{block.line}: ```{block.language}"


def test_the_readme_has_a_program():
    assert any(block.language == "cpp" for block in documents.to_run("README.md"))


@pytest.mark.parametrize(
    "page, problem",
    [
        ("```python\n1 / 0\n```\n", "ZeroDivisionError"),
        ("```python\nprint(1)\n```\n\n<!-- prints -->\n```text\n2\n```\n", "the document says"),
        (
            "```python\n1 / 0\n```\n\n<!-- raises -->\n```text\nOSError: ...\n```\n",
            "the document says",
        ),
        ("```sh\nfalse | true\n```\n", "exit 1"),
        ("```cpp\nint main() { return 3; }\n```\n", "exit 3"),
        ("```json\n{'a': 1}\n```\n", "property name"),
    ],
)
def test_a_planted_fault_is_found(page, problem, prefix, tmp_path):
    (tmp_path / "page.md").write_text(page)
    done = play(tmp_path / "page.md", prefix, tmp_path)
    assert done.returncode == 1 and problem in done.stdout, done.stdout
