"""What the documents name exists: make targets, files, links. test_documents.py runs the code."""

import re
import subprocess

import pytest
from documents import BLOCK, DOCUMENTS, blocks
from house import ROOT, run


def make_targets():
    listed = run("make", "-s", "help", cwd=ROOT)
    return set(re.findall(r"^  make ([a-z0-9-]+)", listed, re.MULTILINE))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_make_targets_that_are_named_exist(name):
    text = (ROOT / name).read_text()
    code = "\n".join(
        re.findall(r"`([^`\n]+)`", text)
        + [block.text for block in blocks(name) if block.language == "sh"]
    )
    named = set(re.findall(r"\bmake ([a-z][a-z0-9-]*)", code))
    assert named <= make_targets()


def test_make_help_lists_every_target_and_make_knows_each():
    listed = make_targets()
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert listed == set(phony.group(1).split())
    for target in listed - {"help"}:
        run("make", "-n", target, cwd=ROOT)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_shell_blocks_are_shell(name):
    for block in blocks(name):
        if block.language != "sh":
            continue
        done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_and_paths_lead_to_files(name):
    text = (ROOT / name).read_text()
    prose = BLOCK.sub("", text)
    folder = (ROOT / name).parent
    broken = [
        link
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", prose)
        if "://" not in link and not (folder / link).exists()
    ]
    # A word in backquotes that looks like a path of this tree must be one.
    for word in re.findall(r"`([\w.]+(?:/[\w.]+)+)`", prose):
        in_tree = word.split("/")[0] in (
            "src",
            "include",
            "tests",
            "docs",
            "scripts",
            "cmake",
            "benchmarks",
            "python",
            ".ci",
        )
        if in_tree and not (ROOT / word).exists():
            broken.append(word)
    assert not broken, f"{name}: {', '.join(broken)}"
