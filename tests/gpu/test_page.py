"""What docs/gpu.md shows, on a GPU: its Python, and the command with --gpu."""

import json
import re
import subprocess
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpu.md"


def run(*words):
    done = subprocess.run(["tensorferry", *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_python_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = {}
    exec(block, names)
    assert names["loaded"].equal(names["weights"])
    assert (tmp_path / "weights.bin").stat().st_size == names["weights"].nbytes


def test_bench_moves_tensors_of_a_gpu(tmp_path):
    results = tmp_path / "results.json"
    run(
        "bench",
        "--gpu",
        "--nvme-path",
        tmp_path,
        "--sizes",
        "1M",
        "--iterations",
        "3",
        "--json",
        results,
    )
    found = json.loads(results.read_text())
    assert found["settings"]["memory"] == "gpu"
    assert {series["direction"] for series in found["series"]} == {"read", "write"}


def test_sweep_moves_tensors_of_a_gpu(tmp_path):
    space = tmp_path / "space.json"
    space.write_text(
        json.dumps(
            {
                "block_size": ["1M"],
                "queue_depth": [16],
                "io_parallel": [1],
                "overlap_events": [True],
                "single_submit": [False],
            }
        )
    )
    results = tmp_path / "results.json"
    run(
        "sweep",
        "--gpu",
        "--nvme_dir",
        tmp_path,
        "--sweep_config",
        space,
        "--io_size",
        "4M",
        "--log_dir",
        tmp_path / "logs",
        "--json",
        results,
    )
    found = json.loads(results.read_text())
    assert found["settings"]["memory"] == "gpu"
    assert all(point["status"] == "ok" for point in found["points"]) and found["points"]
