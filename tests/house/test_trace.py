"""TENSORFERRY_TRACE: valid JSON in which every operation and every request is found."""

import json
import os
import stat
import subprocess

import pytest
from house import built_job

MIB = 1 << 20


@pytest.fixture(scope="module")
def job(build_dir):
    return built_job(build_dir, "system_calls_job")


@pytest.fixture
def traced(job, build_dir, tmp_path):
    """Runs a job and returns the events of its trace."""

    def run(*words, name="trace.json"):
        target = tmp_path / name
        environment = {**os.environ, "TENSORFERRY_TRACE": str(target)}
        done = subprocess.run(
            [job, *words], env=environment, cwd=build_dir, capture_output=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == b"" and done.stderr == b"", "the library never prints"
        files = sorted(tmp_path.glob("*.json"))
        assert len(files) == 1
        return json.loads(files[0].read_bytes().decode("utf-8"))

    return run


def by_category(events, category):
    return [event for event in events if event["cat"] == category]


@pytest.fixture
def folder(build_dir):
    """On the disk of the build."""
    path = build_dir / "trace-test"
    path.mkdir(exist_ok=True)
    yield path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


def test_every_operation_and_its_requests_are_in_the_trace(traced, folder):
    events = traced("mixed", folder / "data", folder / "other")
    for event in events:
        assert event["ph"] == "X" and event["dur"] >= 0 and event["ts"] > 0
        assert event["pid"] > 0 and isinstance(event["args"]["operation"], int)
    operations = by_category(events, "operation")
    requests = by_category(events, "request")
    assert len(operations) == 8
    ids = [event["args"]["operation"] for event in operations]
    assert len(set(ids)) == 8, "each operation has a number of its own"
    assert {event["args"]["operation"] for event in requests} <= set(ids)
    for operation in operations:
        own = [r for r in requests if r["args"]["operation"] == operation["args"]["operation"]]
        moved = sum(r["args"]["result"] for r in own if r["args"]["result"] > 0)
        assert moved >= operation["args"]["bytes"], operation
        for request in own:
            begin, end = request["ts"], request["ts"] + request["dur"]
            assert operation["ts"] <= begin and end <= operation["ts"] + operation["dur"] + 1


def test_operations_say_what_they_were(traced, folder):
    events = by_category(traced("mixed", folder / "data", folder / "other"), "operation")
    paths = {event["args"]["path"] for event in events}
    assert paths == {str(folder / "data"), str(folder / "other")}
    write = events[0]
    assert write["name"] == "write" and write["args"]["bytes"] == 4 * MIB
    failed = [event["args"] for event in events if "error" in event["args"]]
    too_long = [one["error"] for one in failed if one["path"] == str(folder / "other")]
    assert len(too_long) == 1 and "ENODATA" in too_long[0] and str(folder / "other") in too_long[0]
    cancelled = [one["error"] for one in failed if one["path"] == str(folder / "data")]
    assert all("ECANCELED" in error for error in cancelled)


@pytest.mark.parametrize("name", ['quote"back\\slash', "tab\tline\n", "grüße", b"\xff\xfe broken"])
def test_strange_names_keep_the_json_valid(traced, folder, name):
    path = os.path.join(os.fsencode(folder), os.fsencode(name))
    events = traced("mixed", path, folder / "other")
    assert len(by_category(events, "operation")) == 8


def test_the_process_id_can_be_part_of_the_name(traced, folder, tmp_path):
    events = traced("mixed", folder / "data", folder / "other", name="trace-%p.json")
    assert (tmp_path / f"trace-{events[0]['pid']}.json").is_file()


def test_a_trace_larger_than_its_buffer_is_whole(traced, folder):
    (folder / "data").write_bytes(bytes(8192 * 65536))
    events = traced("read", "threads", "batch", "on", "32", "8192", folder / "data")
    requests = [e for e in by_category(events, "request") if e["args"]["bytes"] == 65536]
    assert sorted(e["args"]["offset"] for e in requests) == [i * 65536 for i in range(8192)]


def in_flight_at_starts(events):
    """How many requests were under way when each one was taken up, in that order."""
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in by_category(events, "request"))
    return [sum(begin < start < end for begin, end in spans) for start, _ in spans]


@pytest.mark.parametrize("engine", ["io_uring", "libaio", "threads"])
@pytest.mark.parametrize("overlap", ["on", "off"])
def test_overlap_is_what_it_says_on_every_engine(traced, folder, engine, overlap):
    depth, blocks = 64, 256
    (folder / "data").write_bytes(bytes(blocks * 65536))
    events = traced("read", engine, "batch", overlap, str(depth), str(blocks), folder / "data")
    last_operation = max(e["args"]["operation"] for e in events)
    flying = in_flight_at_starts([e for e in events if e["args"]["operation"] == last_operation])
    assert len(flying) == blocks
    if overlap == "off":
        assert all(flying[i] == 0 for i in range(0, blocks, depth)), "a batch starts when all ended"
        assert all(flying[i] > 0 for i in range(blocks) if i % depth > depth / 2)
    else:
        assert all(n > 0 for n in flying[depth:]), "the queue is refilled before it is empty"
        assert max(flying) < depth


def test_without_the_variable_nothing_is_written(job, build_dir, folder, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TENSORFERRY_TRACE"}
    subprocess.run(
        [job, "mixed", folder / "data", folder / "other"],
        env=environment,
        cwd=tmp_path,
        check=True,
        timeout=120,
    )
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_cannot_be_written_disturbs_nobody(job, folder, tmp_path):
    for target in ("/nonexistent/trace.json", str(tmp_path), "/dev/full", ""):
        environment = {**os.environ, "TENSORFERRY_TRACE": target}
        subprocess.run(
            [job, "mixed", folder / "data", folder / "other"],
            env=environment,
            check=True,
            timeout=120,
        )


def test_a_trace_is_its_owners_alone_and_begun_anew(traced, folder, tmp_path):
    for _ in range(2):
        events = traced("mixed", folder / "data", folder / "other")
        assert len(by_category(events, "operation")) == 8
        assert stat.S_IMODE((tmp_path / "trace.json").stat().st_mode) == 0o600


@pytest.mark.parametrize("way", ["link", "dangling link", "second name", "another user", "pipe"])
def test_a_trace_never_touches_what_is_not_its_own(job, folder, tmp_path, way):
    precious, target = tmp_path / "precious", tmp_path / "trace.json"
    if way != "dangling link":
        precious.write_text("precious")
    if way in ("link", "dangling link"):
        target.symlink_to(precious)
    elif way == "second name":
        os.link(precious, target)
    elif way == "pipe":
        os.mkfifo(target)
    else:
        if os.geteuid() != 0:
            pytest.skip("only root can give a file away")
        precious.rename(target)
        os.chown(target, 1234, 1234)
    subprocess.run(
        [job, "mixed", folder / "data", folder / "other"],
        env={**os.environ, "TENSORFERRY_TRACE": str(target)},
        check=True,
        timeout=120,
    )
    if way == "dangling link":
        assert not precious.exists()
    else:
        kept = target if way == "another user" else precious
        assert kept.read_text() == "precious"
