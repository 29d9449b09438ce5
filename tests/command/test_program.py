"""The program as a whole: help, versions, completion."""

import re
import subprocess

import pytest
from commands import COMMANDS
from ferry_program import PROGRAM, ROOT

# Those whose page has another name.
PAGES = {"point": "sweep.md", "checkpoint": "checkpoint_command.md", "snapshot": "snapshots.md"}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(ferry, command):
    said = ferry(command, "--help").stdout
    assert re.search(rf"^Examples?:\n( {{2}}.*\n)*.*tensorferry {command}", said, re.MULTILINE)
    for line in said.splitlines():
        assert len(line) <= 110, line


def test_the_program_lists_its_commands(ferry):
    said = ferry("--help").stdout
    for command in COMMANDS:
        assert re.search(rf"^  {command}\b", said, re.MULTILINE)


def test_the_version_is_the_one_number(ferry):
    header = (ROOT / "include/tensorferry/version.h").read_text()
    version = ".".join(re.findall(r"TENSORFERRY_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)\n", header))
    assert ferry("--version").stdout.strip() == f"tensorferry {version}"


def test_an_unknown_word_leads_to_the_nearest_known(ferry):
    assert "did you mean sweep?" in ferry("swep", code=2).stderr
    assert "did you mean --version?" in ferry("--versoin", code=2).stderr
    assert "bench" in ferry(code=2).stderr


def test_of_a_flag_given_twice_the_last_one_counts(ferry):
    said = ferry("bench", "--sizes", "4K", "--iterations", "5", "--iterations", "3").stdout
    assert "3 tensors of 4K" in said


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_know_every_command(ferry, shell):
    script = ferry("completion", shell).stdout
    for command in COMMANDS:
        assert command in script
    assert "nvme-path" in script


def complete(script, *words):
    """What bash would offer for the last word."""
    line = " ".join(words)
    program = f"""{script}
COMP_WORDS=({" ".join(repr(word) for word in words)}); COMP_CWORD={len(words) - 1}
COMP_LINE={line!r}; _tensorferry; printf '%s\\n' "${{COMPREPLY[@]}}" """
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_bash_completes_commands_and_flags(ferry):
    script = ferry("completion", "bash").stdout
    assert complete(script, "tensorferry", "sw") == ["sweep"]
    assert complete(script, "tensorferry", "bench", "--que") == ["--queue-depth"]
    assert complete(script, "tensorferry", "bench", "--engine", "lib") == ["libaio"]
    assert complete(script, "tensorferry", "tune", ".", "--objective", "lat") == ["latency"]
    assert complete(script, "tensorferry", "checkpoint", "ver") == ["verify"]
    convert = ["tensorferry", "checkpoint", "convert"]
    assert complete(script, *convert, "--with") == ["--without-objects"]
    assert complete(script, *convert, "--to", "d") == ["dcp"]


def flags_of(ferry, command):
    """As the shell completion lists them, with those of its own commands."""
    lines = re.findall(
        rf'^    {command}(?:\\ \w+)?\) words="(.*)" ;;$',
        ferry("completion", "bash").stdout,
        re.MULTILINE,
    )
    words = {word for line in lines for word in line.split() if word.startswith("--")}
    return words - {"--help"}


@pytest.mark.parametrize("command", [one for one in COMMANDS if one != "completion"])
def test_the_documents_name_every_flag_and_no_other(ferry, command):
    page = ROOT / "docs" / PAGES.get(command, f"{command}.md")
    written = {
        flag.replace("_", "-")
        for flag in re.findall(r"`[^`\n]*?(--[a-z][a-z_-]*)", page.read_text())
    }
    known = set().union(*(flags_of(ferry, one) for one in COMMANDS))
    named = {flag.replace("_", "-") for flag in re.findall(r"--[a-z][a-z_-]*", page.read_text())}
    assert flags_of(ferry, command) <= named
    foreign = {"--ulimit", "--help", "--version"}  # of other programs, and of all commands
    assert written <= known | foreign, f"no such flags: {written - known - foreign}"


def test_the_program_stands_alone():
    """It needs glibc and the C++ runtime, and no library of ours."""
    listed = subprocess.run(["readelf", "-d", PROGRAM], capture_output=True, text=True, check=True)
    needed = set(re.findall(r"\(NEEDED\).*\[(.+?)\.so", listed.stdout))
    assert needed <= {
        "libc",
        "libm",
        "libgcc_s",
        "libstdc++",
        "ld-linux-x86-64",
        "ld-linux-aarch64",
    }
