"""`make compare`: what it calls even, held and fallen. The figures themselves are not tests."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import compare  # noqa: E402
from benchmarks.jobs.job import Ferry, FioPoint, JobFailed, Sample  # noqa: E402
from benchmarks.jobs.job_process import JobProcess  # noqa: E402
from benchmarks.jobs.peers import Peer, PeerMissing, Peers  # noqa: E402
from benchmarks.jobs.progress import Progress  # noqa: E402
from benchmarks.report import (
    headline,  # noqa: E402
    page,  # noqa: E402
    publish,  # noqa: E402
    results,  # noqa: E402
    scale,  # noqa: E402
)
from benchmarks.rows import (
    bench,  # noqa: E402
    curves,  # noqa: E402
)
from benchmarks.rows.pairs import Target, figure, interval  # noqa: E402
from benchmarks.rows.row import NO_TIME, Row, speed  # noqa: E402


def test_the_interval_comes_from_order_statistics():
    assert interval([float(i) for i in range(1, 21)]) == (6.0, 15.0)
    assert interval([3.0, 1.0, 2.0]) == (1.0, 3.0)


@pytest.mark.parametrize(
    ("ratios", "target", "verdict"),
    [
        ([1.0] * 20, Target(0.98, at_least=True), "holds"),
        ([0.9] * 20, Target(0.98, at_least=True), "misses"),
        ([0.5] * 10 + [1.5] * 10, Target(0.98, at_least=True), "unclear"),
        ([1.2] * 20, Target(1.25, at_least=False), "holds"),
        ([1.4] * 20, Target(1.25, at_least=False), "misses"),
        ([0.9] * 10 + [1.1] * 10, None, "even"),
        ([1.1] * 20, None, "ahead"),
        ([0.9] * 20, None, "behind"),
        ([0.9] * 5, None, ""),
        ([1.0] * 5, Target(0.98, at_least=True), ""),
    ],
)
def test_verdicts(ratios, target, verdict):
    assert figure(ratios, target).verdict == verdict
    assert not verdict or verdict in page.VERDICTS


def test_less_time_is_ahead():
    assert figure([0.5] * 20, None, more_is_better=False).verdict == "ahead"
    assert figure([1.5] * 20, None, more_is_better=False).verdict == "behind"


def result(name, unit, low, ratio, high, pairs=20):
    return {
        "name": name,
        "unit": unit,
        "low": low,
        "ratio": ratio,
        "high": high,
        "pairs": [[ratio, 1.0]] * pairs,
    }


def a_run(*rows):
    return {"date": "then", "machine": {}, "peers": {}, "quick": False, "rows": list(rows)}


def test_only_what_fell_by_more_than_the_noise_is_told():
    before = a_run(
        result("slower", "GB/s", 0.95, 1.0, 1.05),
        result("noisy", "GB/s", 0.95, 1.0, 1.05),
        result("as runs differ", "GB/s", 0.95, 1.0, 1.05),
        result("faster", "GB/s", 0.95, 1.0, 1.05),
        result("longer", "us", 0.95, 1.0, 1.05),
        result("shorter", "us", 0.95, 1.0, 1.05),
        result("few pairs", "us", 0.95, 1.0, 1.05),
    )
    now = a_run(
        result("slower", "GB/s", 0.80, 0.85, 0.90),
        result("noisy", "GB/s", 0.80, 0.9, 0.96),
        result("as runs differ", "GB/s", 0.90, 0.92, 0.94),
        result("faster", "GB/s", 1.10, 1.2, 1.30),
        result("longer", "us", 1.10, 1.2, 1.30),
        result("shorter", "us", 0.80, 0.9, 0.94),
        result("few pairs", "us", 1.10, 1.2, 1.30, pairs=3),
        result("new", "us", 0.80, 0.9, 0.94),
    )
    assert [row[0] for row in results.fallen(before, now)] == ["slower", "longer"]


def test_against_prints_them_and_what_is_gone(capsys):
    before = a_run(result("read", "GB/s", 0.95, 1.0, 1.05), result("write", "GB/s", 0.9, 1.0, 1.1))
    now = a_run(result("read", "GB/s", 0.5, 0.6, 0.7))
    assert results.against(before, now, whole=True)
    said = capsys.readouterr().out
    assert "0.600 (0.500 to 0.700)" in said
    assert "1 of 1 ratios fell" in said
    assert "no longer measured: write" in said
    same = a_run(result("read", "GB/s", 0.95, 1.0, 1.05))
    assert results.against(before, same, whole=True), "a row is gone"
    assert not results.against(before, same, whole=False), "it was not asked for"
    assert not results.against(before, same | {"quick": True}, whole=True), "it has fewer rows"
    capsys.readouterr()
    few = a_run(result("read", "GB/s", 0.5, 0.6, 0.7, pairs=3))
    assert not results.against(before, few | {"peers": {"fio": "4"}}, whole=False)
    said = capsys.readouterr().out
    assert "0 of 0 ratios fell" in said
    assert "1 rows are new or have fewer than 6 pairs" in said
    assert "the peers have changed" in said
    elsewhere = now | {"machine": {"device": "another"}}
    assert not results.against(before, elsewhere, whole=True), "it is no fault of ours"
    assert "this is another machine" in capsys.readouterr().out
    assert results.against(before, now | {"machine": {"kernel": "another"}}, whole=True)
    assert "the machine has changed" in capsys.readouterr().out


@pytest.mark.parametrize("kernel, same", [("6.18.44-v2", True), ("6.18.45-v1", False)])
def test_a_kernel_that_was_built_anew_makes_no_other_machine(kernel, same):
    then = {"device": "vda", "kernel": "6.18.44-v1"}
    assert results.same_machine(then, then | {"kernel": kernel}) == same


def test_settings_of_fio_are_taken_over_from_the_same_machine_only():
    point = {"block_bytes": 1 << 20, "depth": 8, "fixed_buffers": True}
    before = {
        "machine": {"disk": "vda", "command": "x"},
        "calibration": {"read": point, "not timed": point},
        "calibration_gb_per_second": {"read": {str(FioPoint(**point)): 2.5}},
    }
    options = argparse.Namespace(calibration=None)
    taken = compare.stored_calibration(options, before, {"disk": "vda", "command": "y"})
    assert taken == {"read": (FioPoint(1 << 20, 8, True), 2.5)}
    assert compare.stored_calibration(options, before, {"disk": "nvme0n1"}) == {}
    assert compare.stored_calibration(options, None, {}) == {}


@pytest.mark.parametrize("speed_now, taken_over", [(2.0, True), (0.9, False), (8.0, False)])
def test_settings_of_fio_are_taken_over_only_if_the_drive_is_as_fast_as_then(
    monkeypatch, tmp_path, speed_now, taken_over
):
    taking = bench.Bench(tmp_path, tmp_path / "ferry_job", True, Progress())
    then = FioPoint(12345, 1, False)  # no point of the grid
    taking.stored = {"read 256 MiB": (then, 2.5)}
    monkeypatch.setattr(taking, "fio", lambda *_: Sample(gb_per_second=speed_now))
    assert (taking.best_point("read", 256 << 20) == then) == taken_over
    speeds = taking.calibration_speeds["read 256 MiB"]
    assert set(speeds.values()) == {speed_now}
    before = a_run() | {"calibration_gb_per_second": {"read 256 MiB": {str(then): 2.5}}}
    now = a_run() | {"calibration_gb_per_second": taking.calibration_speeds}
    assert bool(results.other_drive(before, now)) == (not taken_over)


def ready_row(name, ours, other):
    return Row(name, "GB/s", None, ours, other, speed)


def fail():
    raise JobFailed("it broke")


def test_a_job_that_fails_costs_its_own_row_only():
    good = ready_row("good", lambda: Sample(gb_per_second=2), lambda: Sample(gb_per_second=1))
    bad = ready_row("bad", fail, lambda: Sample(gb_per_second=1))
    worse = ready_row("worse", lambda: Sample(gb_per_second=1), fail)
    failed = {}
    rows = compare.rehearse([bad, good, worse], failed, Progress())
    assert rows == [bad, good]
    compare.measure(rows, {"good": 3, "bad": 3}, failed, Progress())
    assert failed == {"worse": "it broke", "bad": "our side: it broke"}
    assert good.ratios() == [2.0, 2.0, 2.0]


def test_a_first_look_ends_in_time_and_names_what_it_had_no_time_for():
    progress = Progress()

    def late():
        progress.begin -= 100
        return Sample(gb_per_second=1)

    first, last = (ready_row(name, late, late) for name in ("first", "last"))
    failed = {}
    compare.measure([first, last], {"first": 3, "last": 3}, failed, progress, 150)
    assert (len(first.pairs), len(last.pairs)) == (1, 0)
    assert failed == {"last": NO_TIME}
    before = a_run(result("first", "GB/s", 1, 1, 1), result("last", "GB/s", 1, 1, 1))
    now = a_run(result("first", "GB/s", 1, 1, 1)) | {"failed": failed}
    assert not results.against(before, now, whole=True), "nobody took it away"


def test_ours_may_need_the_environment_of_a_peer_that_is_missing():
    def missing():
        raise PeerMissing("no torch here")

    good = Sample(gb_per_second=1)
    ours = ready_row("ours", missing, lambda: good)
    other = ready_row("other", lambda: good, missing)
    failed = {}
    rows = compare.rehearse([ours, other], failed, Progress())
    compare.measure(rows, {"ours": 3}, failed, Progress())
    assert failed == {"ours": "no torch here", "other": "no torch here"}


def test_a_peer_that_cannot_be_set_up_costs_its_own_rows_only():
    peers = Peers(Progress())
    peers.missing["kvikio"] = "it is not there"
    mine = ready_row("mine", fail, fail)
    theirs = ready_row("theirs", fail, fail)
    theirs.peer = "kvikio"
    assert compare.with_peers([mine, theirs], peers) == [mine]


def test_a_peer_that_dies_is_an_error_and_starts_anew(tmp_path):
    class Here:
        def python(self, _name):
            return Path(sys.executable)

    program = tmp_path / "dies.py"
    program.write_text("print('{}', flush=True); input(); raise SystemExit('no such luck')")
    jobs = JobProcess(str(program), "dies", Here(), "nobody")
    for _ in range(2):
        with pytest.raises(JobFailed, match="dies: ended with .*: no such luck"):
            jobs.run("anything")
    jobs.end()


def test_a_setting_that_fio_refuses_is_left_out_of_the_calibration(tmp_path):
    measured = bench.Bench(tmp_path, tmp_path / "none", True, Progress())
    allowed = [point for point in measured.grid if point.depth == 16]

    def fio(kind, size, point, engine):
        if point not in allowed:
            raise JobFailed("not allowed to lock memory")
        return Sample(gb_per_second=1.0 + (point == allowed[-1]))

    measured.fio = fio
    assert measured.best_point("read", 1 << 28) == allowed[-1]
    allowed.clear()
    with pytest.raises(JobFailed, match="not allowed to lock memory"):
        measured.best_point("write", 1 << 28)


def test_a_row_alternates_who_goes_first():
    order = []

    def job(name, value):
        order.append(name)
        return Sample(gb_per_second=value)

    row = Row("a / b", "GB/s", None, lambda: job("a", 2.0), lambda: job("b", 1.0), speed)
    row.take(ours_first=True)
    row.take(ours_first=False)
    assert order == ["a", "b", "b", "a"]
    assert row.ratios() == [2.0, 2.0]


def test_a_peer_that_cannot_be_installed_says_why(tmp_path):
    peer = Peer("nobody", ("/no/such/folder",), with_torch=False)
    with pytest.raises(PeerMissing, match="no/such/folder"):
        Peers(Progress()).make(peer, tmp_path / "env", tmp_path / "env" / "bin" / "python")


def test_the_rows_can_be_listed_without_measuring():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.compare", "--list"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "QUICK": ""},
    )
    names = done.stdout.splitlines()
    assert len(names) == len(set(names))
    for word in (
        "page-locked",
        "ordinary",
        "fio psync",
        "fio libaio",
        "DeepSpeed",
        "torch.load",
        "mmap",
        "safetensors",
        "fromfile",
        "fastsafetensors",
        "runai",
        "tensornvme",
        "kvikio",
        "two threads",
        "two processes",
        "10,000",
        "8 threads, synchronous reads of 4 KiB",
        "queued read, page-locked, 4 KiB, one at a time",
        "context switches",
        "while the handle reads one of 50 MB/s",
        "SwapSpace over drives of 50 and 200 MB/s",
        "4 drives in memory",
        "offset 7",
        "fresh memory",
        "CPU time",
        "page-locked memory",
        "import",
        "load_file, 1 GiB in 2,000 mixed tensors / safetensors",
        "checkpoint.load, 1 GiB in 32 tensors / torch.load(mmap=True)",
        "load_file, 1 GiB in 32 tensors / fio",
        "get_tensor one by one",
        "bytes read, every second",
        "load half the rows",
        "checkpoint.save, 1 GiB in 32 tensors, with checksums / torch.save and fsync",
        "with checksums / without",
        "DCP load, 2 ranks",
        "memcpy",
        "8 MiB",
    ):
        assert any(word in name for name in names), word


def test_every_kind_of_our_own_jobs_runs(build_dir, tmp_path):
    ferry = Ferry(build_dir / "benchmarks" / "ferry_job")
    file = tmp_path / "data"
    size = 1 << 20
    assert ferry.large(file, "write", size, 1).gb_per_second > 0
    assert ferry.large(file, "read", size, 1, "--memory", "ordinary").gb_per_second > 0
    assert ferry.new_files(tmp_path / "new", size, 2).gb_per_second > 0
    assert ferry.calls(file, "sync", 4096, size, 10, "pinned", 1).call_us_median > 0
    assert ferry.calls(file, "path", 4096, size, 10, "ordinary", 1).call_us_median > 0


def test_a_size_that_memory_cannot_hold_is_said_to_be_left_out(monkeypatch):
    def by_size():
        return curves.curves(argparse.Namespace(read_file=Path("x")))[-1]

    monkeypatch.setattr(curves.machine, "available_memory_bytes", lambda: 9 << 30)
    assert by_size().left_out == {"one tensor of 8 GiB": "16 GiB of memory must be free"}
    assert max(by_size().points) == 1 << 30
    monkeypatch.setattr(curves.machine, "available_memory_bytes", lambda: 20 << 30)
    assert not by_size().left_out
    assert max(by_size().points) == 8 << 30


RUN = {
    "date": "today",
    "quick": False,
    "machine": {"command": "compare.py"},
    "rows": [
        {
            "name": "a / b",
            "unit": "GB/s",
            "target": ">= 1",
            "ratio": 2.0,
            "low": 1.5,
            "high": 2.5,
            "verdict": "holds",
            "pairs": [[2.0, 1.0], [4.0, 2.0], [3.0, 1.5]],
        },
    ],
    "curves": [{"title": "T", "unit": "GB/s", "bytes": [4096, 8192], "lines": {"x": [1.0, 2.5]}}],
}


def test_a_run_is_taken_into_the_page_where_its_rows_stand():
    rows = "| h |\n| - |\n| a / b |\n| gone / b | 1 |"
    curve = "| bytes | x, GB/s |\n| - | - |\n| 1 | 1 |"
    assert publish.with_results(f"words\n\n{rows}\n\n{curve}", RUN).split("\n") == [
        "words",
        "",
        "| h |",
        "| - |",
        "| a / b | 3 | 1.5 | GB/s | 2.000 | 1.500 to 2.500 | >= 1 | holds |",
        "",
        "| bytes | x, GB/s |",
        "| - | - |",
        "| 4 KiB | 1 |",
        "| 8 KiB | 2.5 |",
    ]
    with pytest.raises(SystemExit, match="a / b"):
        publish.with_results("no table", RUN)
    assert json.loads(publish.compact(RUN)) == RUN


def test_an_update_replaces_its_rows_and_says_when_they_were_measured():
    earlier = {
        "date": "then",
        "machine": {"tensorferry": "aaa", "command": "compare.py"},
        "peers": {"torch": "1", "NumPy": "2"},
        "calibration": {"read": "old"},
        "calibration_gb_per_second": {"read": 1},
        "failed": {"new / b": "it broke", "other": "it broke"},
        "rows": [result("a / b", "GB/s", 1, 1, 1), result("kept / b", "GB/s", 1, 1, 1)],
        "curves": ["kept"],
    }
    now = earlier | {
        "date": "now",
        "machine": {"tensorferry": "bbb", "command": "compare.py --rows x"},
        "calibration": {"read": "new", "write": "new"},
        "failed": {},
        "rows": [result("a / b", "GB/s", 2, 2, 2), result("new / b", "GB/s", 3, 3, 3)],
        "curves": [],
    }
    merged = results.updated(earlier, now)
    assert [(row["name"], row["ratio"], row.get("date")) for row in merged["rows"]] == [
        ("a / b", 2, "now"),
        ("kept / b", 1, None),
        ("new / b", 3, "now"),
    ]
    assert merged["machine"] == earlier["machine"] and merged["curves"] == ["kept"]
    assert merged["calibration"] == {"read": "old", "write": "new"}
    assert merged["failed"] == {"other": "it broke"}
    times = publish.another_time(merged)
    assert times == {"now, commit bbb": ["a / b", "new / b"]}
    assert not publish.another_time(earlier)
    assert publish.times_text({}).endswith(" nothing.")


def test_the_page_says_which_rows_were_measured_at_another_time():
    table = "| h |\n| - |\n| a / b |"
    run = RUN | {"rows": [RUN["rows"][0] | {"date": "later", "tensorferry": "bbb"}]}
    shown = publish.with_results(f"{publish.ANOTHER_TIME} old\n\n{table}", run)
    assert shown.startswith(f"{publish.ANOTHER_TIME} later, commit bbb: a / b.\n")
    with pytest.raises(SystemExit, match="no paragraph"):
        publish.with_results(table, run)


@pytest.mark.parametrize("words", [["--rows", ""], ["--rows", "x", "--quick"]])
def test_an_update_is_of_some_rows_and_of_whole_measurements(monkeypatch, words, capsys):
    monkeypatch.setattr(sys, "argv", ["compare.py", "--update", "x.json", *words])
    monkeypatch.delenv("QUICK", raising=False)
    with pytest.raises(SystemExit):
        compare.arguments()
    assert "--update needs --rows" in capsys.readouterr().err


def test_an_update_of_a_run_of_another_machine_is_refused():
    earlier = {"machine": {"device": "vda", "tensorferry": "aaa"}}
    compare.check_machine(earlier, {"device": "vda", "tensorferry": "bbb"})
    compare.check_machine(None, {})
    with pytest.raises(SystemExit, match="another machine"):
        compare.check_machine(earlier, {"device": "nvme0n1"})


def test_the_summary_has_the_range_and_the_verdicts_of_its_rows():
    name = "ordinary memory / page-locked"
    row = {"ratio": 0.9, "verdict": "holds"}
    run = [
        row | {"name": "ordinary memory read, 1 GiB / page-locked"},
        row | {"name": "ordinary memory overwrite, 1 GiB / page-locked", "ratio": 0.85},
        row | {"name": "ordinary memory read, 1 GiB / page-locked while another copies"},
    ]
    line = f"| {name} | >= 0.90 | old | old | why it is so |"
    shown = f"| {name} | >= 0.90 | 0.85 to 0.90 | holds | why it is so |"
    assert publish.short_line(line, run) == shown
    run[0]["verdict"] = "misses"
    assert "| 1 holds, 1 is missed |" in publish.short_line(line, run)
    assert publish.short_line("| by hand | 1 | 2 | 3 | 4 |", run) == "| by hand | 1 | 2 | 3 | 4 |"
    with pytest.raises(SystemExit, match=name):
        publish.short_line(line, [])


def test_what_is_behind_is_said_in_words():
    def said(**figures):
        run = RUN | {"rows": [RUN["rows"][0] | figures]}
        shown = publish.with_results(f"{publish.BEHIND} old\n\n| h |\n| - |\n| a / b |", run)
        return shown.partition("\n")[0].removeprefix(publish.BEHIND)

    assert said(ratio=0.5, low=0.4, high=0.6) == " a / b (0.50)."
    assert said(ratio=2.0, low=1.5, high=2.5, unit="us") == " a / b (2.00)."
    for even in (dict(ratio=0.995, low=0.99, high=0.999), dict(ratio=0.9, low=0.8, high=1.1)):
        assert said(**even) == said(ratio=2.0, low=1.5, high=2.5) == " nowhere."


def test_a_run_of_some_rows_or_few_pairs_is_not_shown():
    row = {"name": "a / b", "target": "", "pairs": [[1, 1]] * 6}
    run = {"quick": False, "machine": {"command": "compare.py"}, "rows": [row]}
    assert not publish.not_to_be_shown(run)
    assert publish.not_to_be_shown(run | {"quick": True})
    assert publish.not_to_be_shown(run | {"machine": {"command": "compare.py --rows a"}})
    few = run | {"rows": [row | {"pairs": [[1, 1]] * 5}]}
    assert "a / b" in publish.not_to_be_shown(few)
    short_of_the_method = run | {"rows": [row | {"target": ">= 1", "pairs": [[1, 1]] * 19}]}
    assert "a / b" in publish.not_to_be_shown(short_of_the_method)


def test_the_page_shows_the_run_that_is_kept():
    run = json.loads(publish.RESULTS.read_text())
    assert not publish.not_to_be_shown(run)
    shown = publish.PAGE.read_text()
    assert publish.with_results(shown, run) == shown


def test_the_page_about_many_drives_is_computed_from_the_run_that_is_kept():
    run = json.loads(publish.RESULTS.read_text())
    shown = scale.PAGE.read_text()
    assert scale.with_results(shown, run) == shown
    assert (
        scale.with_results(shown.replace("\n| 16 of 14 GB/s |", "\n| 17 of 14 GB/s |"), run)
        == shown
    )
    with pytest.raises(SystemExit, match="no table"):
        scale.with_results("no table", run)
    with pytest.raises(SystemExit, match="no row"):
        scale.with_results(shown, run | {"rows": []})


def test_many_drives_need_cores_in_proportion_and_a_worker_each():
    def row(name, value):
        return {"name": name, "pairs": [[value, 1.0]] * 3}

    costs = scale.Costs(
        {
            "rows": [
                row(scale.READ_ROW, 10.0),  # ms/GB
                row(scale.WRITE_ROW, 20.0),
                row(scale.COPY_ROW, 10.0),  # GB/s
                row(scale.SMALL_ROW, 0.4096),
            ]
        }
    )
    assert scale.in_place_line(costs, 4, 10) == ["0.4", "0.8", "40 GB/s", "4"]
    assert scale.slot_line(costs, 4, 10) == ["4.4", "4.8", "40 to 120 GB/s", "8"]
    assert scale.small_line(costs, 1, 4.096) == ["1.0 million", "10", "10"]


def test_the_first_table_and_its_picture_show_the_run_that_is_kept():
    rows = json.loads(publish.RESULTS.read_text())["rows"]
    lines = headline.table_lines(rows)
    assert len(lines) <= 10
    screen = publish.PAGE.read_text().split("\n## ")[0]
    assert "\n".join([headline.HEAD, "| --- | --- | --- | --- | --- |", *lines]) in screen
    assert len(screen.splitlines()) <= 40
    assert headline.PICTURE.read_text() == headline.draw(rows)
    with pytest.raises(SystemExit, match="torch.save"):
        headline.table_lines([row for row in rows if "torch.save" not in row["name"]])


def test_the_first_table_says_who_is_faster_whatever_the_unit():
    def told(**figures):
        row = RUN["rows"][0] | figures
        return headline.ratio_text(row), headline.is_even(row)

    assert told(ratio=4.44, low=4, high=5) == ("4.4", False)
    assert told(ratio=0.4, low=0.3, high=0.5, unit="s") == ("2.5", False)
    assert told(ratio=0.95, low=0.9, high=1.1) == ("0.95", True)


@pytest.mark.parametrize("name", ["README.md", "docs/index.md", "docs/guides/training.md"])
def test_the_figure_of_the_first_screen_is_that_of_the_run(name):
    rows = json.loads(publish.RESULTS.read_text())["rows"]
    (step,) = [row for row in rows if row["name"].endswith("DeepSpeed ZeRO-3 on NVMe")]
    ours, other = (f"{float(cell):.2f} s" for cell in results.cells(step)[1:3])
    screen = " ".join((ROOT / name).read_text().splitlines()[:25])
    assert f"takes {ours}; DeepSpeed ZeRO-3 takes {other}" in screen
    assert "200 million parameters" in screen and "200 M parameters" in step["name"]


def test_the_figures_of_the_guides_are_those_of_the_run():
    rows = {row["name"]: row for row in json.loads(publish.RESULTS.read_text())["rows"]}

    def times(name):
        return f"{headline.ratio_text(rows[name])} times"

    read = times("ordinary torch tensor, read, 1 GiB / DeepSpeed")
    write = times("ordinary torch tensor, write, 1 GiB / DeepSpeed")
    save = times("save a tensor of 1 GiB / torch.save")
    load = times("load a tensor of 1 GiB / safetensors")
    passes = sorted(
        f"{row['ratio']:.2f}"
        for name, row in rows.items()
        if name.startswith("inference") and name.endswith("/ the drive or torch alone")
    )
    for guide, said in (
        ("deepspeed", f"read {read} and write {write} as fast"),
        ("checkpoints", f"is {save} as fast as `torch.save`"),
        ("checkpoints", f"is {load} as fast as safetensors"),
        ("inference", f"takes {passes[0]} to {passes[-1]} times as long"),
    ):
        assert said in " ".join((ROOT / f"docs/guides/{guide}.md").read_text().split()), said
