"""The rules of the house, as functions from a source tree to a list of violations.

Every function takes the root of a tree and returns one line of text per violation, so that a test
can plant a fault in a copy of the tree and see the rule find it.
"""

import re
from functools import cache
from pathlib import Path

# Each room and the rooms below it. engines, files and memory are peers: they meet in handle.
ROOMS = {
    "base": set(),
    "os": {"base"},
    "engines": {"os", "base"},
    "files": {"os", "base"},
    "memory": {"os", "base"},
    "handle": {"engines", "files", "memory", "os", "base"},
    "swap": {"handle", "engines", "files", "memory", "os", "base"},
    "checkpoint": {"handle", "engines", "files", "memory", "os", "base"},
    "bench": set(),
    "cli": {"bench"},
}

# No part of the library: they use it through its public headers alone, like everybody else.
OUTSIDE = {"bench", "cli"}

# The folders of bench: each includes itself and what all of them share.
BENCH_FOLDERS = {"measure", "doctor", "plan", "verify", "run"}
BENCH_SHARED = "run"

# Each public header belongs to the room that implements it.
PUBLIC_HEADERS = {
    "aio.h": "handle",
    "checkpoint.h": "checkpoint",
    "copy.h": "memory",
    "device.h": "files",
    "error.h": "base",
    "export.h": "base",
    "file.h": "files",
    "gds.h": "engines",
    "gpu.h": "memory",
    "handle.h": "handle",
    "operation.h": "handle",
    "options.h": "base",
    "pinned_buffer.h": "memory",
    "priority.h": "handle",
    "stats.h": "handle",
    "swap_space.h": "swap",
    "tensorferry.h": "swap",
    "trace.h": "handle",
    "version.h": "base",
}

# Header-only doors for programs that use torch: no part of the library, and the only places where
# its types appear. They may print, as what they stand in for does.
ADAPTERS = {"torch.h", "deepspeed_py_aio.h"}
ADAPTED = re.compile(r"^(torch|ATen|c10)/")

# Libraries that serve the command.
COMMAND_ONLY = re.compile(r"^(CLI|fmt|nlohmann)/")

# Headers of other libraries that have one home each.
HOMES = {
    "libaio.h": "engines/libaio_engine.cc",
    "liburing.h": "engines/uring_engine.cc",
}

# Of the library's files, those that compute checksums. The command computes some of its own.
CHECKSUMS_HOMES = ("base/xxh3.cc", "base/xxh3_avx2.cc")

# The library depends on none of these. gtest is for tests only.
FOREIGN = re.compile(
    r"^(Python\.h|pybind11/|nanobind/|torch/|ATen/|c10/|dlpack/|cuda|cufile|driver_types\.h)"
)
TEST_ONLY = re.compile(r"^(gtest|gmock|benchmark)/")

INCLUDE = re.compile(r'^\s*#\s*include\s*(?:<([^>]+)>|"([^"]+)")', re.MULTILINE)

# Libraries that may not be there are loaded in one file each.
LOADERS = {"os/cuda.cc", "engines/cufile.cc"}
LOADING = re.compile(r"\bdl(?:m?open)\s*\(")

# Variables steer no program with privileges: plain getenv() has one that is safe in its place, and
# that one seam in the library. The rooms outside of it, and Python's, cannot reach the seam.
VARIABLE = re.compile(r"\b(?:getenv|_*environ)\b")
SAFE_VARIABLE = re.compile(r"\bsecure_getenv\b")
VARIABLE_SEAM = "src/os/environment.cc"
# It hands all of it to programs that it starts, and chooses nothing by it.
PASSES_ON_VARIABLES = "src/bench/run/process.cc"
# Python's reading of a variable of ours, which must ask first.
OWN_VARIABLE = re.compile(r"environ.*TENSORFERRY_|getenv\(.*TENSORFERRY_")

# Printing, and ending the process.
OUTSPOKEN = re.compile(
    r"\bstd::(?:cout|cerr|clog|print|println)\b"
    r"|\b(?:stdout|stderr|STDOUT_FILENO|STDERR_FILENO)\b"
    r"|(?<![\w.>])(?:printf|vprintf|fprintf|vfprintf|dprintf|puts|putchar|perror|syslog)\s*\("
    r"|(?<![\w.>])(?:abort|exit|_exit|_Exit|quick_exit|terminate|assert)\s*\("
)


