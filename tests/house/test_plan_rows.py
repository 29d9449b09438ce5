"""plan_figures.py: what it tells the plan, and what it writes into docs/plan.md."""

import json

import pytest

figures = pytest.importorskip("benchmarks.figures.plan_figures")

ROUND = ({"pass": 1.0, "step": 2.0, "memory": 1e9}, {"pass": 1.1, "step": 1.0, "memory": 2e9})
PAGE = f"before\n\n{figures.TABLE}\n|---|\n| gone | 1 |\n| bf16, AdamW: 10 bytes | old |\n\nafter\n"
FIRST, SECOND = figures.CPU_SET_UPS[:2]


def test_a_row_has_each_figure_and_its_ratio():
    row = figures.row_of(FIRST, figures.figures_of(FIRST, [ROUND]))
    assert row.split(" | ") == [
        f"| {FIRST.name}",
        *("1,000 ms", "1,100 ms: 1.10", "2,000 ms", "1,000 ms: 0.50"),
        *("1,000 MB", "2,000 MB: 2.00 |"),
    ]
    inference = next(one for one in figures.CPU_SET_UPS if not one.trains)
    assert " |  |  | " in figures.row_of(inference, figures.figures_of(inference, [ROUND]))


def test_rows_replace_their_own_and_leave_others():
    page = figures.with_rows(PAGE, {FIRST.name: f"| {FIRST.name} | new |"})
    assert page == PAGE.replace("| gone | 1 |", f"| {FIRST.name} | new |")
    assert figures.with_rows(page, {SECOND.name: f"| {SECOND.name} | new |"}) == page.replace(
        "old", "new"
    )
    with pytest.raises(SystemExit, match="no table"):
        figures.with_rows("a page", {})


def test_the_page_has_a_place_for_the_rows():
    page = figures.PAGE.read_text()
    row = f"| {FIRST.name} | 1 | 2 | 3 | 4 | 5 | 6 |"
    assert row in figures.with_rows(page, {FIRST.name: row}).split("\n")


def test_what_another_machine_printed_is_read():
    said = f"# {FIRST.name}: {json.dumps(ROUND)}\n# {SECOND.name}: it failed\nother\n"
    ((name, (one,)),) = figures.rounds_said(said * 1).items()
    assert name == FIRST.name and one == ROUND


def test_the_plan_takes_the_flags_of_every_set_up(build_dir, tmp_path):
    pytest.importorskip("transformers")
    measured = {"flops": 5e10, "network": 0, "costs": {"adam_seconds": 1e-9}}
    measured["drive"] = {"read": 2e9, "write": 1e9, "both": 1.5e9}
    for set_up in (*figures.CPU_SET_UPS, *figures.GPU_SET_UPS):
        told = figures.plan_of(set_up, measured, tmp_path, build_dir / "bin" / "tensorferry")
        assert told["pass"] > 0 and told["memory"] > 0, set_up.name
        assert (told["step"] > 0) == set_up.trains, set_up.name
        (choice, *_) = json.loads((tmp_path / "plan.json").read_text())["choices"]
        assert choice["settings"]["one_budget"] == set_up.budget, set_up.name
