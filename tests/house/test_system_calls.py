"""The modes are real: how many system calls there are, which, and in what order, as strace sees
them."""

import re
import shutil
import subprocess

import pytest
from house import built_job

BLOCKS = 256
BLOCK_BYTES = 64 * 1024
DEPTH = 32

SUBMITTING = re.compile(r"io_uring_enter\(\d+, ([1-9]\d*),")
CALL = re.compile(r"^\d+ +(?:<\.\.\. )?(\w+)")


@pytest.fixture(scope="module")
def job(build_dir):
    return built_job(build_dir, "system_calls_job")


@pytest.fixture(scope="module")
def data(build_dir):
    """A file on the disk of the build, not on a tmpfs, which has no O_DIRECT."""
    path = build_dir / "system_calls.bin"
    path.write_bytes(bytes(BLOCKS * BLOCK_BYTES))
    yield path
    path.unlink()


def calls_between_marks(job, out, *words):
    """The lines that strace writes between the two marks."""
    if not shutil.which("strace"):
        pytest.skip("strace is not installed")
    done = subprocess.run(
        ["strace", "-f", "-v", "-o", out, job, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "Operation not permitted" in done.stderr and "ptrace" in done.stderr.lower():
        pytest.skip("ptrace is not permitted here")
    if done.returncode != 0 and "io_uring_setup" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    lines = out.read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if "/mark/begin" in line)
    end = next(i for i, line in enumerate(lines) if "/mark/end" in line)
    return lines[begin + 1 : end]


def names(lines):
    """What was called, in order; what was only resumed is not called again."""
    return [CALL.match(line).group(1) for line in lines if "resumed>" not in line]


def submissions(lines, engine):
    """How many requests each submitting call carried. The watch for wake-ups is none of them."""
    if engine == "libaio":
        counts = [line.count("IOCB_CMD_PREAD") for line in lines if " io_submit(" in line]
    else:
        counts = [int(match.group(1)) for match in map(SUBMITTING.search, lines) if match]
    return [count for count in counts if count > 0]


@pytest.fixture(params=["io_uring", "libaio"])
def engine(request):
    return request.param


@pytest.fixture
def trace_of_read(job, data, tmp_path, engine):
    def trace(submit, overlap):
        return calls_between_marks(
            job, tmp_path / "strace", "read", engine, submit, overlap, DEPTH, BLOCKS, data
        )

    return trace


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_single_submit_is_one_system_call_per_request(trace_of_read, engine, overlap):
    counts = submissions(trace_of_read("single", overlap), engine)
    assert set(counts) == {1}
    # io_uring's watch for a wake-up is renewed by a call of its own.
    assert BLOCKS <= len(counts) <= BLOCKS + 8


def test_a_drained_batch_is_one_system_call(trace_of_read, engine):
    counts = submissions(trace_of_read("batch", "off"), engine)
    assert counts.count(DEPTH) == BLOCKS // DEPTH
    assert len(counts) <= BLOCKS // DEPTH + 8


def test_a_refilled_batch_takes_fewer_system_calls_than_there_are_requests(trace_of_read, engine):
    counts = submissions(trace_of_read("batch", "on"), engine)
    assert BLOCKS <= sum(counts) <= BLOCKS + 8
    assert counts[0] == DEPTH or counts[1] == DEPTH
    assert len(counts) < 0.8 * BLOCKS


def in_flight_at_submissions(lines):
    """libaio shows both sides: how many requests were in flight before each io_submit of reads."""
    flying = 0
    before = []
    for line in lines:
        if " io_submit(" in line and "IOCB_CMD_PREAD" in line:
            before.append(flying)
            flying += line.count("IOCB_CMD_PREAD")
        elif "io_getevents" in line:
            flying -= line.count(f"res={BLOCK_BYTES},")
    assert flying == 0
    return before


@pytest.mark.parametrize("engine", ["libaio"], indirect=True)
def test_without_overlap_a_batch_is_drained_before_the_next(trace_of_read, engine):
    assert set(in_flight_at_submissions(trace_of_read("batch", "off"))) == {0}
    single = in_flight_at_submissions(trace_of_read("single", "off"))
    assert single == list(range(DEPTH)) * (BLOCKS // DEPTH)


@pytest.mark.parametrize("engine", ["libaio"], indirect=True)
def test_with_overlap_the_queue_is_refilled_before_it_is_drained(trace_of_read, engine):
    before = in_flight_at_submissions(trace_of_read("single", "on"))
    assert max(before) == DEPTH - 1
    assert all(n > 0 for n in before[DEPTH:])


@pytest.mark.parametrize(
    "how, wanted",
    [
        ("aligned", ["pread64"]),
        ("ragged", ["pread64"]),
        ("write", ["pwrite64"]),
        # What it is, the file, its alignment, the bytes.
        ("path", ["statx", "openat", "statx", "fcntl", "pread64", "close"]),
    ],
)
def test_an_inline_transfer_makes_these_system_calls_and_no_other(job, data, tmp_path, how, wanted):
    lines = calls_between_marks(job, tmp_path / "strace", "now", how, data)
    assert names(lines) == wanted, "\n".join(lines)


def test_a_handle_that_only_works_inline_starts_no_thread_and_no_ring(job, data, tmp_path):
    calls_between_marks(job, tmp_path / "strace", "now", "aligned", data)
    seen = set(names((tmp_path / "strace").read_text().splitlines()[:-1]))
    assert not seen & {"clone", "clone3", "io_uring_setup", "io_setup", "futex", "eventfd2"}
