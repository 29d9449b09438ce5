"""A user cannot steer a privileged program: it ignores our environment variables."""

import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from house import built_job

NOBODY = 65534


def as_nobody(*words, **variables):
    """Runs a program as a user without any rights."""
    return subprocess.run(
        [
            "setpriv",
            f"--reuid={NOBODY}",
            f"--regid={NOBODY}",
            "--clear-groups",
            "--",
            *map(str, words),
        ],
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", **variables},
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def place():
    """A directory that everybody can look into, on a file system that honours setuid."""
    if os.geteuid() != 0:
        pytest.skip("only root can make a program setuid root")
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv (util-linux) is not installed")
    with tempfile.TemporaryDirectory(prefix="tensorferry-privilege-") as folder:
        if os.statvfs(folder).f_flag & os.ST_NOSUID:
            pytest.skip(f"{folder} is on a file system that is mounted nosuid")
        os.chmod(folder, 0o755)
        probe = privileged_copy("/usr/bin/id", Path(folder) / "id")
        if as_nobody(probe, "-u").stdout.strip() != "0":
            pytest.skip("setuid programs gain nothing here (no_new_privs, or a user namespace)")
        yield Path(folder)


def privileged_copy(program, path):
    shutil.copy(program, path)
    os.chmod(path, 0o4755)
    return path


@pytest.fixture
def job(build_dir):
    return built_job(build_dir, "privilege_job")


@pytest.fixture
def secret(place):
    """A file of root's that nobody else may touch."""
    path = place / "secret"
    path.write_text("precious")
    path.chmod(0o600)
    return path


@pytest.fixture
def theirs(place):
    """A directory of the user without rights."""
    path = place / "theirs"
    path.mkdir()
    os.chown(path, NOBODY, NOBODY)
    return path


def test_a_trace_is_made_for_its_owner_where_the_variable_counts(place, job, theirs):
    """What the other tests stand on: without privileges the same program traces."""
    plain = shutil.copy(job, place / "plain")
    done = as_nobody(
        plain,
        theirs / "data",
        TENSORFERRY_TRACE=str(theirs / "trace.json"),
        TENSORFERRY_PROFILES="/profiles",
    )
    assert f"user {NOBODY} as {NOBODY}, traced 1, profile /profiles/serial" in done.stdout, done
    facts = (theirs / "trace.json").stat()
    assert facts.st_uid == NOBODY and stat.S_IMODE(facts.st_mode) == 0o600 and facts.st_size > 0


@pytest.mark.parametrize("way", ["named", "linked", "hard-linked", "new"])
def test_a_setuid_program_writes_no_trace(place, job, secret, theirs, way):
    program = privileged_copy(job, place / "program")
    target = secret if way == "named" else theirs / "trace.json"
    if way == "linked":
        target.symlink_to(secret)
    if way == "hard-linked":
        os.link(secret, target)
    done = as_nobody(program, theirs / "data", TENSORFERRY_TRACE=str(target))
    assert f"user {NOBODY} as 0, traced 0" in done.stdout, done
    assert secret.read_text() == "precious"
    assert way != "new" or not target.exists()


def test_a_setuid_program_has_no_profiles(place, job, theirs):
    program = privileged_copy(job, place / "program")
    for variables in (
        {"TENSORFERRY_PROFILES": "/profiles"},
        {"XDG_CONFIG_HOME": "/config"},
        {"HOME": str(theirs)},
    ):
        done = as_nobody(program, theirs / "data", **variables)
        assert re.search(r"as 0, traced 0, profile $", done.stdout, re.MULTILINE), done


def test_a_program_with_a_capability_writes_no_trace(place, job, theirs):
    if shutil.which("setcap") is None:
        pytest.skip("setcap is not installed")
    program = shutil.copy(job, place / "program")
    given = subprocess.run(["setcap", "cap_ipc_lock+ep", program], capture_output=True, text=True)
    if given.returncode != 0:
        pytest.skip(f"no capabilities for files here: {given.stderr.strip()}")
    done = as_nobody(
        program,
        theirs / "data",
        TENSORFERRY_TRACE=str(theirs / "trace.json"),
        TENSORFERRY_PROFILES="/profiles",
    )
    assert re.search(rf"as {NOBODY}, traced 0, profile $", done.stdout, re.MULTILINE), done
    assert not (theirs / "trace.json").exists()


def test_the_command_does_not_run_setuid(place, build_dir, secret, theirs):
    """Its arguments name files to write and its PATH programs to start."""
    command = build_dir / "bin" / "tensorferry"
    if not command.is_file():
        pytest.skip(f"{command} is not built: run `make` first")
    program = privileged_copy(command, place / "tensorferry")
    done = as_nobody(
        program,
        "bench",
        "--sizes",
        "4K",
        "--iterations",
        "3",
        "--nvme-path",
        theirs,
        "--json",
        secret,
    )
    assert done.returncode == 1 and "setuid" in done.stderr, done
    assert secret.read_text() == "precious"


def test_a_setuid_python_takes_no_variable_of_ours(place, build_dir, theirs):
    """Python itself is not made for that; ours must not be what breaks it."""
    if not list((build_dir / "python" / "tensorferry").glob("_core*.so")):
        pytest.skip("the Python extension is not built: run `make` first")
    python = privileged_copy(os.path.realpath(sys.executable), place / "python")
    code = """
import os, sys
import tensorferry._core, tensorferry._at_start, tensorferry.sweep
assert os.getuid() != os.geteuid() == 0
watches = [one for one in sys.meta_path if type(one).__module__ == "tensorferry._import_watch"]
try:
    found = tensorferry.sweep.find_command()
except FileNotFoundError:
    found = None
print(tensorferry._core.privileged(), watches, found == os.environ["TENSORFERRY_COMMAND"])
"""
    wanted = theirs / "tensorferry"
    wanted.write_text("#!/bin/sh\n")
    wanted.chmod(0o755)
    variables = {
        "TENSORFERRY_COMMAND": str(wanted),
        "TENSORFERRY_DEEPSPEED": "1",
        "TENSORFERRY_SAFETENSORS": "1",
        "PYTHONPATH": str(build_dir / "python"),
    }
    done = as_nobody(python, "-c", code, **variables)
    if "No module named 'encodings'" in done.stderr:
        pytest.skip("a copy of this Python does not find its library")
    assert done.stdout == "True [] False\n", done
