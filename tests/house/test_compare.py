"""`make compare`: what it calls even, held and fallen. The figures themselves are not tests."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import page  # noqa: E402
import results  # noqa: E402
from jobs import Sample  # noqa: E402
from pairs import Target, figure, interval  # noqa: E402
from peers import Peer, PeerMissing, Peers  # noqa: E402
from progress import Progress  # noqa: E402
from rows import Row, speed  # noqa: E402


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
    ],
)
def test_verdicts(ratios, target, verdict):
    assert figure(ratios, target).verdict == verdict
    assert verdict in page.VERDICTS


def test_less_time_is_ahead():
    assert figure([0.5] * 20, None, more_is_better=False).verdict == "ahead"
    assert figure([1.5] * 20, None, more_is_better=False).verdict == "behind"


def result(name, unit, low, ratio, high):
    return {"name": name, "unit": unit, "low": low, "ratio": ratio, "high": high}


def test_only_what_fell_by_more_than_the_noise_is_told():
    before = {
        "rows": [
            result("slower", "GB/s", 0.95, 1.0, 1.05),
            result("noisy", "GB/s", 0.95, 1.0, 1.05),
            result("faster", "GB/s", 0.95, 1.0, 1.05),
            result("longer", "us", 0.95, 1.0, 1.05),
            result("shorter", "us", 0.95, 1.0, 1.05),
        ]
    }
    now = {
        "rows": [
            result("slower", "GB/s", 0.80, 0.9, 0.94),
            result("noisy", "GB/s", 0.80, 0.9, 0.96),
            result("faster", "GB/s", 1.10, 1.2, 1.30),
            result("longer", "us", 1.10, 1.2, 1.30),
            result("shorter", "us", 0.80, 0.9, 0.94),
            result("new", "us", 0.80, 0.9, 0.94),
        ]
    }
    assert [row[0] for row in results.fallen(before, now)] == ["slower", "longer"]


def test_against_prints_them_and_counts(tmp_path, capsys):
    old = {"date": "then", "rows": [result("read", "GB/s", 0.95, 1.0, 1.05)]}
    (tmp_path / "old.json").write_text(json.dumps(old))
    new = {"date": "now", "rows": [result("read", "GB/s", 0.5, 0.6, 0.7)]}
    (tmp_path / "compare.json").write_text(json.dumps(new))
    assert results.against(tmp_path / "old.json", tmp_path) == 1
    said = capsys.readouterr().out
    assert "read" in said
    assert "0.600 (0.500 to 0.700)" in said
    assert "1 of 1 ratios fell" in said


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
        [sys.executable, str(ROOT / "benchmarks" / "compare.py"), "--list"],
        capture_output=True,
        text=True,
        check=True,
    )
    names = done.stdout.splitlines()
    assert len(names) == len(set(names))
    for word in ("page-locked", "ordinary", "fio psync", "fio libaio", "DeepSpeed", "torch.load",
                 "mmap", "safetensors", "fromfile", "fastsafetensors", "runai", "tensornvme",
                 "kvikio", "two threads", "two processes", "10,000", "offset 7", "fresh memory",
                 "CPU time", "page-locked memory", "import", "memcpy", "8 MiB"):
        assert any(word in name for name in names), word
