"""What the documents say is so: examples compile and run, commands and links lead somewhere."""

import os
import re
import subprocess

import pytest

from conftest import ROOT, run

DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "src/*/README.md", "tests/**/README.md", "benchmarks/*.md",
                    "python/*.md")
    for path in ROOT.glob(pattern)
)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(name, language):
    return [text for tag, text in BLOCK.findall((ROOT / name).read_text()) if tag == language]


def programs():
    for name in DOCUMENTS:
        for number, text in enumerate(blocks(name, "cpp")):
            if re.search(r"\bint main\(", text):
                yield pytest.param(text, id=f"{name}-{number}")


@pytest.mark.parametrize("text", list(programs()))
def test_a_program_compiles_and_runs(text, prefix, cxx, tmp_path):
    (tmp_path / "example.cc").write_text(text)
    folder = next(prefix.rglob("libtensorferry.so")).parent
    program = tmp_path / "example"
    run(cxx, "-std=c++20", "-Wall", "-Wextra", "-Werror", f"-I{prefix}/include",
        tmp_path / "example.cc", "-o", program, f"-L{folder}", "-ltensorferry")
    # By its full name, in a place of its own: it writes where it stands.
    run(program, cwd=tmp_path, env=os.environ | {"LD_LIBRARY_PATH": str(folder)})


def test_the_readme_has_a_program():
    assert any(re.search(r"\bint main\(", text) for text in blocks("README.md", "cpp"))


def make_targets():
    listed = run("make", "-s", "help", cwd=ROOT)
    return set(re.findall(r"^  make ([a-z-]+)", listed, re.MULTILINE))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_make_targets_that_are_named_exist(name):
    text = (ROOT / name).read_text()
    code = "\n".join(re.findall(r"`([^`\n]+)`", text) + [block for _, block in BLOCK.findall(text)])
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)", code))
    assert named <= make_targets()


def test_make_help_lists_every_target_and_make_knows_each():
    listed = make_targets()
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert listed == set(phony.group(1).split())
    for target in listed - {"help"}:
        run("make", "-n", target, cwd=ROOT)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_shell_blocks_are_shell(name):
    for text in blocks(name, "sh"):
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_and_paths_lead_to_files(name):
    text = (ROOT / name).read_text()
    prose = BLOCK.sub("", text)
    folder = (ROOT / name).parent
    broken = [link for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", prose)
              if "://" not in link and not (folder / link).exists()]
    # A word in backquotes that looks like a path of this tree must be one.
    for word in re.findall(r"`([\w.]+(?:/[\w.]+)+)`", prose):
        in_tree = word.split("/")[0] in ("src", "include", "tests", "docs", "scripts", "cmake",
                                         "benchmarks", "python", ".ci")
        if in_tree and not (ROOT / word).exists():
            broken.append(word)
    assert not broken, f"{name}: {', '.join(broken)}"
