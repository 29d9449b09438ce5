"""Facts that stand in more than one place agree: versions, limits and defaults, in the sources, the
help texts and the documents."""

import inspect
import json
import re

import pytest
from house import ROOT, run


def read(name):
    return (ROOT / name).read_text()


def found(pattern, name):
    """What the group of a pattern matches in a file, wherever its lines break; each value once."""
    values = set(re.findall(pattern, " ".join(read(name).split())))
    assert values, f"{name} has nothing like {pattern}"
    return values


def test_the_oldest_kernel_for_io_uring_is_the_same_everywhere():
    """The engine needs IORING_FEAT_EXT_ARG, which Linux 5.11 brought."""
    assert "IORING_FEAT_EXT_ARG" in read("src/engines/uring_engine.cc")
    for name in (
        "src/engines/uring_engine.cc",
        "src/bench/doctor/judgement.cc",
        "README.md",
        "docs/doctor.md",
        "docs/policy.md",
    ):
        assert found(r"(?<!transformers )\b(5\.\d+)\b", name) == {"5.11"}, name
    assert found(r"major == 5 && minor >= (\d+)", "src/bench/doctor/judgement.cc") == {"11"}
    for name in ("src/bench/doctor/judgement.cc", "docs/doctor.md", "docs/policy.md"):
        assert found(r"(\d\.\d+) or later is best", name) == {"6.1"}, name


def test_the_pause_before_the_polling_thread_sleeps_is_the_same_everywhere():
    pause = found(r"poll_idle_milliseconds = (\d+);", "src/engines/uring_engine.cc")
    for name in ("include/tensorferry/options.h", "docs/guides/systems.md"):
        assert found(r"nothing has come for (\d+) ms", name) == pause, name


def test_the_limits_of_a_handle_are_the_same_everywhere():
    depth, workers, block = "4096", "256", 1 << 30
    for name in ("src/handle/settings.cc", "src/files/profile.cc"):
        assert found(r"queue_depth_max = (\d+);", name) == {depth}
        assert found(r"workers_max = (\d+);", name) >= {workers}
    commands = ("src/cli/bench_command.cc", "src/cli/point_command.cc")
    for name in commands:
        assert found(r'"--queue-depth",\s*[\w.]+, 1, (\d+)', name) == {depth}
        assert found(r'"--(?:threads|io-parallel)",\s*[\w.]+, 1, (\d+)', name) == {workers}
    aio = found(r"\bMOST\b[^={]*= (\{.*?\})", "python/tensorferry/aio.py").pop()
    assert eval(aio) == {
        "block_size": block,
        "queue_depth": int(depth),
        "intra_op_parallelism": int(workers),
    }
    contract = " ".join(read("include/tensorferry/options.h").replace("//", "").split())
    assert f"at most 1 GiB, the depth at most {depth}, and there are at most {workers}" in contract


def version():
    numbers = re.findall(
        r"define TENSORFERRY_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)",
        read("include/tensorferry/version.h"),
    )
    return ".".join(numbers)


def test_the_version_is_that_of_version_h_everywhere():
    minor = version().rpartition(".")[0]
    assert re.search(r"^## \[(.*?)\]", read("CHANGELOG.md"), re.MULTILINE)[1] == version()
    for name in ("README.md", "docs/guides/systems.md", "docs/reference/cpp.md"):
        assert found(r"find_package\(tensorferry ([\d.]+)", name) == {minor}, name
    for name in ("Makefile", "docs/reference/cpp.md"):
        assert found(r"libtensorferry\.so\.(\d+\.\d+)", name) == {minor}, name


def test_the_oldest_cmake_is_the_same_everywhere():
    needed = found(r"cmake_minimum_required\(VERSION ([\d.]+)\)", "CMakeLists.txt")
    preset = json.loads(read("CMakePresets.json"))["cmakeMinimumRequired"]
    assert needed == {f"{preset['major']}.{preset['minor']}"}
    assert found(r"at_least ([\d.]+) cmake", "scripts/packages.txt") == needed
    assert found(r"CMake ([\d.]+\d)", "README.md") == needed
    assert found(r"CMake ([\d.]+\d)", "docs/policy.md") == needed


