"""Models that FSDP2 has sharded: each rank has its shards on its drive, and the numbers are those
of the same run in memory."""

import os

import pytest
from forked_ranks import ranks_of

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def run():
    with ranks_of(os.path.join(os.path.dirname(__file__), "sharded_job.py")) as run:
        yield run


KINDS = [
    (1, "rows"),
    (2, "rows"),
    (4, "rows"),
    (2, "mixed precision"),
    (2, "checkpointing"),
    (2, "kept after forward"),
    (2, "forward prefetch"),
    (4, "replicas"),
    (2, "tensor parallel"),
    (4, "tensor parallel"),
    (2, "tied weights"),
    (2, "frozen weights"),
    (2, "columns"),
    (2, "one group"),
]


@pytest.mark.parametrize("ranks, kind", KINDS)
def test_training_gives_the_numbers_of_memory(run, tmp_path, ranks, kind):
    run(ranks, "same_as_in_memory", kind, str(tmp_path), True)


def test_accumulation_without_sync_gives_the_numbers_of_memory(run, tmp_path):
    run(2, "same_as_in_memory", "rows", str(tmp_path), False)


def test_a_gradient_scaler_skips_and_scales_as_in_memory(run, tmp_path):
    run(2, "scaled_as_in_memory", str(tmp_path))


def test_memory_stays_within_what_was_given(run, tmp_path):
    for most, given, weights, overflows in run(2, "within_the_limit", str(tmp_path)):
        assert most <= given == 80 << 10 < weights
        assert overflows == 0


def test_a_rank_never_takes_memory_for_all_of_its_weights(run, tmp_path):
    """6 MiB for weights, and what FSDP2 gathers and reduces of a block of 4 MiB."""
    for (made, trained), model in run(2, "peaks_of_memory", str(tmp_path)):
        assert model > 96 << 20
        assert made < 24 << 20 and trained < 64 << 20, (made, trained)


def test_groups_are_read_ahead_in_the_order_of_the_last_pass(run, tmp_path):
    for (hits, misses), groups in run(2, "read_ahead", str(tmp_path)):
        assert hits > 3 * groups > misses  # with a passing group in memory one in six was there


def test_a_group_beyond_the_limit_is_read_once(run, tmp_path):
    for misses, overflows in run(2, "beside_what_is_in_use", str(tmp_path)):
        assert 0 < overflows <= misses <= 4


def test_a_budget_keeps_whole_groups_in_memory(run, tmp_path):
    for (some, rest), (everything, nothing) in run(2, "budgeted", str(tmp_path)):
        assert 0 < some < everything and rest > 0
        assert nothing == 0


def test_what_is_being_written_does_not_change_when_it_is_gathered(run, tmp_path):
    assert max(run(2, "padding_while_it_is_written", str(tmp_path))) > 0


def test_a_model_without_memory_is_made_group_by_group(run, tmp_path):
    run(2, "made_on_meta", str(tmp_path))


REFUSED = {
    "policy": ("ValueError: first.weight", "CPUOffloadPolicy"),
    "number": ("ValueError: ", "a number as reshard_after_forward", "True or False"),
    "plain": ("ValueError: first.weight is not sharded", "call fully_shard()"),
    "again": ("ValueError: ", "is on NVMe already"),
    "optimizer": ("RuntimeError: SGD cannot step weights that are on NVMe",),
    "assign": ("ValueError: load_state_dict(assign=True) is not supported",),
    "assigned": ("RuntimeError: ", "was assigned values while its weights were on NVMe"),
    "closed": ("RuntimeError: ", "close(restore=True)"),
}


def test_what_cannot_be_is_refused_by_name(run, tmp_path):
    for words in run(4, "refused", str(tmp_path)):
        assert words.keys() == REFUSED.keys()
        for what, parts in REFUSED.items():
            assert all(part in words[what] for part in parts), words[what]


def test_shards_can_be_changed_saved_and_loaded(run, tmp_path):
    run(2, "changed_and_loaded", str(tmp_path))


def test_a_checkpoint_of_four_ranks_loads_on_two_on_one_and_into_plain_torch(run, tmp_path):
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    nvme, folder = str(tmp_path / "nvme"), str(tmp_path / "saved")
    os.mkdir(nvme)
    expected = run(4, "saved_for_others", nvme, folder)[0]
    run(2, "loaded_from_others", nvme, folder, expected)
    run(1, "loaded_from_others", nvme, folder, expected)
    dcp_to_torch_save(folder, tmp_path / "plain.pt")
    loaded = torch.load(tmp_path / "plain.pt")["model"]
    from sharded_models import Net

    model = Net()
    model.load_state_dict(loaded)
    assert digest_of(model) == expected[0]


def digest_of(model):
    import hashlib

    import torch

    sums = hashlib.sha256()
    for value in model.state_dict().values():
        sums.update(value.contiguous().view(torch.uint8).numpy().tobytes())
    return sums.hexdigest()


def test_a_snapshot_resumes_with_the_same_numbers(run, tmp_path):
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    run(2, "resumed", str(nvme), str(nvme / "snapshots"))


def test_ranks_of_ddp_read_frozen_weights_from_one_checkpoint(run, tmp_path):
    (one, word), (other, _) = run(2, "adapters", str(tmp_path))
    assert one == other
    # Weights that it does not leave alone: torch refuses to write to what is not in memory.
    assert "RuntimeError: " in word and "written-to tensor" in word
