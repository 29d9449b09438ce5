"""What a user gets: headers, two libraries, a CMake package, a pkg-config file, and no more."""

import os
import re
import subprocess

import pytest
from house import run
from rooms import ADAPTERS

# It names the fields that a user sets, each in its place: that must compile in every version.
CONSUMER = r"""
#include <tensorferry/tensorferry.h>

#include <cstdio>
#include <vector>

#if TENSORFERRY_VERSION_NUMBER < 1000
#error "no version to speak of"
#endif

using namespace tensorferry;

const HandleOptions options{.engine = EngineKind::automatic,
                            .block_bytes = 1 << 20,
                            .queue_depth = 8,
                            .workers = 1,
                            .submit = Submit::batch,
                            .overlap = Overlap::on,
                            .slot_bytes = 0};
const SwapOptions swap_options{.directories = {"."},
                               .buffer_bytes = 1 << 20,
                               .memory = SwapMemory::ordinary,
                               .run = "consumer",
                               .rank = 0,
                               .handle = {.queue_depth = 8, .workers = 1}};
const Profile profile{
    .engine = EngineKind::threads, .block_bytes = 1 << 20, .queue_depth = 8, .workers = 1};
const SwapPart part{.key = "tensor", .offset = 0, .bytes = 4096};
const CudaStream stream{.handle = nullptr};

int main() {
  try {
    if (library_version_number() != TENSORFERRY_VERSION_NUMBER) return 2;
    if (library_version() != TENSORFERRY_VERSION) return 2;
    tensorferry::Handle handle(options);
    SwapSpace(swap_options).reserve(1);
    std::vector<std::byte> written(100'000, std::byte{42});
    std::vector<std::byte> read(written.size());
    handle.write(written, "consumer.bin", 7).wait();
    handle.read(read, "consumer.bin", 7).wait();
    std::printf("%s %d\n", TENSORFERRY_VERSION, read == written);
    handle.read_now(read, "missing.bin");
  } catch (const tensorferry::Error& error) {
    std::printf("%s\n", error.what());
    return error.path() == "missing.bin" ? 0 : 1;
  }
  return 1;
}
"""

CMAKE_CONSUMER = """
cmake_minimum_required(VERSION 3.25)
project(consumer LANGUAGES CXX)
find_package(tensorferry {version} REQUIRED)
add_executable(shared_consumer consumer.cc)
target_link_libraries(shared_consumer PRIVATE tensorferry::tensorferry)
add_executable(static_consumer consumer.cc)
target_link_libraries(static_consumer PRIVATE tensorferry::static)
"""

INNER_ROOMS = ("os", "engines", "files", "memory", "handle")

# Printing and ending the process, as the linker knows them. std::terminate is not here: noexcept
# and std::thread refer to it in the standard headers themselves.
OUTSPOKEN = re.compile(
    r"(?:__)?(?:v?f?|d)printf(?:_chk)?|puts|putchar|perror|psignal|v?syslog|stdout|stderr"
    r"|abort|exit|_exit|_Exit|quick_exit|__assert_fail|raise"
    r"|std::(?:cout|cerr|clog|wcout|wcerr|wclog|__glibcxx_assert_fail\(.*)"
)


@pytest.fixture(scope="module")
def version(root):
    header = (root / "include/tensorferry/version.h").read_text()
    numbers = re.findall(r"TENSORFERRY_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)\n", header)
    assert len(numbers) == 3
    return ".".join(numbers)


@pytest.fixture
def consumer(tmp_path):
    (tmp_path / "consumer.cc").write_text(CONSUMER)
    return tmp_path


@pytest.fixture(scope="module")
def pkg_config(prefix):
    folder = next(prefix.rglob("tensorferry.pc")).parent

    def ask(*options):
        environment = os.environ | {"PKG_CONFIG_PATH": str(folder)}
        return run("pkg-config", *options, "tensorferry", env=environment).split()

    return ask


def library(prefix, name):
    return next(prefix.rglob(name))


def check_run(program, folder, version):
    assert run(program, cwd=folder).splitlines()[0] == f"{version} 1"


def is_linked_dynamically(program):
    return "libtensorferry.so" in run("readelf", "-d", program)


