"""tensorferry plan: what was measured, wear, what more would bring, and the table of ranks."""

import json
import os
import re
from pathlib import Path

import pytest
from test_plan import MACHINE, plan

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "plan.md").read_text()
# What takes the place of the Python that would measure for half a minute.
MEASURED = {
    "drive": {"read": 6e9, "write": 4e9, "both": 5.5e9},
    "flops": 2e12,
    "costs": {"adam_seconds": 2e-9, "process_bytes": 7e8},
}
PYTHON = """#!/bin/sh
echo started >> "$HERE/started"
while [ $# -gt 1 ]; do [ "$1" = --output ] && out=$2; shift; done
[ -e "$HERE/measured.json" ] || { echo "the drive is gone"; exit 1; }
cat "$HERE/measured.json" > "$out"
"""
SMALL = ("--parameters", "1B", "--memory", "64G", "--tokens-per-step", "4096")


@pytest.fixture
def measured(ferry):
    (ferry.place / "measured.json").write_text(json.dumps(MEASURED))
    (ferry.place / "bin").mkdir()
    (ferry.place / "bin" / "python3").write_text(PYTHON)
    (ferry.place / "bin" / "python3").chmod(0o700)
    ferry.env |= {"HERE": str(ferry.place)}
    ferry.env["PATH"] = f"{ferry.place / 'bin'}{os.pathsep}{ferry.env['PATH']}"
    return ferry


def test_check_stands_for_what_nobody_has_said(measured):
    _, results = plan(measured, *SMALL, "--check", ".")
    machine = results["settings"]["machine"]
    assert [machine[f"drive_{way}"] for way in ("read", "write", "both")] == [6e9, 4e9, 5.5e9]
    assert machine["flops"] == 2e12 and results["check"] == MEASURED
    # Half said: the other half is measured. Ranks share the processors.
    _, results = plan(measured, *SMALL, "--check", ".", "--drive-read", "8G", "--ranks", "2")
    machine = results["settings"]["machine"]
    assert (machine["drive_read"], machine["drive_write"]) == (8e9, 4e9)
    assert machine["drive_both"] == pytest.approx(2 / (1 / 8e9 + 1 / 4e9))
    assert machine["flops"] == 1e12
    _, results = plan(measured, *SMALL, "--check", ".", "--flops", "3T")
    assert results["settings"]["machine"]["flops"] == 3e12


def test_check_compares_the_plan_with_itself(measured):
    kept = ("--max-cpu-bytes", "0", "--weights", "memory", "--gradients", "memory")
    said, _ = plan(measured, *SMALL, *kept, "--check", ".", "--costs", "measured.json")
    assert said.split("the plan says ")[1].splitlines()[0].endswith(": 1.00x")
    table = said[said.index("in the plan") : said.index("With the costs of this machine")]
    rows = dict(re.findall(r"^(\w+) .* (\S+)x$", table, re.MULTILINE))
    assert set(rows) == {*("drive_read", "drive_write", "drive_both", "flops"), *MEASURED["costs"]}
    assert set(rows.values()) == {"1.00"}
    fast = ("--drive-read", "60G", "--drive-write", "40G", "--drive-both", "55G")
    said, _ = plan(measured, *SMALL, *kept, *fast, "--check", ".", "--costs", "measured.json")
    assert float(said.split("the plan says ")[1].split("x")[0].split(": ")[1]) > 1.01
    assert "0.10x" in said


def test_check_measures_only_if_the_rest_is_right(measured):
    for wrong in (("--model", "nowhere.json"), (*SMALL, "--json", "nowhere/plan.json")):
        measured("plan", *wrong, "--check", ".", code=1)
    assert not (measured.place / "started").exists()
    (measured.place / "measured.json").unlink()
    done = measured("plan", *SMALL, "--check", ".", code=1)
    assert "could not measure" in done.stderr and "the drive is gone" in done.stderr


def test_costs_of_a_check_are_taken_later(measured):
    plan(measured, *SMALL, "--check", ".")
    (measured.place / "plan.json").rename(measured.place / "here.json")
    _, results = plan(measured, *SMALL, *MACHINE[:4], "--costs", "here.json")
    assert results["settings"]["costs"]["adam_seconds"] == 2e-9
    assert results["settings"]["costs"]["process_bytes"] == 7e8


def test_a_profile_is_what_tune_has_stored(ferry):
    done = ferry("plan", *SMALL, "--profile", ".", code=1)
    assert "tensorferry tune ." in done.stderr


def test_a_profile_is_what_bench_has_written(ferry):
    ferry("bench", "--nvme-path", ".", "--sizes", "64K", "1M", "--iterations", "3",
          "--json", "bench.json")  # fmt: skip
    bench = json.loads((ferry.place / "bench.json").read_text())
    for one in bench["series"]:
        one["direct"] = True  # of a file system that may have no such thing
    (ferry.place / "bench.json").write_text(json.dumps(bench))
    said, results = plan(ferry, *SMALL, "--profile", "bench.json", "--weights", "memory",
                         "--max-cpu-bytes", "0")  # fmt: skip
    for way in ("read", "write"):
        medians = [
            one["bandwidth_mb_per_second"]["median"]
            for one in bench["series"]
            if one["direction"] == way
        ]
        speed = results["settings"]["machine"][f"drive_{way}"]
        assert speed == pytest.approx(max(medians) * 1e6)
    free = bench["places"][0]["file_system"]["free_bytes"]
    assert results["settings"]["machine"]["drive_bytes"] == free
    assert bench["places"][0]["directory"] in said.split("lines that set it up")[1]

    for one in bench["series"]:
        one["direct"] = False
    for wrong, words in ((bench, "page cache"), ({}, "no results file"), ([], "no results file")):
        (ferry.place / "bench.json").write_text(json.dumps(wrong))
        assert words in ferry("plan", *SMALL, "--profile", "bench.json", code=1).stderr