def cpp_files(folder):
    return sorted(p for p in folder.rglob("*") if p.suffix in (".h", ".cc"))


def is_test(path):
    return path.name.endswith(("_test.cc", "_fixture.h"))


def includes(path):
    """(line number, name, is it in quotes) of each #include."""
    return includes_in(path.read_text())


# Tests look at copies of the tree that differ in one file: what was read once is remembered.
@cache
def includes_in(text):
    found = []
    for match in INCLUDE.finditer(text):
        angled, quoted = match.groups()
        line = text.count("\n", 0, match.end()) + 1
        found.append((line, angled or quoted, bool(quoted)))
    return found


@cache
def code_of(text):
    """The text without comments, and with the insides of strings blanked; lines stay lines."""
    token = re.compile(
        r'R"\((?:.|\n)*?\)"|"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*(?:.|\n)*?\*/', re.MULTILINE
    )

    def blank(match):
        lines = "\n" * match.group().count("\n")
        return lines if match.group().startswith("/") else '""' + lines

    return token.sub(blank, text)


def check_includes(root):
    """A room includes only itself and rooms below it; a public header only public headers."""
    return check_room_includes(root) + check_public_includes(root) + check_python_includes(root)


def check_room_includes(root):
    src = root / "src"
    found = []
    for path in cpp_files(src):
        name = path.relative_to(src).as_posix()
        room = name.split("/")[0]
        misplaced = room == "bench" and name.split("/")[1] not in BENCH_FOLDERS
        if "/" not in name or room not in ROOMS or misplaced:
            found.append(f"src/{name}: belongs to no room")
            continue
        for line, header, quoted in includes(path):
            problem = judge_include(src, name, room, header, quoted)
            if problem:
                found.append(f"src/{name}:{line}: includes {header}: {problem}")
    return found


def judge_include(src, name, room, header, quoted):
    test = is_test(Path(name))
    if FOREIGN.match(header):
        return "the library does not know this library"
    if header in HOMES:
        return None if name == HOMES[header] else f"belongs in {HOMES[header]} alone"
    if not test and (TEST_ONLY.match(header) or is_test(Path(header))):
        return "only tests may"
    if COMMAND_ONLY.match(header) and room not in OUTSIDE:
        return "only the command may"
    if header == "xxhash.h" and room not in OUTSIDE and name not in CHECKSUMS_HOMES:
        return f"belongs in {' and '.join(CHECKSUMS_HOMES)} alone"
    first, _, rest = header.partition("/")
    if first == "tensorferry" and room in OUTSIDE:
        return None if rest in PUBLIC_HEADERS else "not of the public API"
    if first == "tensorferry":
        owner = PUBLIC_HEADERS.get(rest)
        if owner is None:
            return "this public header has no room"
    elif not quoted or test and first == "support":
        return None
    else:
        owner = first
        if not (src / header).is_file():
            return "there is no such file in src"
    if owner == room == "bench":
        return judge_bench_include(name, header)
    if owner == room or owner in ROOMS[room]:
        return None
    return f"{room} does not stand above {owner}"


def judge_bench_include(name, header):
    folder, target = name.split("/")[1], header.split("/")[1]
    if target in (folder, BENCH_SHARED):
        return None
    return f"bench/{folder} does not stand above bench/{target}"


def check_public_includes(root):
    found = []
    for path in cpp_files(root / "include"):
        name = path.relative_to(root).as_posix()
        known = PUBLIC_HEADERS.keys() | ADAPTERS
        if path.parent != root / "include" / "tensorferry" or path.name not in known:
            found.append(f"{name}: belongs to no room")
        for line, header, quoted in includes(path):
            if path.name in ADAPTERS and (ADAPTED.match(header) or header == "tensorferry/torch.h"):
                continue
            public = header.removeprefix("tensorferry/") in PUBLIC_HEADERS
            standard = not quoted and re.fullmatch(r"[a-z_]+", header)
            if not standard and not (quoted and header.startswith("tensorferry/") and public):
                found.append(
                    f"{name}:{line}: includes {header}: neither public nor of the C++ standard"
                )
    return found


