"""tensorferry tune: settings that DeepSpeed and Handle() really take."""

import json
import signal
import subprocess
import sys

import pytest
from test_results import validate

KEYS = {"block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events"}


def aio_in(text):
    begin = text.index("{\n")
    return json.JSONDecoder().raw_decode(text[begin:])[0]["aio"]


def handle_in(ferry, **env):
    """(engine, reason) of a new process."""
    code = (
        "import tensorferry\nh = tensorferry.Handle()\nh.write(b'x' * 2**21, 'f').wait()\n"
        "print(h.engine); print(h.engine_reason)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ferry.place,
        env=ferry.env | env,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.fixture
def tuned(ferry):
    done = ferry("tune", ".", "--seconds", "5", "--json", "tune.json")
    return ferry, done.stdout, json.loads((ferry.place / "tune.json").read_text())


def test_it_narrows_round_by_round_and_keeps_a_profile(tuned):
    ferry, said, results = tuned
    validate(results)
    sizes = [len(one["candidates"]) for one in results["rounds"]]
    assert len(sizes) >= 2
    for before, after in zip(results["rounds"], results["rounds"][1:]):
        kept = sum(one["kept"] for one in before["candidates"])
        assert kept <= (len(before["candidates"]) + 1) // 2
        # The defaults are measured to the end, and what a busy machine leaves no time for is told.
        left_out = after.get("left_out", 0)
        assert len(after["candidates"]) + left_out in (kept, kept + 1)
        assert left_out == 0 or f"(no time for {left_out} more)" in said
    assert said.count("Round ") == len(sizes)

    aio = aio_in(said)
    assert set(aio) == KEYS
    assert aio["single_submit"] is False and aio["overlap_events"] is True
    best = results["best"]
    assert aio["block_size"] == best["block_bytes"] and aio["queue_depth"] == best["queue_depth"]
    assert aio["intra_op_parallelism"] == best["workers"]

    # What is kept is what was said, and a Handle in a new process takes it, and a plan.
    (profile,) = (ferry.place / "profiles").iterdir()
    assert str(profile) == results["profile"] and str(profile) in said
    kept = dict(line.split() for line in profile.read_text().splitlines() if line[0] != "#")
    # The figure of `balanced` lies between those of reads and writes, up to the choice of medians.
    speeds = [int(kept.pop(f"{way}_bytes_per_second")) / 1e9 for way in ("read", "write")]
    assert min(speeds) / 2 < best["gb_per_second"] < max(speeds) * 2
    ferry("plan", "--parameters", "1M", "--profile", ".", "--json", "plan.json")
    machine = json.loads((ferry.place / "plan.json").read_text())["settings"]["machine"]
    assert [machine["drive_read"] / 1e9, machine["drive_write"] / 1e9] == speeds
    assert kept == {
        name: str(best[name]) for name in ("engine", "block_bytes", "queue_depth", "workers")
    }
    engine, reason = handle_in(ferry)
    assert engine == best["engine"] and "profile" in reason
    assert "profile" not in handle_in(ferry, TENSORFERRY_PROFILES="")[1]
    assert not list(ferry.place.glob("tensorferry-*"))


def test_polling_is_tried_if_asked_for(ferry):
    said = ferry("tune", ".", "--seconds", "6", "--try-polling", "--json", "t.json").stdout
    (line,) = [line for line in said.splitlines() if line.startswith("With polling for")]
    results = json.loads((ferry.place / "t.json").read_text())
    validate(results)
    (trial,) = results["polling"]
    assert trial["polling"] == "submission" and "submission" in line
    if results["best"]["engine"] == "io_uring" and "problem" in trial:  # on a busy machine
        assert trial["problem"] == "there was no time to measure it" and trial["problem"] in line
    elif results["best"]["engine"] == "io_uring":
        assert trial["gain"] > 0 and f"{trial['gain']:.2f}x" in line
    else:
        assert "only io_uring polls" in line and trial["problem"] == "only io_uring polls"


def test_the_settings_of_a_profile_are_used(ferry):
    """A trace shows requests of the profile's size."""
    ferry("tune", ".", "--seconds", "5")
    (profile,) = (ferry.place / "profiles").iterdir()
    profile.write_text("engine threads\nblock_bytes 262144\nqueue_depth 3\nworkers 2\n")
    engine, reason = handle_in(ferry, TENSORFERRY_TRACE="trace.json")
    assert engine == "threads" and "profile" in reason
    events = json.loads((ferry.place / "trace.json").read_text())
    events = events["traceEvents"] if isinstance(events, dict) else events
    sizes = {
        one["args"]["bytes"]
        for one in events
        if one.get("cat") == "request" or "request" in one.get("name", "")
    }
    assert sizes == {262144}
    profile.write_text("engine threads\nblock_bytes nonsense\n")
    engine, reason = handle_in(ferry)
    assert "damaged" in reason and "profile" in reason


def test_a_configuration_keeps_the_rest(ferry):
    config = ferry.place / "ds_config.json"
    aio = {"use_gds": False, "other": [1], "thread_count": 3}
    config.write_text(
        json.dumps(
            {"train_batch_size": 8, "aio": aio, "zero_optimization": {"stage": 3, "x": 1e9}},
            indent=4,
        )
    )
    ferry(
        "tune",
        ".",
        "--seconds",
        "5",
        "--objective",
        "read",
        "--write-config",
        config,
        "--no-profile",
    )
    made = json.loads(config.read_text())
    assert made["train_batch_size"] == 8 and made["zero_optimization"] == {"stage": 3, "x": 1e9}
    assert made["aio"]["use_gds"] is False and made["aio"]["other"] == [1]
    assert set(made["aio"]) >= KEYS and made["aio"]["overlap_events"] is True
    assert "thread_count" not in made["aio"]  # a configuration may say it once only
    assert not (ferry.place / "profiles").exists()


def test_deepspeed_reads_the_block(tuned):
    aio_config = pytest.importorskip("deepspeed.runtime.swap_tensor.aio_config")
    _, said, _ = tuned
    aio = aio_in(said)
    read = aio_config.get_aio_config({"aio": aio})
    assert {name: read[name] for name in aio} == aio


def test_a_bad_configuration_is_said_at_once(ferry):
    (ferry.place / "bad.json").write_text("{oops")
    done = ferry("tune", ".", "--write-config", "bad.json", code=1, timeout=20)
    assert "bad.json" in done.stderr and "Round" not in done.stdout
    assert (ferry.place / "bad.json").read_text() == "{oops"


def test_where_there_is_no_drive_no_profile_is_kept(ferry):
    done = ferry("tune", "/dev/shm", "--seconds", "5")
    assert "No profile was kept" in done.stdout and not (ferry.place / "profiles").exists()


def test_latency_is_an_objective_of_its_own(ferry):
    ferry("tune", ".", "--seconds", "5", "--objective", "latency", "--json", "t.json")
    results = json.loads((ferry.place / "t.json").read_text())
    validate(results)
    assert results["best"]["latency_seconds"] > 0


def test_wrong_usage(ferry):
    assert "balanced" in ferry("tune", ".", "--objective", "luck", code=2).stderr
    assert "directory" in ferry("tune", code=2).stderr
    assert "ENOENT" in ferry("tune", "nowhere", code=1).stderr


def test_results_and_configuration_cannot_be_one_file(ferry):
    (ferry.place / "config.json").write_text("{}")
    (ferry.place / "link.json").symlink_to("config.json")
    for one, other in (
        ("config.json", "./config.json"),
        ("config.json", "link.json"),
        ("new.json", "./new.json"),
    ):
        done = ferry("tune", ".", "--json", one, "--write-config", other, code=2)
        assert "--write-config" in done.stderr
    assert (ferry.place / "config.json").read_text() == "{}"


def test_an_interrupt_leaves_nothing(ferry):
    running = ferry.start("tune", ".", "--seconds", "60")
    assert running.stdout.readline().startswith("Round 1")
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=60)
    assert running.returncode == 1 and list(ferry.place.iterdir()) == []
