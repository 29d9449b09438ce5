"""The numbers of the style: columns, lines, names. CONTRIBUTING.md has the rest."""

import re

import pytest
from rooms import code_of

COLUMNS = 100
FILE_LINES = 600
FUNCTION_LINES = 70
FOLDERS = ("src", "include", "tests", "benchmarks", "cmake", "python", "scripts", "docs", ".ci")
SOURCES = {".h", ".cc", ".py", ".cmake", ".sh", ".txt"}
VAGUE_NAME = re.compile(r"manager|context|util|common|helper|misc", re.IGNORECASE)
TODO = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b(.*)")


def files(root, suffixes=SOURCES):
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix in suffixes:
                yield path


def long_lines(root):
    for path in files(root):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if len(line) > COLUMNS:
                yield f"{path.relative_to(root)}:{number}: {len(line)} columns"


def long_files(root):
    for path in files(root):
        lines = len(path.read_text().splitlines())
        if lines > FILE_LINES:
            yield f"{path.relative_to(root)}: {lines} lines"


def functions(text):
    """(first line, lines) of each function. It trusts the formatter: a function opens with a line
    that ends in `{` and closes with the first `}` that is indented as its opening line is."""
    lines = code_of(text).splitlines()
    for start, line in enumerate(lines):
        if not line.endswith("{") or ")" not in line and "(" not in line:
            continue
        # The declaration may have begun some lines above; its first line sets the indent.
        first = start
        while first > 0 and lines[first].count("(") < lines[first].count(")"):
            first -= 1
        indent = re.match(r" *", lines[first]).group()
        if len(indent) > 2 or re.match(r" *(?:if|for|while|switch|do)\b| *\}", lines[first]):
            continue
        for end in range(start + 1, len(lines)):
            if lines[end].startswith(indent + "}"):
                yield first + 1, end - first + 1
                break


def long_functions(root):
    for path in files(root, {".h", ".cc"}):
        for line, length in functions(path.read_text()):
            if length > FUNCTION_LINES:
                yield f"{path.relative_to(root)}:{line}: a function of {length} lines"


def vague_names(root):
    for path in files(root, SOURCES | {".md", ""}):
        name = path.relative_to(root)
        if VAGUE_NAME.search(name.as_posix()):
            yield f"{name}: says nothing"


def bare_todos(root):
    for path in files(root, {".h", ".cc"}):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = TODO.search(line)
            if match and len(re.findall(r"\w+", match.group(1))) < 4:
                yield f"{path.relative_to(root)}:{number}: {line.strip()}"


RULES = [long_lines, long_files, long_functions, vague_names, bare_todos]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_has_no(root, rule):
    found = list(rule(root))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "rule, name, text",
    [
        (long_lines, "src/os/a.cc", "//" + "x" * 99),
        (long_files, "src/os/a.cc", "\n" * 601),
        (long_functions, "src/os/a.cc", "int f() {\n" + "  g();\n" * 69 + "}\n"),
        (long_functions, "src/os/a.h", "class A {\n  int f() {\n" + "    g();\n" * 69 + "  }\n"),
        (long_functions, "src/os/a.cc", "int f(int a,\n      int b) {\n" + "g();\n" * 68 + "}\n"),
        (vague_names, "src/os/string_utils.h", ""),
        (vague_names, "src/common/a.h", ""),
        (bare_todos, "src/os/a.cc", "// TODO: fix this\n"),
    ],
)
def test_a_planted_fault_is_found(tmp_path, rule, name, text):
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text(text)
    assert len(list(rule(tmp_path))) == 1


@pytest.mark.parametrize(
    "rule, text",
    [
        (long_functions, "int f() {\n" + "  g();\n" * 68 + "}\n"),
        (long_functions, "namespace a {\n" + "int f();\n" * 80 + "}\n"),
        (long_functions, "struct A {\n" + "  int a;\n" * 80 + "};\n"),
        (bare_todos, "// TODO: drop once kernels before 5.10 are gone\n"),
    ],
)
def test_a_sound_file_is_left_alone(tmp_path, rule, text):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.cc").write_text(text)
    assert list(rule(tmp_path)) == []
