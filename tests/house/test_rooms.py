"""The plan of the house, kept: who may include whom, who may speak, and that all of it is built."""

import re
import shutil

import pytest
import python_rooms
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


def test_rooms_of_python_import_only_rooms_below_them(root):
    found = python_rooms.check_imports(root)
    assert not found, "\n".join(found)


def test_no_python_object_touches_the_privates_of_another(root):
    found = python_rooms.check_privates(root)
    assert not found, "\n".join(found)


unread = shutil.ignore_patterns("__pycache__", "seeds", "crashes")


@pytest.fixture
def copy(root, tmp_path):
    """A copy of the tree to break."""
    for folder in ("src", "include", "tests", "python"):
        shutil.copytree(root / folder, tmp_path / folder, ignore=unread)
    return tmp_path


@pytest.fixture
def package(root, tmp_path):
    """A copy of the Python package to break."""
    shutil.copytree(root / "python/tensorferry", tmp_path / "python/tensorferry", ignore=unread)
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
        ("src/checkpoint/dtype.cc", '#include "swap/extents.h"'),
        ("src/swap/store.cc", '#include "tensorferry/checkpoint.h"'),
        ("src/lonely.cc", "#include <vector>"),
        ("src/attic/dust.h", "#include <vector>"),
        ("src/bench/run/scratch.h", '#include "os/system.h"'),
        ("src/bench/run/scratch.h", '#include "bench/measure/point.h"'),
        ("src/bench/doctor/doctor.cc", '#include "bench/measure/point.h"'),
        ("src/bench/verify/stamp_test.cc", '#include "bench/doctor/doctor.h"'),
        ("src/bench/lonely.cc", "#include <vector>"),
        ("src/bench/attic/dust.h", "#include <vector>"),
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
    assert len(planted(rooms.check_manners, copy, "src/bench/run/process.cc", line)) == 1


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
        ("src/bench/measure/sweep.cc", 'auto* place = getenv("TMPDIR");'),
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
        (
            "src/bench/run/process.cc",
            "posix_spawnp(&child, words[0], nullptr, {}, words, environ);",
        ),
        ("src/handle/trace.cc", "// getenv() is not asked"),
        ("src/os/system_test.cc", 'auto* before = getenv("HOME");'),
    ):
        assert planted(rooms.check_variables, copy, file, line) == []


