"""What CI runs: every stage, in order, until one fails; and that no C++ file escapes clang-tidy."""

import os
import re
import shutil
import subprocess

import pytest

STAGES = ["check-format", "lint", "test", "asan", "fuzz", "tsan", "tidy"]
CLOSING = [
    "100% tests passed, 0 tests failed out of 3",
    "Total Test time (real) =   1.00 sec",
    "===== 5 passed, 1 skipped in 0.10s =====",
]


@pytest.fixture
def ci(root, tmp_path):
    """Runs .ci/run in an empty tree, with a `make` that only notes what it was asked for."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(root / ".ci" / "run", tmp_path / ".ci" / "run")
    (tmp_path / "bin").mkdir()
    make = tmp_path / "bin" / "make"
    lines = "".join(f"echo '{line}'\n" for line in CLOSING)
    make.write_text(f'#!/bin/sh\necho $1 >>asked\n{lines}test $1 != "$FAILING"\n')
    make.chmod(0o755)

    def run(failing=""):
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", ".ci/run"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env=os.environ | {"PATH": path, "FAILING": failing},
            timeout=60,
        )
        return done, (tmp_path / "asked").read_text().split()

    return run


def test_ci_runs_every_stage_and_ends_with_the_closing_lines_of_the_tests(ci):
    done, asked = ci()
    assert done.returncode == 0, done.stdout
    assert asked == STAGES
    assert done.stdout.splitlines()[-3 * len(CLOSING) :] == 3 * CLOSING  # asan, tsan, test


def test_the_page_names_what_the_thread_sanitizer_runs(root):
    makefile = (root / "Makefile").read_text()
    tests = re.search(r"^TSAN_TESTS \?= (.*)$", makefile, re.MULTILINE)[1].split()
    told = re.search(r"^make tsan +# (.*):", (root / "CONTRIBUTING.md").read_text(), re.MULTILINE)[
        1
    ]
    words = told.replace("the stress test", "stress").split(", ")
    assert words == [test.removesuffix("_test") for test in tests]


@pytest.mark.parametrize("failing", STAGES)
def test_ci_stops_at_the_first_stage_that_fails(ci, failing):
    done, asked = ci(failing)
    assert done.returncode == 1 and "FAILED in stage" in done.stdout
    assert asked == STAGES[: STAGES.index(failing) + 1]


def test_clang_tidy_sees_every_source_and_every_test_once(root):
    plan = subprocess.run(
        ["make", "-n", "tidy"], cwd=root, capture_output=True, text=True, check=True
    ).stdout
    patterns = re.findall(r"run-clang-tidy.* '(/[^']+)'", plan)
    assert len(patterns) == 2, plan
    files = [
        path for folder in ("src", "python/src", "tests") for path in (root / folder).rglob("*.cc")
    ]
    wrong = [
        path
        for path in files
        if sum(bool(re.search(pattern, str(path))) for pattern in patterns) != 1
    ]
    assert files and not wrong, wrong


def test_every_fuzzer_is_built_and_run(root):
    plan = subprocess.run(
        ["make", "-n", "fuzz"], cwd=root, capture_output=True, text=True, check=True
    ).stdout
    fuzzers = sorted(path.stem for path in (root / "tests" / "fuzz").glob("*_fuzzer.cc"))
    built = re.search(r"--preset asan .*-t (.*)", plan).group(1).split()
    run = re.search(r"for fuzzer in (.*?);", plan).group(1).split()
    assert fuzzers and sorted(built) == fuzzers
    assert sorted(f"{name}_fuzzer" for name in run) == fuzzers