def test_the_oldest_python_is_the_same_everywhere():
    oldest = found(r'requires-python = ">=([\d.]+)"', "pyproject.toml")
    assert {".".join(pair) for pair in found(r'"py(\d)(\d+)"', "pyproject.toml")} == oldest
    assert found(r"CPython ([\d.]+) to", "docs/policy.md") == oldest


def test_documents_name_the_versions_that_are_tested():
    torch = found(r"torch==(\d+\.\d+)", "scripts/requirements-test.txt")
    deepspeed = found(r"deepspeed==([\d.]+)", "scripts/requirements-deepspeed.txt")
    assert found(r"with torch (\d+\.\d+)", "docs/policy.md") >= torch
    for name in ("docs/policy.md", "docs/guides/deepspeed.md"):
        assert found(r"\b(0\.\d+\.\d+)\b", name) == deepspeed, name
    tested = read("scripts/requirements-test.txt")
    for name in ("transformers", "accelerate", "peft", "pytorch-lightning"):
        least = set(re.findall(rf"^{name}>=([\d.]+)", tested, re.MULTILINE))
        assert found(rf"{name} ([\d.]+\d)", "docs/policy.md") == least, name
    major = {version.split(".")[0] for version in re.findall(r"^transformers>=(.*),", tested, re.M)}
    assert found(r"transformers \(version (\d+)\)", "docs/guides/inference.md") == major
    glibc = found(r"glibc ([\d.]+\d)", "README.md")
    assert found(r"glibc ([\d.]+\d)", "docs/policy.md") == glibc


def options_in_the_page(name):
    """`name=value` in backquotes at the head of a line of a table."""
    lines = re.findall(r"^\| (`.*?) \|", read(name), re.MULTILINE)
    return dict(re.findall(r"`(\w+)=([^`]+)`", " ".join(lines)))


def test_the_page_has_the_defaults_of_the_optimizers():
    pytest.importorskip("torch")
    tensorferry = pytest.importorskip("tensorferry")
    takes = inspect.signature(tensorferry.optim.Offloaded).parameters
    told = options_in_the_page("docs/offload.md")
    pinned = found(r"pin_memory: bool = (\w+)", "python/tensorferry/_core.pyi")
    assert {told.pop("pin_memory")} == pinned
    assert len(told) >= 6
    assert {name: eval(value) for name, value in told.items()} == {
        name: takes[name].default for name in told
    }


def test_cpp_and_python_have_the_same_defaults():
    tensorferry = pytest.importorskip("tensorferry")
    for name in ("aio_read", "aio_write"):
        takes = inspect.signature(getattr(tensorferry, name)).parameters
        for header in ("aio.h", "torch.h"):
            text = read(f"include/tensorferry/{header}")
            said = re.search(rf"int {name}\((.*?)\)", text.replace("{1}", "1"), re.DOTALL)[1]
            defaults = dict(re.findall(r"(\w+) = ([^,]+)", said.replace("std::size_t", "")))
            words = {"true": "True", "false": "False", "nullptr": "None"}
            for option in ("block_size", "queue_depth", "single_submit", "overlap_events"):
                value = defaults[option].strip()
                assert eval(words.get(value, value)) == takes[option].default, (header, option)
    buffers = found(r"buffer_bytes = .*?\{(\d+)\} << 20;", "include/tensorferry/swap_space.h")
    assert found(r'"buffer_bytes"\) = .*?\{(\d+)\} << 20', "python/src/swap.cc") == buffers
    limit = found(r"close_limit_seconds = (\d+);", "include/tensorferry/options.h")
    assert found(r'"close_limit_seconds"\) = (\d+)\.0', "python/src/handle.cc") == limit
    for page in ("docs/architecture.md", "docs/guides/systems.md"):
        assert found(r"`close_limit_seconds` \((\d+) s\)", page) == limit, page


