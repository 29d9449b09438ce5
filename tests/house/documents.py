"""Runs the code blocks of a document, in its order and in a directory of its own.

    python documents.py PAGE.md PLACE PREFIX

Python blocks of a page share their names. Programs in C++ are compiled against what is installed
in PREFIX and run. Shell blocks find a `tensorferry` that has little work to do, a `make` and a
`pip` that only say what they would do, a `torchrun` that starts two ranks, and a Slurm that runs a
task here. /mnt is a folder of the place. Comments before a block say more:

    <!-- not run: why -->      it is left alone
    <!-- file: NAME -->        it is written to this file, too
    <!-- under: COMMAND -->    it runs in a process of its own, started by that command
    <!-- fails -->             a shell block whose exit status is not 0
    <!-- prints -->            a block of text: what the block before has printed; ... is anything
    <!-- raises -->            a block of text: how the Python block before has ended
"""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/shared"))
from warm_python import WARM_PYTHON  # noqa: E402

DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "src/*/README.md",
        "tests/**/README.md",
        "benchmarks/*.md",
        "python/*.md",
    )
    for path in ROOT.glob(pattern)
)
BLOCK = re.compile(r"^((?:<!--.*-->\n)*)```([\w{}-]*)(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
MARK = re.compile(r"<!-- ([a-z ]+?)(?:: (.*?))? -->")
NO_CODE = {"text", "{toctree}", "{eval-rst}"}
CMAKE = """cmake_minimum_required(VERSION 3.25)
project(my_program CXX)
add_executable(my_program my_program.cc)
"""
# It is started with the library path of the tests, not with that of the C++ programs.
WARM = 'exec env -u LD_LIBRARY_PATH {warm} "$@"'
# What the stand-ins on the PATH do; {root}, {python}, {warm} and {command} are filled in.
STAND_INS = {
    "make": 'exec /usr/bin/make --no-print-directory -n -C {root} "$@" >/dev/null',
    "pip": 'cd {root} && exec {python} -m pip --quiet "$@" --dry-run --no-deps '
    "--no-build-isolation",
    "python": WARM,
    "python3": WARM,
    "torchrun": 'exec env -u LD_LIBRARY_PATH {warm} {root}/tests/house/few_ranks.py "$@"',
    # In one go: a reader that wants the first line alone may have gone before another one.
    "scontrol": r"printf 'first-machine\nsecond-machine\n'",
    "srun": 'while [ "${{1#--}}" != "$1" ]; do shift; done; exec "$@"',
    "tensorferry": 'exec {python} {root}/tests/house/little_work.py {command} "$@"',
}


@dataclass
class Block:
    line: int
    language: str
    text: str
    marks: dict = field(default_factory=dict)


def blocks(name):
    """The fenced blocks of a document."""
    page = (ROOT / name).read_text()
    found = []
    for match in BLOCK.finditer(page):
        comments, language, _, text = match.groups()
        line = page.count("\n", 0, match.start(2)) + 1
        found.append(Block(line, language, text, dict(MARK.findall(comments))))
    return found


def to_run(name):
    return [
        block
        for block in blocks(name)
        if block.language not in NO_CODE and "not run" not in block.marks
    ]


def left_alone(name):
    """(line, language, reason) of what is marked as not run."""
    return [
        (block.line, block.language, block.marks["not run"])
        for block in blocks(name)
        if "not run" in block.marks
    ]


class Stage:
    """Where the blocks of one page run."""

    def __init__(self, place, prefix):
        self.place, self.prefix = Path(place), Path(prefix)
        library = next(self.prefix.rglob("libtensorferry.so")).parent
        self.env = os.environ | {
            "PATH": f"{self.place}/.bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "TENSORFERRY_COMMAND": str(self.place / ".bin/tensorferry"),
            "HOME": str(self.place),
            "TENSORFERRY_PROFILES": str(self.place / "profiles"),
            "LD_LIBRARY_PATH": str(library),
            "PKG_CONFIG_PATH": str(library / "pkgconfig"),
            "CMAKE_PREFIX_PATH": str(self.prefix),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            # What a job of Slurm finds.
            "SLURM_JOB_ID": "1",
            "SLURM_JOB_NODELIST": "machine[1-2]",
            "SLURM_NNODES": "2",
            "CXXFLAGS": "-Wall -Wextra -Werror",
        }
        self.compile = [
            "c++",
            "-std=c++20",
            "-Wall",
            "-Wextra",
            "-Werror",
            f"-I{self.prefix}/include",
            f"-L{library}",
        ]
        self.names = {"__name__": "document"}
        self.printed = self.raised = ""
        (self.place / ".bin").mkdir(parents=True)
        for name, text in STAND_INS.items():
            program = self.place / ".bin" / name
            words = dict(
                root=ROOT,
                python=sys.executable,
                warm=shlex.join(WARM_PYTHON),
                command=self.prefix / "bin/tensorferry",
            )
            program.write_text("#!/bin/sh\n" + text.format(**words) + "\n")
            program.chmod(0o755)
        os.environ.update(self.env)
        os.chdir(self.place)

    def play(self, block):
        self.raised = ""
        text = re.sub(r"(?<![\w.])/(mnt|results)\b", rf"{self.place}/\1", block.text)
        for folder in re.findall(rf"{self.place}/(?:mnt|results)/[\w-]+", text):
            os.makedirs(folder, exist_ok=True)
        if "file" in block.marks:
            Path(block.marks["file"]).write_text(text)
        if "under" in block.marks:
            Path("under.py").write_text(text)
            start = shlex.split(block.marks["under"].format(root=ROOT, python=sys.executable))
            self.printed = run(*start, sys.executable, "under.py")
        elif "fails" in block.marks:
            self.sh(f"if (\n{text}); then exit 9; fi")
        else:
            getattr(self, block.language)(text)

    def python(self, text):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            try:
                exec(compile(text, "block", "exec"), self.names)
            except Exception as error:
                self.raised = "".join(traceback.format_exception_only(error))
        self.printed = output.getvalue()

    def sh(self, text):
        self.printed = run("bash", "-euo", "pipefail", "-c", text)

    def cpp(self, text):
        Path("block.cc").write_text(text)
        run(*self.compile, "block.cc", "-o", "block", "-ltensorferry")
        self.printed = run("./block")

    def cmake(self, text):
        if "project(" not in text:
            text = CMAKE + text
        Path("CMakeLists.txt").write_text(text)
        run("cmake", "-B", "cmake-build", "-DCMAKE_BUILD_TYPE=Release")
        run("cmake", "--build", "cmake-build")

    def json(self, text):
        json.loads(text)

    def compare(self, block, said):
        """Text is compared word by word, so that a document may break long lines."""
        parts = [re.escape(part) for part in " ".join(block.text.split()).split("...")]
        said = " ".join(said.replace(str(self.place), "").split())
        if not re.fullmatch(".*?".join(parts), said):
            raise AssertionError(f"the document says\n{block.text}\nand it is\n{said}")


def run(*command):
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
    )
    if done.returncode != 0:
        raise AssertionError(f"exit {done.returncode}\n{done.stdout}")
    return done.stdout


def play(name, place, prefix):
    """Runs a page; raises at the first block that does not do what it should."""
    stage = Stage(place, prefix)
    wait_for_raise = None
    for block in [block for block in blocks(name) if "not run" not in block.marks]:
        try:
            if wait_for_raise and "raises" not in block.marks:
                raise AssertionError(wait_for_raise)
            wait_for_raise = None
            if "prints" in block.marks:
                stage.compare(block, stage.printed)
            elif "raises" in block.marks:
                stage.compare(block, stage.raised)
            elif block.language not in NO_CODE:
                stage.play(block)
                wait_for_raise = stage.raised
        except BaseException as problem:
            raise SystemExit(f"{name}:{block.line}: {problem}") from problem
    if wait_for_raise:
        raise SystemExit(f"{name}: {wait_for_raise}")


if __name__ == "__main__":
    play(*sys.argv[1:])
