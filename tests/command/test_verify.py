"""`tensorferry verify`: sound drives pass, and each kind of fault is found and named."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from ferry_program import PROGRAM
from loop_mount import loop_mount

BLOCK = 4096
BAD = re.compile(r"^(.+?): (.+): offset (\d+), length (\d+): (.+)$", re.MULTILINE)

# Between the program and the kernel: a drive that loses a write, flips a bit or fails to read.
FAULTY_DRIVE = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static const long victim = 12;
static long writes, reads;

static void log_offset(off_t offset) {
  FILE* log = fopen(getenv("FAULT_LOG"), "w");
  fprintf(log, "%ld\n", (long)offset);
  fclose(log);
}

ssize_t pwrite64(int fd, const void* memory, size_t bytes, off_t offset) {
  const char* fault = getenv("FAULT");
  if (bytes < 4096 || fault == NULL || __sync_add_and_fetch(&writes, 1) != victim)
    return syscall(SYS_pwrite64, fd, memory, bytes, offset);
  if (strcmp(fault, "lost write") == 0) {
    log_offset(offset);
    return bytes;
  }
  if (strcmp(fault, "flipped bits") == 0) {
    void* copy = NULL;
    if (posix_memalign(&copy, 4096, bytes) != 0) abort();
    memcpy(copy, memory, bytes);
    ((char*)copy)[1234] ^= 4;
    log_offset(offset + 1234);
    const ssize_t written = syscall(SYS_pwrite64, fd, copy, bytes, offset);
    free(copy);
    return written;
  }
  return syscall(SYS_pwrite64, fd, memory, bytes, offset);
}

ssize_t pread64(int fd, void* memory, size_t bytes, off_t offset) {
  const char* fault = getenv("FAULT");
  if (fault != NULL && strcmp(fault, "read error") == 0 && bytes >= 4096 &&
      __sync_add_and_fetch(&reads, 1) == victim) {
    log_offset(offset);
    errno = EIO;
    return -1;
  }
  return syscall(SYS_pread64, fd, memory, bytes, offset);
}

ssize_t pwrite(int fd, const void* memory, size_t bytes, off_t offset) {
  return pwrite64(fd, memory, bytes, offset);
}

ssize_t pread(int fd, void* memory, size_t bytes, off_t offset) {
  return pread64(fd, memory, bytes, offset);
}
"""


def faults(said):
    """(kind, offset, length) of each fault that was reported."""
    return [(kind, int(offset), int(length)) for kind, _, offset, length, _ in BAD.findall(said)]


def kept(ferry, *arguments):
    done = ferry("verify", ferry.place, "--size", "1M", "--keep", *arguments)
    path = Path(re.search(r"^Kept: (.*)$", done.stdout, re.MULTILINE).group(1))
    assert f"tensorferry verify --check {path}" in done.stdout
    return path


def check(ferry, path):
    return faults(ferry("verify", "--check", path, code=1).stderr)


def put(path, offset, text):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(text)


def block_of(path, number):
    return path.read_bytes()[number * BLOCK : (number + 1) * BLOCK]


def test_every_pair_of_engines_has_its_turn_and_nothing_is_left(ferry):
    (ferry.place / "precious").write_text("data")
    said = ferry("verify", ferry.place, "--size", "1M", "--seed", "5").stdout
    rows = re.findall(r"^(\w+) +(\w+) +6 +6 MiB  ok$", said, re.MULTILINE)
    skipped = re.findall(r"^skipped: (\w+): .+", said, re.MULTILINE)
    engines = [name for name in ("io_uring", "libaio", "threads") if name not in skipped]
    assert rows == [(writer, reader) for writer in engines for reader in engines]
    assert "seed 5" in said
    assert os.listdir(ferry.place) == ["precious"]
    assert (ferry.place / "precious").read_text() == "data"


