"""The plan of the house, kept: who may include whom, who may speak, and that all of it is built."""

import shutil

import pytest
import rooms


def test_rooms_include_only_rooms_below_them(root):
    found = rooms.check_includes(root)
    assert not found, "\n".join(found)


def test_rooms_link_only_rooms_below_them(root):
    found = rooms.check_links(root)
    assert not found, "\n".join(found)


def test_the_library_never_prints_aborts_or_exits(root):
    found = rooms.check_manners(root)
    assert not found, "\n".join(found)


def test_libraries_are_loaded_in_one_file_each(root):
    found = rooms.check_loading(root)
    assert not found, "\n".join(found)


def test_no_variable_steers_a_program_with_privileges(root):
    found = rooms.check_variables(root)
    assert not found, "\n".join(found)


def test_every_source_and_every_test_is_in_the_build(root):
    found = rooms.check_build(root)
    assert not found, "\n".join(found)


@pytest.fixture
def copy(root, tmp_path):
    """A copy of the tree to break."""
    for folder in ("src", "include", "tests", "python"):
        shutil.copytree(root / folder, tmp_path / folder)
    return tmp_path


def planted(check, tree, file, line):
    """What the check finds after the line was added to the file, and did not find before."""
    before = check(tree)
    path = tree / file
    path.parent.mkdir(exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "") + line + "\n")
    return [found for found in check(tree) if found not in before]


@pytest.mark.parametrize(
    "file, line",
    [
        ("src/base/error.cc", '#include "os/system.h"'),
        ("src/os/system.cc", '#include "handle/plan.h"'),
        ("src/engines/engine.h", '#include "files/device.h"'),
        ("src/engines/threads_engine.cc", "#include <liburing.h>"),
        ("src/engines/uring_engine.cc", "#include <libaio.h>"),
        ("src/engines/engine.cc", '#include "tensorferry/handle.h"'),
        ("src/files/device.cc", '#include "tensorferry/pinned_buffer.h"'),
        ("src/memory/copy.cc", "#include <cuda_runtime.h>"),
        ("src/handle/plan.cc", "#include <torch/torch.h>"),
        ("src/handle/plan.cc", "  #  include <Python.h>"),
        ("src/handle/plan.cc", "#include <gtest/gtest.h>"),
        ("src/handle/plan.cc", '#include "engines/contract_fixture.h"'),
        ("src/handle/plan.cc", '#include "plan.h"'),
        ("src/lonely.cc", "#include <vector>"),
        ("src/attic/dust.h", "#include <vector>"),
        ("include/tensorferry/file.h", '#include "files/open_file.h"'),
        ("include/tensorferry/file.h", "#include <sys/stat.h>"),
        ("include/tensorferry/secret.h", "#include <vector>"),
        ("include/tensorferry/file.h", "#include <torch/torch.h>"),
        ("include/tensorferry/torch.h", '#include "handle/plan.h"'),
        ("python/src/handle.cc", '#include "handle/conductor.h"'),
    ],
)
def test_a_planted_include_is_found(copy, file, line):
    found = planted(rooms.check_includes, copy, file, line)
    assert len(found) == 1 and file in found[0]


@pytest.mark.parametrize(
    "line",
    [
        'std::cerr << "oh";',
        'std::printf("oh");',
        'fprintf(stderr, "oh");',
        "::abort();",
        "std::exit(1);",
        "if (broken) _exit(1);",
        "assert(fine);",
    ],
)
def test_a_planted_outcry_is_found(copy, line):
    assert len(planted(rooms.check_manners, copy, "src/os/system.cc", line)) == 1


@pytest.mark.parametrize(
    "line",
    [
        "// abort() and printf() are never called",
        'const char* text = "exit(1) // or std::cerr";',
        "std::snprintf(buffer, sizeof buffer, format);",
        'static_assert(sizeof(int) == 4, "");',
        "queue.exit(); worker->abort();",
        "void on_exit(int);",
    ],
)
def test_quiet_code_is_not_mistaken_for_an_outcry(copy, line):
    assert planted(rooms.check_manners, copy, "src/os/system.cc", line) == []


def test_a_planted_loading_is_found(copy):
    line = 'auto* library = dlopen("libcuda.so.1", RTLD_NOW);'
    assert len(planted(rooms.check_loading, copy, "src/handle/worker.cc", line)) == 1
    assert planted(rooms.check_loading, copy, "src/os/cuda.cc", line) == []


@pytest.mark.parametrize(
    "file, line",
    [
        ("src/handle/trace.cc", 'auto* wanted = std::getenv("TENSORFERRY_TRACE");'),
        ("src/files/profile.cc", 'auto* home = ::secure_getenv("HOME");'),
        ("src/os/system.cc", "for (char** one = environ; *one != nullptr; ++one) use(*one);"),
        ("src/bench/sweep.cc", 'auto* place = getenv("TMPDIR");'),
        ("include/tensorferry/torch.h", 'auto* wanted = getenv("TENSORFERRY_TRACE");'),
        ("python/src/handle.cc", 'auto* wanted = std::getenv("TENSORFERRY_TRACE");'),
        ("python/tensorferry/offload.py", 'MODE = os.environ.get("TENSORFERRY_MODE")'),
        ("python/tensorferry/offload.py", 'MODE = os.getenv("TENSORFERRY_MODE")'),
    ],
)
def test_a_planted_variable_is_found(copy, file, line):
    assert len(planted(rooms.check_variables, copy, file, line)) == 1


def test_variables_that_steer_nothing_are_not_mistaken(copy):
    for file, line in (
        ("src/cli/table.cc", 'auto* refused = secure_getenv("NO_COLOR");'),
        ("src/bench/process.cc", "posix_spawnp(&child, words[0], nullptr, {}, words, environ);"),
        ("src/handle/trace.cc", "// getenv() is not asked"),
        ("src/os/system_test.cc", 'auto* before = getenv("HOME");'),
    ):
        assert planted(rooms.check_variables, copy, file, line) == []


@pytest.mark.parametrize(
    "file",
    [
        "src/os/forgotten.cc",
        "src/handle/forgotten_test.cc",
        "tests/faults/forgotten.cc",
        "tests/fuzz/forgotten_fuzzer.cc",
        "tests/support/forgotten.cc",
        "python/src/forgotten.cc",
    ],
)
def test_a_file_left_out_of_the_build_is_found(copy, file):
    assert len(planted(rooms.check_build, copy, file, "")) == 1


def test_a_planted_link_is_found(copy):
    line = "tensorferry_room(NAME files BELOW engines os base SOURCES files/device.cc)"
    assert len(planted(rooms.check_links, copy, "src/CMakeLists.txt", line)) == 1
