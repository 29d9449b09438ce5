"""The jobs of `make compare` about checkpoints. The figures are not tests."""

import sys
from pathlib import Path

import pytest
from warm_python import WARM_FOLDER

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.jobs import checkpoint_tensors  # noqa: E402
from benchmarks.jobs.job import JobFailed  # noqa: E402
from benchmarks.jobs.job_process import JobProcess  # noqa: E402
from benchmarks.jobs.progress import Progress  # noqa: E402
from benchmarks.rows import bench, checkpoint_rows  # noqa: E402

MIB = 1 << 20
SIZE = 32 * MIB


class Here:
    """All peers in this environment."""

    def python(self, _name):
        return Path(WARM_FOLDER) / "python3"


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    """The process of a side: one for all tests, because it takes seconds to import torch."""
    folder = str(tmp_path_factory.mktemp("jobs"))
    made = {}

    def start(side, program="checkpoint_jobs.py"):
        if (side, program) not in made:
            made[side, program] = JobProcess(program, side, Here(), "nobody", folder)
        return made[side, program]

    yield start
    for one in made.values():
        one.end()


@pytest.mark.parametrize(("layout", "count"), [("32", 32), ("mixed", 2000)])
def test_the_tensors_of_a_layout_have_the_size_that_is_asked_for(layout, count):
    for total in (256 * MIB, 1024 * MIB):
        sizes = checkpoint_tensors.sizes_of(layout, total)
        assert len(sizes) == count and sum(sizes) == total
        assert all(size > 0 and size % 512 == 0 for size in sizes)
    assert (max(sizes) > 1000 * min(sizes)) == (layout == "mixed")


def test_a_side_that_brings_wrong_bytes_is_found():
    tensors = checkpoint_tensors.tensors_of("32", SIZE)
    checkpoint_tensors.check(tensors)
    tensors["layers.0007.weight"].view(torch.uint8)[-1, -1] = 0
    with pytest.raises(RuntimeError, match="layers.0007.weight holds wrong bytes"):
        checkpoint_tensors.check(tensors)


@pytest.mark.parametrize("form", ["safetensors", "pt"])
def test_our_jobs_save_and_load(build_dir, process, form):
    ours = process("tensorferry")
    for option in (True, False):
        assert ours.run("save", form=form, layout="32", size=SIZE, checksums=option)
        sample = ours.run("load", form=form, layout="mixed", size=SIZE, verify=option)
        assert sample.repetition_seconds > 0
    assert ours.run("load", form=form, layout="mixed", size=SIZE, one_by_one=True)


@pytest.mark.parametrize(("side", "form"), [("torch", "pt"), ("safetensors", "safetensors")])
def test_peers_load_the_files_that_we_write(build_dir, process, side, form):
    pytest.importorskip(side)
    theirs = process(side)
    assert theirs.run("load", form=form, layout="mixed", size=SIZE, one_by_one=True)
    assert theirs.run("save", form=form, layout="32", size=SIZE)


@pytest.mark.parametrize("part", checkpoint_rows.PARTS)
def test_a_part_says_what_was_asked_for_and_what_was_read(build_dir, process, part):
    sample = process("tensorferry").run("part", what=part, layout="32", size=32 * MIB)
    assert sample.asked_bytes == 16 * MIB
    if sample.read_bytes:  # a file in memory has no drive
        assert 16 * MIB <= sample.read_bytes < 32 * MIB


@pytest.mark.parametrize("side", ["tensorferry", "torch"])
def test_two_ranks_save_and_load(build_dir, process, side):
    ranks = process(side, "dcp_jobs.py")
    assert ranks.run("load", size=SIZE).gb_per_second > 0
    assert ranks.run("save", size=SIZE).gb_per_second > 0


def test_a_first_look_has_fewer_and_smaller_checkpoints(tmp_path):
    def names(quick):
        made = bench.Bench(tmp_path, tmp_path / "ferry_job", quick, Progress())
        return [row.name for row in checkpoint_rows.checkpoint_rows(made, Here())]

    quick, whole = names(True), names(False)
    assert not any("mixed" in name or "DCP" in name for name in quick)
    assert all("256 MiB" in name for name in quick) and all("1 GiB" in name for name in whole)
    assert {name.replace("256 MiB", "1 GiB") for name in quick} < set(whole)


def test_a_job_that_does_not_exist_is_an_error(build_dir, process):
    with pytest.raises(JobFailed, match="AttributeError"):
        process("torch").run("no_such_job")