def test_a_cmake_consumer_builds_and_runs_with_both_libraries(consumer, prefix, cxx, version):
    (consumer / "CMakeLists.txt").write_text(CMAKE_CONSUMER.format(version=version))
    build = consumer / "build"
    run(
        "cmake",
        "-S",
        consumer,
        "-B",
        build,
        "-G",
        "Ninja",
        f"-DCMAKE_PREFIX_PATH={prefix}",
        f"-DCMAKE_CXX_COMPILER={cxx}",
        "-DCMAKE_FIND_USE_PACKAGE_REGISTRY=OFF",
    )
    run("cmake", "--build", build, "-j", "2")
    for program in ("shared_consumer", "static_consumer"):
        check_run(build / program, consumer, version)
    assert is_linked_dynamically(build / "shared_consumer")
    assert not is_linked_dynamically(build / "static_consumer")


def test_cmake_refuses_another_minor_version(consumer, prefix, cxx, version):
    major, minor, _ = version.split(".")
    wanted = f"{major}.{int(minor) + 1}"
    (consumer / "CMakeLists.txt").write_text(CMAKE_CONSUMER.format(version=wanted))
    done = subprocess.run(
        [
            "cmake",
            "-S",
            consumer,
            "-B",
            consumer / "build",
            "-G",
            "Ninja",
            f"-DCMAKE_PREFIX_PATH={prefix}",
            f"-DCMAKE_CXX_COMPILER={cxx}",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0 and f"{wanted}" in done.stderr


def test_a_pkg_config_consumer_builds_and_runs(consumer, prefix, pkg_config, cxx, version):
    program = consumer / "consumer"
    run(
        cxx,
        "-std=c++20",
        consumer / "consumer.cc",
        "-o",
        program,
        *pkg_config("--cflags", "--libs"),
    )
    assert is_linked_dynamically(program)
    folder = library(prefix, "libtensorferry.so").parent
    output = run(program, cwd=consumer, env=os.environ | {"LD_LIBRARY_PATH": str(folder)})
    assert output.splitlines()[0] == f"{version} 1"


def test_a_static_pkg_config_consumer_builds_and_runs(consumer, pkg_config, cxx, version):
    program = consumer / "consumer"
    run(
        cxx,
        "-std=c++20",
        "-static",
        consumer / "consumer.cc",
        "-o",
        program,
        *pkg_config("--cflags", "--libs", "--static"),
    )
    check_run(program, consumer, version)


def test_each_public_header_compiles_alone(prefix, cxx, tmp_path):
    # Those for torch have a test of their own, with torch: tests/python/test_torch_headers.py.
    headers = sorted(
        path for path in (prefix / "include/tensorferry").glob("*.h") if path.name not in ADAPTERS
    )
    assert headers
    for header in headers:
        source = tmp_path / "alone.cc"
        source.write_text(f"#include <tensorferry/{header.name}>\n")
        run(
            cxx,
            "-std=c++20",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-fsyntax-only",
            f"-I{prefix}/include",
            source,
        )


def test_nothing_but_the_public_headers_is_installed(root, prefix):
    def names(folder):
        return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())

    assert names(prefix / "include") == names(root / "include")


def test_the_version_is_the_same_everywhere(root, prefix, build_dir, pkg_config, version):
    assert pkg_config("--modversion") == [version]
    package = library(prefix, "tensorferryConfigVersion.cmake").read_text()
    assert f'set(PACKAGE_VERSION "{version}")' in package
    assert library(prefix, "libtensorferry.so").resolve().name == f"libtensorferry.so.{version}"
    for name in ("CMakeLists.txt", "cmake/library.cmake", "cmake/tensorferry.pc.in"):
        assert version not in (root / name).read_text(), f"{name} repeats the version"
    minor = version.rpartition(".")[0]
    assert f"TENSORFERRY_{minor}" not in (root / "cmake/exports.map.in").read_text()


def test_binaries_are_bound_to_the_minor_version(prefix, version):
    """By the name they ask for and by every symbol: docs/reference/cpp.md promises no more."""
    minor = version.rpartition(".")[0]
    shared = library(prefix, "libtensorferry.so")
    assert f"[libtensorferry.so.{minor}]" in run("readelf", "-d", shared)
    symbols = [line.split()[-1] for line in run("nm", "-D", "--defined-only", shared).splitlines()]
    versions = {symbol.partition("@@")[2] for symbol in symbols if "@@" in symbol}
    assert versions == {f"TENSORFERRY_{minor}"}


def test_the_wheel_reads_the_same_version(root, version):
    tomllib = pytest.importorskip("tomllib")
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    source = settings["tool"]["scikit-build"]["metadata"]["version"]
    match = re.search(source["regex"], (root / source["input"]).read_text(), re.MULTILINE)
    assert source["result"].format(**match.groupdict()) == version


def test_the_shared_library_needs_only_the_system(prefix):
    dynamic = run("readelf", "-d", library(prefix, "libtensorferry.so"))
    needed = re.findall(r"NEEDED.*\[(.*)\]", dynamic)
    # liburing and libaio are linked in; neither CUDA nor Python nor torch is known.
    assert {name.split(".")[0] for name in needed} <= {
        "libstdc++",
        "libm",
        "libgcc_s",
        "libc",
        "ld-linux-x86-64",
        "ld-linux-aarch64",
    }


def exported_symbols(shared_library):
    """The demangled name of each symbol that the dynamic linker can see."""
    listed = run("nm", "-DC", "--defined-only", "--without-symbol-versions", shared_library)
    for line in listed.splitlines():
        _, kind, name = line.split(maxsplit=2)
        if kind != "A":  # the names of the versions themselves
            yield name


def is_public(symbol):
    path = re.sub(r"^(?:vtable|typeinfo|typeinfo name) for ", "", symbol)
    return path.startswith("tensorferry::") and not path.startswith(
        tuple(f"tensorferry::{room}::" for room in INNER_ROOMS)
    )


def test_only_the_public_api_is_exported(prefix):
    symbols = list(exported_symbols(library(prefix, "libtensorferry.so")))
    assert any(symbol.startswith("tensorferry::Handle::read(") for symbol in symbols)
    others = [symbol for symbol in symbols if not is_public(symbol)]
    assert not others, f"{len(others)} symbols are not of the public API:\n" + "\n".join(others)


@pytest.mark.parametrize(
    "symbol, public",
    [
        ("tensorferry::Handle::read(std::span<std::byte>, std::string const&)", True),
        ("typeinfo for tensorferry::Error", True),
        ("tensorferry::handle::Conductor::run()", False),
        ("vtable for tensorferry::engines::Engine", False),
        ("io_uring_setup", False),
        ("std::vector<tensorferry::File>::push_back()", False),
    ],
)
def test_public_symbols_are_told_from_others(symbol, public):
    assert is_public(symbol) == public


def imported_symbols(archive):
    """(member, demangled name) of each symbol that the archive's members ask for."""
    member = ""
    for line in run("nm", "-C", "-u", archive).splitlines():
        if line.endswith(":"):
            member = line[:-1]
        elif line.strip():
            yield member, line.split(maxsplit=1)[1]


def outcries(archive):
    return [
        f"{member}: {name}"
        for member, name in imported_symbols(archive)
        if OUTSPOKEN.fullmatch(name)
    ]


def test_the_library_cannot_print_abort_or_exit(prefix):
    found = outcries(library(prefix, "libtensorferry.a"))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "statement",
    [
        "std::cerr << 1;",
        'std::printf("%d", n);',
        'std::puts("");',
        'std::fputs("x", stderr);',
        "std::abort();",
        "std::exit(n);",
        "::_exit(n);",
    ],
)
def test_a_planted_outcry_is_found(tmp_path, cxx, statement):
    source = tmp_path / "loud.cc"
    source.write_text(
        "#include <unistd.h>\n#include <cstdio>\n#include <cstdlib>\n"
        "#include <iostream>\nvoid loud(int n) { (void)n; " + statement + " }\n"
    )
    run(cxx, "-O2", "-c", source, "-o", tmp_path / "loud.o")
    run("ar", "rcs", tmp_path / "loud.a", tmp_path / "loud.o")
    assert outcries(tmp_path / "loud.a")
