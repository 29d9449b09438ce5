"""One configuration on several ranks: its stage chooses an engine of torch's."""

import os

import pytest
from forked_ranks import ranks_of

pytest.importorskip("torch")

# What bf16 rounds: DeepSpeed adds up and rounds gradients in another order than torch.
TOLERANCE = 0.01


@pytest.fixture(scope="module")
def run():
    with ranks_of(os.path.join(os.path.dirname(__file__), "configured_job.py")) as run:
        yield run


def test_stages_are_the_engines_of_torch(run, tmp_path):
    one, other = run(2, "staged", str(tmp_path))
    assert one["1"] == one["2"] == one["3"] and one != other


def test_stage_three_alone_lets_go_of_weights_after_the_forward_pass(run, tmp_path):
    for seen in run(2, "resharded", str(tmp_path)):
        assert seen == {"1": False, "2": False, "3": True}


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_file_trains_on_any_number_of_ranks_with_weights_on_nvme(run, tmp_path, ranks):
    kinds = run(ranks, "configured_weights", str(tmp_path))
    assert kinds == (["Net"] if ranks == 1 else ["FSDPNet", "FSDPNet"])


def test_gradients_are_clipped_by_the_norm_of_all_ranks(run, tmp_path):
    for moved in run(2, "clipped_by_all", str(tmp_path)):
        assert moved == pytest.approx(1e-3, rel=1e-3)


def test_what_does_not_go_together_is_said_with_what_to_do(run, tmp_path):
    for words in run(2, "configured_words", str(tmp_path)):
        assert "ConfigError" in words["given"] and "name the optimizer in the" in words["given"]
        assert "needs stage 3 with 2 ranks" in words["ddp"]
        assert "needs stage 3 with 2 ranks" in words["wrapped"]
        assert "ConfigError: overlap works with one rank, and there are 2" in words["overlap"]
        assert 'overlap="iteration" works with one rank' in words["own overlap"]
        assert "stage of the configuration is 2 on rank 0 and 3 on rank 1" in words["stages"]
        assert words["left"] == []  # all that before anything was done


def test_a_file_of_deepspeed_gives_the_losses_of_zero_3(run, tmp_path):
    pytest.importorskip("deepspeed")
    from deepspeed_training import config, train

    (tmp_path / "nvme").mkdir()
    steps = 6
    theirs = train(config(tmp_path, "cpu", "cpu"), ranks=2, op="none", steps=steps)
    ours = run(2, "as_deepspeed", str(config(tmp_path, "nvme", "nvme")), steps)
    for (losses, _), own in zip(theirs, ours):
        expected = [float.fromhex(loss) for _, loss in losses]
        assert own == pytest.approx(expected, rel=TOLERANCE)
        assert expected[0] != expected[-1]