@pytest.mark.parametrize(
    "file",
    [
        "src/os/forgotten.cc",
        "src/handle/forgotten_test.cc",
        "src/bench/verify/forgotten.cc",
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


@pytest.mark.parametrize(
    "file, line",
    [
        ("_notes.py", "from . import aio"),
        ("_notes.py", "from ._tracing import span"),
        ("aio.py", "from .deepspeed import enable"),
        ("aio.py", "import tensorferry"),
        ("aio.py", "from tensorferry import Handle"),
        ("sweep.py", "import tensorferry.deepspeed"),
        ("_memory/layout.py", "from ..optim.sub_groups import SubGroups"),
        ("_memory/layout.py", "def late():\n    from .. import offload"),
        ("_memory/layout.py", "if TYPE_CHECKING:\n    from ..offload.unit import Unit"),
        ("optim/sub_groups.py", "from ..offload import unit"),
        ("offload/unit.py", "from tensorferry.optim import sub_groups"),
        ("optim/sub_groups.py", "from .._config.sections import ConfigError"),
        ("safetensors/torch.py", "from ..checkpoint import save"),
        ("_config/config.py", "from ..plan import estimate"),
        ("report/page.py", "from .. import _core"),
        ("report/page.py", "from tensorferry.aio import MOST"),
        ("sweep.py", "from .report import load"),
        ("__init__.py", "from . import optim"),
        ("__init__.py", "from ._config.sections import ConfigError"),
        ("attic.py", ""),
    ],
)
def test_a_planted_import_of_python_is_found(package, file, line):
    found = planted(python_rooms.check_imports, package, f"python/tensorferry/{file}", line)
    assert len(found) == 1 and file in found[0]


@pytest.mark.parametrize(
    "file, line",
    [
        ("aio.py", "from . import _core"),
        ("optim/sub_groups.py", "from . import gradients"),
        ("optim/sub_groups.py", "from ..aio import MOST"),
        ("offload/unit.py", "from .._memory import layout"),
        ("_config/config.py", "from .. import offload, optim"),
        ("transformers.py", "from ._config.config import Config"),
        ("report/page.py", "from . import results"),
        ("__init__.py", "def late():\n    from . import transformers"),
        ("__init__.py", "if TYPE_CHECKING:\n    from . import optim"),
        ("aio.py", "import torch.optim"),
    ],
)
def test_an_import_of_python_that_points_down_is_left_alone(package, file, line):
    assert planted(python_rooms.check_imports, package, f"python/tensorferry/{file}", line) == []


def test_an_import_of_a_room_that_is_not_below_is_found_in_every_room(package):
    layer = python_rooms.LAYER_OF
    rooms_of_python = {*layer, *python_rooms.ALONE} - {"__init__"}
    for room in sorted(rooms_of_python - {"_core"}):  # that one is not Python
        folder = package / "python/tensorferry" / room
        path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        text = path.read_text()
        path.write_text(text + "".join(f"\nimport tensorferry.{one}" for one in rooms_of_python))
        found = {line.split(": ")[1] for line in python_rooms.check_imports(package)}
        path.write_text(text)
        below = {one for one in layer if room in layer and layer[one] < layer[room]}
        assert found == {f"imports {one}" for one in rooms_of_python - below - {room}}, room


def test_the_picture_of_the_package_has_its_rooms_in_their_order(root):
    page = (root / "python/README.md").read_text()
    picture = page[page.index("```text") :].split("```")[1].removeprefix("text\n")
    shown = [
        {room for line in layer.splitlines() for room in re.findall(r"\w+", line[:40])}
        for layer in re.split(r"^ +\|.*\n", picture, flags=re.MULTILINE)
    ]
    assert shown == [
        layer | (python_rooms.ALONE if "__init__" in layer else set())
        for layer in reversed(python_rooms.LAYERS)
    ]


def test_every_module_of_the_package_is_in_its_table(root):
    page = (root / "python/README.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)/` \| (.*) \|$", page, re.MULTILINE))
    for folder in sorted((root / "python/tensorferry").glob("*/")):
        modules = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}
        missing = modules - set(re.findall(r"`(\w+)`", rows.get(folder.name, "")))
        assert not missing, f"{folder.name}: {missing}"


PRIVATES = [
    "handle._pending",
    "self.handle._pending",
    "self.owner()._space",
    "def f(other):\n    other._take(3)",
    "class A:\n    def f(self):\n        B._made = self",
    "class A: ...\nA._made = 3",
    "getattr(handle, '_pending', None)",
    "setattr(self.handle, '_pending', 3)",
    "from .deepspeed import _op",
    "from tensorferry.aio import _failure",
]
OWN = [
    "self._pending",
    "cls._made",
    "super()._open(3)",
    "type(self)._made",
    "class A:\n    def f(self):\n        A._made = self",
    "sys._getframe(1)",
    "torch._C._autograd._top()",
    "torch.Tensor._make_subclass(cls, data)",
    "operator._schema.arguments",
    "module._parameters, module._buffers, module._forward_hooks",
    "place._replace(offset=3)",
    "self.__class__.__name__",
    "getattr(self, '_pending', None)",
    "hasattr(handle, 'pending') or getattr(handle, name)",
]


@pytest.mark.parametrize("line", PRIVATES)
def test_a_planted_touch_of_a_private_attribute_is_found(package, line):
    found = planted(python_rooms.check_privates, package, "python/tensorferry/sweep.py", line)
    assert len(found) == 1


@pytest.mark.parametrize("line", OWN)
def test_what_is_ones_own_is_left_alone(package, line):
    assert planted(python_rooms.check_privates, package, "python/tensorferry/sweep.py", line) == []
