"""The wheel: built by pip, needs nothing but glibc and the C++ runtime, imports nothing heavy."""

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import tensorferry
from programs import check_python, run_python

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = {
    "libc.so.6",
    "libm.so.6",
    "libgcc_s.so.1",
    "libstdc++.so.6",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
    "libpthread.so.0",
    "libdl.so.2",
    "librt.so.1",
}


# Not the package of the build folder.
CLEAN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """A wheel for the Python that runs this, built by pip from the working tree."""
    place = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--wheel-dir",
            place,
            ROOT,
        ],
        check=True,
        timeout=900,
    )
    (built,) = place.glob("tensorferry-*.whl")
    return built


def install(python, wheel):
    """Installs a wheel into the environment of this Python, without a network."""
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index"]
    subprocess.run([*pip, wheel], check=True, timeout=300)


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory):
    """The Python of an empty environment with the wheel and nothing else."""
    place = tmp_path_factory.mktemp("empty")
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    install(python, wheel)
    return python


def test_version_is_the_one_number(wheel):
    header = (ROOT / "include/tensorferry/version.h").read_text()
    version = ".".join(re.findall(r"TENSORFERRY_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)\n", header))
    assert tensorferry.__version__ == version
    assert wheel.name.startswith(f"tensorferry-{version}-")


def test_wheel_holds_what_it_should(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for name in (
        "tensorferry/__init__.py",
        "tensorferry/py.typed",
        "tensorferry/_core.pyi",
        "tensorferry-deepspeed.pth",
    ):
        assert name in names
    assert sum(".so" in name for name in names) == 1
    assert [name for name in names if name.endswith("/scripts/tensorferry")]
    assert not [name for name in names if name.startswith(("include", "lib", "tests"))]


def test_wheel_needs_only_glibc_and_the_cxx_runtime(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if ".so" in name]
        library = archive.extract(name, tmp_path)
    section = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True)
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", section.stdout))
    assert needed <= OUTSIDE, needed - OUTSIDE


def test_auditwheel_agrees_with_the_readme(wheel):
    shown = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", wheel],
        capture_output=True,
        text=True,
        check=True,
    )
    text = " ".join(shown.stdout.split())
    tag = re.search(r'tag: "(manylinux_\d+_\d+)', text)
    assert tag, text
    glibc = tag[1].removeprefix("manylinux_").replace("_", ".")
    assert f"glibc {glibc}" in (ROOT / "README.md").read_text(), f"the wheel needs glibc {glibc}"


def test_it_works_in_an_empty_environment(installed, tmp_path):
    done = subprocess.run(
        [
            installed,
            "-c",
            "import sys, tensorferry; tensorferry.aio_write(b'hello', 'x')\n"
            "data = bytearray(5); tensorferry.aio_read(data, 'x'); assert data == b'hello'\n"
            "assert not {'torch', 'numpy', 'asyncio', 'concurrent.futures'} & set(sys.modules)",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=CLEAN,
    )
    assert done.returncode == 0, done.stderr


def test_the_wheel_brings_the_command(installed, tmp_path):
    program = installed.parent / "tensorferry"
    done = subprocess.run(
        [program, "bench", "--sizes", "4K", "--iterations", "3", "--json", "r"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=CLEAN,
    )
    assert done.returncode == 0 and "Read Statistics:" in done.stdout, done.stderr
    # The page needs plotly, which this environment does not have: one line says what to do.
    done = subprocess.run(
        [program, "report", "r"], cwd=tmp_path, capture_output=True, text=True, env=CLEAN
    )
    assert done.returncode == 1 and "pip install" in done.stderr and "Traceback" not in done.stderr
    # The program's Python face finds the command beside its Python.
    done = subprocess.run(
        [installed, "-m", "tensorferry.sweep", "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=CLEAN,
    )
    assert done.returncode == 0 and "--nvme-dir" in done.stdout, done.stderr


def test_the_environment_variable_is_read_at_the_start(installed):
    code = "import sys; print('tensorferry._at_start' in sys.modules)"
    for value, expected in (("1", "True"), ("0", "False"), ("", "False")):
        done = subprocess.run(
            [installed, "-c", code],
            capture_output=True,
            text=True,
            env=CLEAN | {"TENSORFERRY_DEEPSPEED": value},
        )
        assert done.stdout.strip() == expected, done.stderr


def test_one_wheel_serves_python_3_12_and_later(tmp_path):
    """Built by 3.12 and used by the newest there is."""
    found = {name: shutil.which(name) for name in ("python3.12", "python3.13", "python3.14")}
    usable = [path for path in found.values() if path and runs_python(path)]
    if not found["python3.12"] or found["python3.12"] not in usable:
        pytest.skip("no python3.12 here")
    subprocess.run(
        ["make", "wheel", "PYTHON=" + found["python3.12"], f"DIST={tmp_path}"],
        cwd=ROOT,
        check=True,
        timeout=900,
        capture_output=True,
    )
    (built,) = tmp_path.glob("*.whl")
    assert "-cp312-abi3-" in built.name
    for python in usable:
        subprocess.run([python, "-m", "venv", tmp_path / "venv", "--clear"], check=True)
        inside = tmp_path / "venv/bin/python"
        install(inside, built)
        subprocess.run(
            [inside, "-c", "import tensorferry as t; t.aio_write(b'x' * 9999, 'x')"],
            check=True,
            cwd=tmp_path,
            env=CLEAN,
        )


def runs_python(path):
    return subprocess.run([path, "-c", "import venv"], capture_output=True).returncode == 0


def test_no_torch_without_need():
    check_python(
        """
        import sys, tensorferry
        tensorferry.aio_handle()
        assert "torch" not in sys.modules
        """
    )


def test_logging_is_silent_by_default(tmp_path):
    check_python(
        """
        import sys, tensorferry
        open(sys.argv[1], "wb").write(b"short")
        handle = tensorferry.Handle()
        for _ in range(100):
            handle.read(bytearray(10), sys.argv[1])
        """,
        tmp_path / "x",
    )


def test_free_threaded_python_is_refused():
    done = run_python(
        """
        import sysconfig
        sysconfig.get_config_vars()["Py_GIL_DISABLED"] = 1
        import tensorferry
        """
    )
    assert done.returncode == 1 and "free-threaded" in done.stderr.splitlines()[-1]


def test_stubs_are_those_of_the_extension(tmp_path):
    """After a change of the bindings: make stubs."""
    made = tmp_path / "_core.pyi"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "nanobind.stubgen",
            "-m",
            "tensorferry._core",
            "-p",
            ROOT / "python/stub_patterns.txt",
            "-o",
            made,
        ],
        check=True,
        capture_output=True,
    )
    assert made.read_text() == (ROOT / "python/tensorferry/_core.pyi").read_text()


def test_stubs_parse():
    import ast

    ast.parse((ROOT / "python/tensorferry/_core.pyi").read_text())