def test_the_page_has_the_defaults_of_a_configuration():
    pytest.importorskip("torch")
    config = pytest.importorskip("tensorferry._config.config").Config({"aio": {}})
    names = {"block_size": "block_bytes", "intra_op_parallelism": "workers"}
    names["overlap_events"] = "overlap"
    values = {"true": True, "false": False}
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (.*) \|$", read("docs/offload.md"), re.MULTILINE))
    for key, made in (
        ("zero_optimization.offload_optimizer", config.offload_optimizer),
        ("zero_optimization.offload_param", config.offload_param),
        ("aio", config.handle_options),
    ):
        told = dict(re.findall(r"`(\w+)` ([\de]+|true|false)\b", rows[key]))
        told.pop("single_submit", None)  # a word in a Handle: "batch"
        assert len(told) >= 3
        for name, value in told.items():
            expected = values[value] if value in values else float(value)
            assert made[names.get(name, name)] == expected, (key, name)


def test_the_memory_for_slots_is_the_same_everywhere():
    slots = found(r"auto_slot_bytes = (\d+) \* MiB", "src/handle/settings.cc")
    assert found(r"cannot go in place; 0: (\d+) MiB", "include/tensorferry/options.h") == slots
    assert found(r"`slot_bytes`, (\d+) MiB", "docs/gpu.md") == slots
    assert found(r"\| slots \| (\d+) MiB", "docs/performance.md") == slots


def test_the_packages_that_a_checkout_needs_are_the_same_everywhere():
    needed = found(r"\bbuild ([\w-]+-dev)\b", "scripts/packages.txt")
    needed -= {"libgtest-dev", "python3-dev"}  # for the tests, and with every Python
    for name in ("README.md", "docs/start.md"):
        assert found(r"\b((?:lib|nlohmann)[\w-]+-dev)\b", name) == needed, name


def test_the_page_has_the_default_space_of_a_sweep():
    sweep = pytest.importorskip("tensorferry.sweep")
    rows = re.findall(r"^\| `(\w+)` \| .*? \| (.*?) \| .* \|$", read("docs/sweep.md"), re.MULTILINE)
    told = {key: values.split(", ") for key, values in rows}
    for key, values in sweep.DEFAULT_SWEEP_CONFIG.items():
        assert told[key] == [
            str(value).lower() if value in (True, False) else str(value) for value in values
        ], key


@pytest.mark.parametrize("command", ["bench", "sweep", "point", "tune", "plan", "verify", "report"])
def test_the_page_of_a_command_has_the_defaults_of_its_help(command, build_dir):
    help_text = run(build_dir / "bin/tensorferry", command, "--help")
    defaults = re.findall(
        r"^  (?:-\w,)?(--[\w-]+) [A-Z]+=(.+?)(?: \.\.\.)?(?:  .*)?$", help_text, re.MULTILINE
    )
    assert defaults
    page = read("docs/sweep.md" if command == "point" else f"docs/{command}.md")
    page = page[page.index("## One point by hand") :] if command == "point" else page
    for flag, value in defaults:
        lines = [
            line
            for line in page.splitlines()
            if re.search(rf"`{flag.replace('-', '[-_]')}\b", line)
        ]
        assert any(value in line for line in lines), f"{flag}: {value} is not in {lines}"


def test_extras_of_the_package_that_are_named_exist():
    project = read("pyproject.toml")
    section = re.search(r"\[project.optional-dependencies\]\n(.*?)\n\n", project, re.DOTALL)[1]
    extras = set(re.findall(r"^(\w+) =", section, re.MULTILINE))
    files = [ROOT / "README.md"]
    for folder, pattern in (("src", "*.cc"), ("python", "*.py"), ("docs", "*.md")):
        files += (ROOT / folder).rglob(pattern)
    named = {name for path in files for name in re.findall(r"'\.\[(\w+)\]'", path.read_text())}
    assert named and named <= extras