def test_drives_wear_by_what_all_their_ranks_write(ferry):
    said, results = plan(
        ferry,
        *("--parameters", "8B", "--ranks", "4", "--gpus-per-node", "4", "--drives", "2"),
        *("--tokens-per-step", "64K", "--endurance", "1P", "--max-cpu-bytes", "0"),
        *MACHINE[:4],
        *("--memory", "512G", "--flops", "1T"),
    )
    for choice in results["choices"]:
        written = choice["step_written_bytes"] + choice["pass_written_bytes"]
        seconds = choice["step_seconds"] + choice["pass_seconds"]
        day = written * 4 / 2 / seconds * 86400
        assert choice["written_bytes_per_day"] == pytest.approx(day, rel=1e-6)
        assert choice["drive_days"] == pytest.approx(1e15 / day, rel=1e-6)
    assert "each drive takes a day" in said and "and lasts" in said
    assert any(
        f"{results['choices'][0]['drive_days']:.0f} days" in line for line in said.split("\n")
    )


def test_more_brings_what_a_plan_with_more_says(ferry):
    base = ("--parameters", "3B", "--tokens-per-step", "4096", *MACHINE[:4], "--flops", "20T")
    base += ("--endurance", "1P")
    _, results = plan(ferry, *base, "--memory", "24G", "--drives", "2")
    found = {change["what"]: change for change in results["changes"]}
    more = {
        "one more drive in each node": ("--memory", "24G", "--drives", "3"),
        "twice the memory": ("--memory", "48G", "--drives", "2"),
        "moments in 8 bits": ("--memory", "24G", "--drives", "2", "--moments", "int8"),
    }
    assert set(found) == set(more)
    for what, flags in more.items():
        fastest = plan(ferry, *base, *flags)[1]["choices"][0]
        seconds = fastest["step_seconds"] + fastest["pass_seconds"]
        assert found[what]["seconds"] == pytest.approx(seconds), what
        assert found[what].get("drive_days") == pytest.approx(fastest.get("drive_days")), what
    (two,) = (one for one in results["by_drives"] if one["drives"] == 2)
    fastest = results["choices"][0]
    assert two["seconds"] == pytest.approx(fastest["step_seconds"] + fastest["pass_seconds"])


def test_the_lines_put_the_model_where_it_was_planned(ferry):
    gpu = ("--parameters", "1B", "--gpu-memory", "80G", *MACHINE)
    said, _ = plan(ferry, *gpu, "--weights", "memory")
    assert 'model.to("cuda", torch.bfloat16)' in said
    said, _ = plan(ferry, *gpu, "--weights", "drive", "--max-cpu-bytes", "0")
    assert "model.to(torch.bfloat16)" in said and 'device="cuda", max_gpu_bytes=' in said
    said, _ = plan(ferry, *gpu, "--ranks", "4", "--drives", "2", "--weights", "memory")
    assert "fully_shard()" in said and "each of the 2 drives" in said
    said, _ = plan(ferry, *gpu, "--activations", "drive")
    assert 'tensorferry.offload.activations("/mnt/nvme")' in said
    said, _ = plan(ferry, "--parameters", "1B", "--inference", "--weights", "memory", *MACHINE)
    assert "without a drive" in said and "offload.parameters" not in said
    assert "a pass" in said and "a step" not in said


def command_of_ranks():
    (text,) = re.findall(
        r"```sh\n(tensorferry plan --parameters 70B --ranks 64 .*?)```", PAGE, re.S
    )
    return text.replace("\\\n", " ").split()[2:]


def test_the_table_of_ranks_is_what_plan_says(ferry):
    table = PAGE[PAGE.index("| ranks | nodes |") :].split("\n\n")[0].splitlines()[2:]
    assert len(table) == 8
    for line in table:
        told = [cell.strip() for cell in line.strip("|").split("|")]
        ranks = int(told[0].replace(",", ""))
        words = command_of_ranks()
        words[words.index("--ranks") + 1] = str(ranks)
        words[words.index("--tokens-per-step") + 1] = str(8192 * ranks)
        choice = plan(ferry, *words)[1]["choices"][0]
        drives = words.index("--drives") + 1
        eight = plan(ferry, *words[:drives], "8", *words[drives + 1 :])[1]["choices"][0]
        small = plan(ferry, *words, "--moments", "int8")[1]["choices"][0]
        found = [choice["pass_seconds"], choice["network_seconds"], choice["step_seconds"]]
        found += [eight["step_seconds"], small["step_seconds"]]
        seconds = [f"{one:.1f} s" if one >= 1 else f"{one:.2f} s" for one in found]
        row = [f"{ranks:,}", str(ranks // 8), *seconds, choice["limit"]]
        assert told == row, f"| {' | '.join(row)} |"
