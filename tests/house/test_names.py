"""What documents and comments name is in the tree: files, functions, options."""

import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest
from documents import BLOCK, DOCUMENTS
from house import ROOT
from test_style import FOLDERS

# Names of others, and names that an example makes up.
NOT_OURS = {"add_safe_globals", "ds_report", "lgamma", "mnt_nvme0"}
FILE = re.compile(r"(?<![\w/<.*])((?:\w+/)*[a-z]\w+\.(?:h|cc))\b(?!\()")
CALL = re.compile(r"(?<![\w.>:/*-])([A-Za-z_]\w+)\(\)")
SPAN = re.compile(r"`([^`\n]+)`")
NOT_OUR_FILES = {"aio_bench_perf_sweep.py", "libaio.h", "liburing.h", "malloc.h"}
AFTER_LINES = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}


def tree():
    for folder in (*FOLDERS, ".github"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and not {"__pycache__", "seeds", "crashes"} & set(path.parts):
                yield path
    yield from (path for path in ROOT.iterdir() if path.is_file())


def split(text, suffix):
    """(code, prose) of a file: prose is comments and docstrings."""
    if suffix == ".md":
        return "", text
    if suffix in (".h", ".cc"):
        lines = [line.partition("//") for line in text.splitlines()]
        return "\n".join(line[0] for line in lines), "\n".join(line[2] for line in lines)
    if suffix != ".py":
        return text, ""
    code, prose, before = [], [], tokenize.ENCODING
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        docstring = token.type == tokenize.STRING and before in AFTER_LINES
        (prose if docstring or token.type == tokenize.COMMENT else code).append(token.string)
        before = before if token.type in (tokenize.COMMENT, tokenize.NL) else token.type
    return " ".join(code), "\n".join(prose)


@cache
def sources():
    """{path: (code, prose)} of all files but this one, which makes names up."""
    suffixes = {"", ".cc", ".cmake", ".h", ".js", ".json", ".md", ".py", ".pyi", ".sh", ".toml"}
    suffixes |= {".txt", ".yml", ".yaml", ".in"}
    read = [path for path in tree() if path.suffix in suffixes and path != Path(__file__)]
    return {path: split(path.read_text(), path.suffix) for path in read}


@cache
def words():
    return set(re.findall(r"\w+", " ".join(code for code, _ in sources().values()))) | NOT_OURS


@cache
def tails():
    """Every path of the tree, from any of its folders on."""
    parts = [path.relative_to(ROOT).parts for path in tree()]
    return {"/".join(part[start:]) for part in parts for start in range(len(part))} | NOT_OUR_FILES


def unknown_in_prose(prose):
    """What a comment or a docstring names that is not in the tree: calls without arguments, and
    files of C++."""
    yield from (name for name in CALL.findall(prose) if name not in words())
    yield from (name for name in FILE.findall(prose) if name not in tails())


def unknown_in_document(text):
    """What a document names in backquotes that is not in the tree."""
    for span in SPAN.findall(BLOCK.sub("", text)):
        if re.fullmatch(r"[\w./]+\.(?:h|cc|py|sh)", span):
            if span.lstrip("/") not in tails():
                yield span
            continue
        for name in re.findall(r"(?<![\w<>-])[a-z]\w*_\w+(?![\w>])|\b[a-z]\w+(?=\()", span):
            if name not in words():
                yield name


@pytest.mark.parametrize("folder", ["src", "include", "python", "benchmarks", "tests", "examples"])
def test_what_comments_name_is_in_the_tree(folder):
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, (_, prose) in sources().items()
        if path.suffix in (".h", ".cc", ".py") and ROOT / folder in path.parents
        for name in unknown_in_prose(prose)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if name != "CHANGELOG.md"])
def test_what_a_document_names_is_in_the_tree(name):
    assert not list(unknown_in_document((ROOT / name).read_text()))


@pytest.mark.parametrize(
    "find, text",
    [
        (unknown_in_prose, "// drop_nothing_at_all() looks"),
        (unknown_in_prose, "# says handle/no_such_file.h"),
        (unknown_in_document, "Graphs end at the hooks (`offload/no_such_file.py`)."),
        (unknown_in_document, "`_no_such_file.py`: hidden"),
        (unknown_in_document, "`put_nowhere(key)` returns"),
        (unknown_in_document, "with `no_such_option=True`"),
    ],
)
def test_a_planted_name_is_found(find, text):
    assert len(list(find(text))) == 1


@pytest.mark.parametrize("text", ["`take()` and `src/handle/retry.cc`", "`<name>_engine.cc`"])
def test_a_name_of_the_tree_is_left_alone(text):
    assert not list(unknown_in_document(text)) and not list(unknown_in_prose(text))