PACKAGE = "python/tensorferry/"
SYSTEMS = "docs/guides/systems.md"
NUMBERS = [  # (where the code has a number, {where else it stands})
    ((f"{PACKAGE}optim/traffic.py", r"_STEPS = (\d+)"), {"docs/offload.md": r"last (\d+) steps"}),
    (
        ("python/src/masters.cc", r"block_elements = (\d+);"),
        {"docs/offload.md": r"digest of every ([\d,]+) elements"},
    ),
    (
        (f"{PACKAGE}offload/residency.py", r"_AHEAD_BYTES = (\d+) << 20"),
        {"docs/offload.md": r"\((\d+) MiB at most\)"},
    ),
    (
        (f"{PACKAGE}offload/__init__.py", r"keep_bytes: int = (\d+) << 10"),
        {"docs/offload.md": r"`keep_bytes` \((\d+) KiB\)"},
    ),
    (
        (f"{PACKAGE}_saving/line.py", r"_EXIT_LIMIT_SECONDS = (\d+)"),
        {"docs/checkpoint.md": r"has not moved for (\d+) seconds"},
    ),
    (
        (f"{PACKAGE}_saving/line.py", r"STAGE_BYTES = (\d+) << 30"),
        {
            "docs/checkpoint.md": r"(\d+) GiB unless you say otherwise",
            f"{PACKAGE}checkpoint/__init__.py": r"\((\d+) GiB, unless you say otherwise\)",
        },
    ),
    (
        (f"{PACKAGE}checkpoint/torch_writer.py", r"WINDOWS = (\d+)"),
        {"docs/checkpoint.md": r"(\d+) windows of 16 MiB"},
    ),
    (
        (f"{PACKAGE}dcp/piece_checksums.py", r"PIECE_BYTES = (\d+) << 10"),
        {"docs/dcp.md": r"adds checksums of (\d+) KiB each"},
    ),
    (
        (f"{PACKAGE}dcp/safetensors_sums.py", r"_PIECE_BYTES = (\d+) << 10"),
        {"docs/dcp.md": r"Pieces of (\d+) KiB that two ranks"},
    ),
    (
        ("src/handle/claim_queue.h", r"passed_over_max = (\d+);"),
        dict.fromkeys(
            ("include/tensorferry/options.h", "docs/architecture.md", SYSTEMS),
            r"After (\d+) blocks of (?:// )?higher",
        ),
    ),
    (
        ("src/handle/governor.h", r"limit_max = (\d+) \* MiB"),
        dict.fromkeys(
            ("include/tensorferry/options.h", "docs/architecture.md", SYSTEMS),
            r"between 1 and (?:// )?(\d+) MiB",
        ),
    ),
    (
        ("src/handle/settings.cc", r"lane_queue_depth = (\d+);"),
        {"docs/architecture.md": r"not fit on a lane \(more than (\d+) requests"},
    ),
    (
        ("src/handle/settings.cc", r"lane_slots = (\d+);"),
        {"docs/architecture.md": r"more than (\d+) of them through slots"},
    ),
    (
        ("src/handle/conductor.cc", r"lane_bytes_max = (\d+) \* KiB;"),
        {"docs/architecture.md": r"operation of at most (\d+) KiB goes on the lane"},
    ),
    (
        ("src/handle/transfer_builder.cc", r"read_over_bytes_max = (\d+) \* KiB;"),
        {"docs/architecture.md": r"moves over gaps of up to (\d+) KiB"},
    ),
    (
        ("src/handle/process_share.cc", r"slot_bytes_max = (\d+) \* MiB"),
        {
            "src/handle/process_share.h": r"(\d+) MiB of slots",
            "docs/scale.md": r"and (\d+) MiB of slots",
        },
    ),
]


@pytest.mark.parametrize("source, others", NUMBERS, ids=[where[0] for where, _ in NUMBERS])
def test_a_number_of_the_code_is_the_same_in_the_documents(source, others):
    name, pattern = source
    number = found(pattern, name)
    for other, words in others.items():
        assert {value.replace(",", "") for value in found(words, other)} == number, other
