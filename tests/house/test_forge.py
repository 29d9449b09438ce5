"""What a public forge, editors and pre-commit read: it parses, and what it names exists. Nothing
here can run a workflow, so each file says that it is untested."""

import configparser
import re
from pathlib import Path

import pytest
from house import ROOT
from test_readme import make_targets
from test_style import FOLDERS

yaml = pytest.importorskip("yaml")

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
PRE_COMMIT = ROOT / ".pre-commit-config.yaml"
TEMPLATE = ROOT / ".github/pull_request_template.md"


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def jobs(path):
    return yaml.safe_load(path.read_text())["jobs"]


def commands(path):
    """The shell commands of a workflow or of pre-commit; of a page, what is in backquotes."""
    if path in WORKFLOWS:
        return [
            step["run"] for job in jobs(path).values() for step in job["steps"] if "run" in step
        ]
    if path == PRE_COMMIT:
        hooks = [
            hook for repo in yaml.safe_load(path.read_text())["repos"] for hook in repo["hooks"]
        ]
        return [hook["entry"] for hook in hooks]
    return re.findall(r"`([^`\n]+)`", path.read_text())


def missing(path):
    """Make targets and files that a file names and that are not there."""
    text = "\n".join(commands(path))
    targets = set(re.findall(r"\bmake ([a-z][\w-]*)$", text, re.MULTILINE)) - make_targets()
    files = re.findall(r"(?<![\w/.])(?:\.ci|tests|scripts|docs)/[\w./-]+|[A-Z]+\.md", text)
    return sorted(targets) + [name for name in files if not (ROOT / name).exists()]


@pytest.mark.parametrize("path", [*WORKFLOWS, PRE_COMMIT, TEMPLATE], ids=name_of)
def test_make_targets_and_files_that_are_named_exist(path):
    assert commands(path)
    assert not missing(path)


def test_a_target_that_does_not_exist_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("`make nothing` and `bash .ci/nothing`")
    assert missing(page) == ["nothing", ".ci/nothing"]


@pytest.mark.parametrize("path", [*WORKFLOWS, PRE_COMMIT], ids=name_of)
def test_what_cannot_run_here_says_that_it_is_untested(path):
    assert re.search(r"^# Untested: ", path.read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", WORKFLOWS, ids=name_of)
def test_a_workflow_is_sound(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["name"] == path.stem
    assert workflow[True], "`on` is true in YAML 1.1"
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["runs-on"]
        assert {job.get("needs")} <= {None, *workflow["jobs"]}
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step), step
            assert "run" in step or re.fullmatch(r"[\w-]+/[\w-]+@[\w./]+", step["uses"])


def test_only_the_job_that_publishes_may_and_only_for_a_tag():
    (wheels,) = [path for path in WORKFLOWS if path.stem == "wheels"]
    allowed = {name for name, job in jobs(wheels).items() if "permissions" in job}
    assert allowed == {"publish"}
    publish = jobs(wheels)["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert "refs/tags/v" in publish["if"] and publish["needs"] == "test"
    assert "secrets." not in wheels.read_text()


def test_wheels_are_built_and_tested_for_every_supported_python():
    (wheels,) = [path for path in WORKFLOWS if path.stem == "wheels"]
    built, tested = (jobs(wheels)[name]["strategy"]["matrix"] for name in ("build", "test"))
    project = (ROOT / "pyproject.toml").read_text()
    supported = re.findall(r"Python :: (3\.\d+)", project)
    stable = re.search(r'wheel\.py-api = "cp3(\d+)"', project)[1]
    assert tested["python"] == supported
    assert built["python"] == supported[: supported.index(f"3.{stable}") + 1]
    assert built["runner"] == tested["runner"] and len(built["runner"]) == 2
    assert re.search(r'requires-python = ">=(.*)"', project)[1] == supported[0]
    policy = (ROOT / "docs/policy.md").read_text()
    assert f"CPython {supported[0]} to {supported[-1]}" in policy


@pytest.mark.parametrize("path", FORMS, ids=name_of)
def test_an_issue_form_is_sound(path):
    form = yaml.safe_load(path.read_text())
    assert form["name"] and form["description"]
    questions = [part for part in form["body"] if part["type"] != "markdown"]
    assert len({part["id"] for part in questions}) == len(questions) > 0
    for part in questions:
        assert part["type"] in ("textarea", "input", "dropdown", "checkboxes")
        assert part["attributes"]["label"]


def editor_faults(path, style):
    """What an editor that follows .editorconfig would change in a file."""
    try:
        text = path.read_bytes().decode(style["charset"])
    except UnicodeDecodeError:
        return ["charset"]
    return [
        fault
        for fault, found in (
            ("end_of_line", "\r" in text),
            ("insert_final_newline", text and not text.endswith("\n")),
            ("trim_trailing_whitespace", re.search(r"[ \t]$", text, re.MULTILINE)),
        )
        if found
    ]


def test_the_tree_is_as_editorconfig_says():
    style = configparser.ConfigParser()
    style.read_string("[head]\n" + (ROOT / ".editorconfig").read_text())
    assert style["head"]["root"] == "true" and style["Makefile"]["indent_style"] == "tab"
    suffixes = {".h", ".cc", ".py", ".pyi", ".md", ".txt", ".cmake", ".sh", ".yml", ".json", ".css"}
    folders = [*(ROOT / name for name in (*FOLDERS, "examples", ".github"))]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in suffixes]
    files += [path for path in ROOT.iterdir() if path.suffix in suffixes | {".toml", ".yaml"}]
    assert len(files) > 300
    found = {name_of(path): editor_faults(path, style["*"]) for path in files if path.is_file()}
    assert not {name: faults for name, faults in found.items() if faults}


def test_a_planted_fault_of_an_editor_is_found(tmp_path):
    style = {"charset": "utf-8"}
    for text, fault in (
        (b"a\r\n", "end_of_line"),
        (b"a", "insert_final_newline"),
        (b"a \n", "trim_trailing_whitespace"),
        (b"\xff\n", "charset"),
    ):
        (tmp_path / "page.md").write_bytes(text)
        assert editor_faults(Path(tmp_path / "page.md"), style) == [fault]