def check_python_includes(root):
    """The Python door uses the public API, nanobind and its own files."""
    found = []
    folder = root / "python" / "src"
    for path in cpp_files(folder):
        for line, header, quoted in includes(path):
            public = header.removeprefix("tensorferry/") in PUBLIC_HEADERS
            if quoted and not (folder / header).is_file() and not public:
                found.append(
                    f"{path.relative_to(root)}:{line}: includes {header}: not of the public API"
                )
    return found


def check_manners(root):
    """Only the command prints, aborts or exits; the library and what measures never do."""
    found = []
    for path in cpp_files(root / "src") + cpp_files(root / "include"):
        if is_test(path) or path.name in ADAPTERS or root / "src" / "cli" in path.parents:
            continue
        for number, line in enumerate(code_of(path.read_text()).splitlines(), 1):
            match = OUTSPOKEN.search(line)
            if match and "static_assert" not in match.group():
                found.append(f"{path.relative_to(root)}:{number}: {match.group()}")
    return found


def check_loading(root):
    """Libraries that may not be there are loaded in one file each."""
    src = root / "src"
    found = []
    for path in cpp_files(src):
        name = path.relative_to(src).as_posix()
        if is_test(path) or name in LOADERS or name.split("/")[0] in OUTSIDE:
            continue
        for number, line in enumerate(code_of(path.read_text()).splitlines(), 1):
            if LOADING.search(line):
                found.append(f"src/{name}:{number}: loads a library")
    return found


def check_variables(root):
    """No variable of the environment is read in a way that steers a program with privileges."""
    found = []
    folders = [root / "src", root / "include", root / "python" / "src"]
    for path in [path for folder in folders for path in cpp_files(folder)]:
        name = path.relative_to(root).as_posix()
        if is_test(path) or name == VARIABLE_SEAM:
            continue
        outside = name.startswith(tuple(f"src/{room}/" for room in OUTSIDE)) or "python" in name
        for number, line in enumerate(code_of(path.read_text()).splitlines(), 1):
            plain = VARIABLE.search(line) and name != PASSES_ON_VARIABLES
            if plain or (SAFE_VARIABLE.search(line) and not outside):
                found.append(f"{name}:{number}: reads a variable; use os::variable()")
    for path in sorted((root / "python" / "tensorferry").rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if OWN_VARIABLE.search(line) and "privileged()" not in line:
                found.append(f"{path.relative_to(root)}:{number}: does not ask privileged()")
    return found


def check_build(root):
    """Every source file and every test is named in the CMake file that must build it."""
    found = []
    for cmake_file in (
        "src/CMakeLists.txt",
        "tests/faults/CMakeLists.txt",
        "tests/fuzz/CMakeLists.txt",
        "tests/support/CMakeLists.txt",
        "python/CMakeLists.txt",
    ):
        listing = root / cmake_file
        folder = listing.parent
        if not folder.is_dir():
            continue
        named = set(re.findall(r"[\w/]+(?:\.cc)?", uncommented(listing)))
        for path in cpp_files(folder):
            name = path.relative_to(folder).as_posix()
            # A list of programs may leave the ending to a function.
            if (
                path.suffix == ".cc"
                and name not in named
                and not (folder.name in ("faults", "fuzz") and path.stem in named)
            ):
                found.append(f"{path.relative_to(root)}: not named in {cmake_file}")
    return found


def check_links(root):
    """Each room is a target that links only the rooms below it."""
    found = []
    text = uncommented(root / "src" / "CMakeLists.txt")
    linked = {}
    for body in re.findall(r"tensorferry_room\(([^)]*)\)", text):
        words = body.split()
        room = words[words.index("NAME") + 1]
        below = []
        if "BELOW" in words:
            for word in words[words.index("BELOW") + 1 :]:
                if word.isupper():
                    break
                below.append(word)
        linked[room] = set(below)
        for other in sorted(linked[room] - ROOMS.get(room, set())):
            found.append(f"src/CMakeLists.txt: {room} links {other}, which is not below it")
    for room in ROOMS.keys() - linked.keys():
        found.append(f"src/CMakeLists.txt: no room {room}")
    return found


def uncommented(cmake_file):
    return re.sub(r"#[^\n]*", "", cmake_file.read_text()) if cmake_file.is_file() else ""