def test_an_engine_that_is_refused_is_skipped_with_the_reason(ferry):
    done = subprocess.run(
        [
            sys.executable,
            Path(__file__).with_name("without_io_uring.py"),
            PROGRAM,
            "verify",
            ferry.place,
            "--size",
            "64K",
        ],
        capture_output=True,
        text=True,
        env=ferry.env,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^skipped: io_uring: .*seccomp", done.stdout, re.MULTILINE)
    assert not re.search(r"^io_uring", done.stdout, re.MULTILINE)


def test_one_engine_alone(ferry):
    said = ferry("verify", ferry.place, "--size", "1M", "--engine", "threads").stdout
    assert re.findall(r"^(\w+) +(\w+) +\d+ ", said, re.MULTILINE) == [("threads", "threads")]


def test_a_size_that_is_no_whole_number_of_blocks_is_taken_up(ferry):
    said = ferry("verify", ferry.place, "--size", "5000", "--engine", "threads").stdout
    assert "generations of 8 KiB" in said


def test_a_duration_is_kept(ferry):
    begin = time.monotonic()
    said = ferry("verify", ferry.place, "--size", "64K", "--duration", "2").stdout
    assert 2 <= time.monotonic() - begin < 20
    assert int(re.search(r"(\d+) generations", said).group(1)) > 54


def test_a_kept_file_passes_also_by_another_name(ferry):
    path = kept(ferry, "--engine", "threads", "--seed", "9")
    assert "all 256 blocks are right (generation 6)" in ferry("verify", "--check", path).stdout
    other = path.rename(path.parent / "renamed")
    assert "(generation 6)" in ferry("verify", "--check", other).stdout


def test_each_planted_fault_is_found_and_named(ferry):
    path = kept(ferry, "--seed", "9")
    old = kept(ferry, "--seed", "9", "--engine", "threads")  # the same, some generations before
    sound = path.read_bytes()

    put(path, 123_456, bytes([sound[123_456] ^ 16]))
    assert check(ferry, path) == [("flipped bits", 123_456, 1)]
    path.write_bytes(sound)

    put(path, 10 * BLOCK, block_of(path, 200))
    put(path, 200 * BLOCK, sound[10 * BLOCK : 11 * BLOCK])
    assert check(ferry, path) == [
        ("swapped block", 10 * BLOCK, BLOCK),
        ("swapped block", 200 * BLOCK, BLOCK),
    ]
    path.write_bytes(sound)

    put(path, 31 * BLOCK, block_of(old, 31))
    assert check(ferry, path) == [("stale block", 31 * BLOCK, BLOCK)]
    path.write_bytes(sound)

    put(path, 255 * BLOCK, bytes(BLOCK))
    assert check(ferry, path) == [("lost write", 255 * BLOCK, BLOCK)]
    path.write_bytes(sound)

    put(path, 77 * BLOCK, os.urandom(BLOCK))
    assert check(ferry, path) == [("foreign data", 77 * BLOCK, BLOCK)]
    path.write_bytes(sound)

    ferry("verify", "--check", path)


def test_a_file_that_was_cut_has_lost_its_end(ferry):
    path = kept(ferry, "--engine", "threads")
    os.truncate(path, 100 * BLOCK + 5)
    assert check(ferry, path) == [("lost write", 100 * BLOCK + 5, 156 * BLOCK - 5)]
    os.truncate(path, 0)
    assert [kind for kind, *_ in check(ferry, path)] == ["lost write"]


def test_a_last_generation_that_is_lost_as_a_whole_is_found(ferry):
    """The name of the file says what was written last."""
    path = kept(ferry, "--engine", "threads")
    behind = path.rename(str(path).replace("generation-6", "generation-7"))
    done = ferry("verify", "--check", behind, code=1)
    assert faults(done.stderr) == [("lost write", 0, 256 * BLOCK)]
    assert "256 of 256 blocks are bad" in done.stderr
    assert "still generation 6" in done.stderr


@pytest.fixture
def faulty_drive(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    source, library = tmp_path / "faulty_drive.c", tmp_path / "faulty_drive.so"
    source.write_text(FAULTY_DRIVE)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return {"LD_PRELOAD": str(library), "FAULT_LOG": str(tmp_path / "log")}


@pytest.mark.parametrize("fault", ["lost write", "flipped bits", "read error"])
def test_a_fault_of_the_drive_is_found_while_it_happens(ferry, faulty_drive, fault):
    done = ferry(
        "verify",
        ferry.place,
        "--size",
        "4M",
        "--engine",
        "threads",
        code=1,
        FAULT=fault,
        **faulty_drive,
    )
    planted = int(Path(faulty_drive["FAULT_LOG"]).read_text())
    [(kind, offset, length)] = faults(done.stderr)
    assert kind == fault
    assert planted <= offset < planted + BLOCK
    if fault == "flipped bits":
        assert (offset, length) == (planted, 1)
    assert "written by threads, read by threads" in done.stderr
    assert "FAILED" in done.stdout
    assert not os.listdir(ferry.place)


def test_without_a_fault_the_same_drive_passes(ferry, faulty_drive):
    ferry("verify", ferry.place, "--size", "4M", "--engine", "threads", **faulty_drive)


@pytest.mark.parametrize("kind, size", [("ext4", "64M"), ("xfs", "400M"), ("btrfs", "400M")])
def test_file_systems_pass(ferry, tmp_path, kind, size):
    with loop_mount(tmp_path, kind=kind, size=size) as point:
        ferry("verify", point, "--size", "2M")
        assert set(os.listdir(point)) <= {"lost+found"}


def test_memory_passes(ferry):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        ferry("verify", place, "--size", "2M")
        assert not os.listdir(place)


def test_too_little_space_is_said_before_anything_is_written(ferry):
    said = ferry("verify", ferry.place, "--size", "1000T", code=1).stderr
    assert "1000 TiB are needed" in said
    assert not os.listdir(ferry.place)


def test_a_directory_that_will_not_do_is_told(ferry, tmp_path):
    assert "No such file" in ferry("verify", tmp_path / "nowhere", code=1).stderr
    with loop_mount(tmp_path, size="64M", options="loop,ro") as point:
        assert "read-only" in ferry("verify", point, "--size", "1M", code=1).stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing_behind(ferry, number):
    process = ferry.start("verify", ferry.place, "--duration", "60", "--keep")
    deadline = time.monotonic() + 20
    while not os.listdir(ferry.place) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "interrupted" in said
    assert not os.listdir(ferry.place)


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((), "name a directory"),
        (("--check", "x", "--keep"), "--keep"),
        ((".", "--duration", "0"), "--duration"),
        ((".", "--duration", "nan"), "--duration"),
        ((".", "--engine", "steam"), "steam is not an engine"),
        ((".", "--sise", "1M"), "did you mean --size?"),
    ],
)
def test_wrong_usage_is_told(ferry, arguments, said):
    assert said in ferry("verify", *arguments, code=2).stderr
