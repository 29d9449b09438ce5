"""safetensors files with shards, as torch writes them: what they say of themselves is checked."""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from tensorferry.dcp import Reader
from torch.distributed.checkpoint.api import CheckpointException

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

HALVES = torch.arange(12.0).reshape(4, 3).split(2)


def save_halves(folder, *sharding):
    for number, (half, said) in enumerate(zip(HALVES, sharding)):
        metadata = {"DCP_SHARDING_INFO": said} if said is not None else None
        save_file({"x": half}, folder / f"shard-{number}.safetensors", metadata)


def at(first):
    return json.dumps({"x": {"saved_offsets": first}})


def loaded(folder):
    state = {"x": torch.zeros(4, 3)}
    dcp.load(state, storage_reader=Reader(folder))
    return state["x"]


def test_shards_go_to_their_places(tmp_path):
    save_halves(tmp_path, at([2, 0]), at([0, 0]))
    assert torch.equal(loaded(tmp_path), torch.cat([HALVES[1], HALVES[0]]))


@pytest.mark.parametrize(
    "said",
    ["", "{", "[", "5", "[" * 100_000, '["x"]', '{"x": 5}', '{"x": {}}', at(None), at([0])]
    + [at([0, -2]), at([0, 1.5]), at([True, 0]), at([1 << 70, 0]), at("ab"), at({"0": 0, "1": 0})],
)
def test_shards_that_do_not_say_where_they_are_are_damage(tmp_path, said):
    save_halves(tmp_path, at([0, 0]), said)
    with pytest.raises(CheckpointException, match=r"DCP_SHARDING_INFO .*shard-1\.safetensors"):
        loaded(tmp_path)


def test_two_files_with_one_tensor_are_refused(tmp_path):
    save_halves(tmp_path, None, None)
    with pytest.raises(CheckpointException, match="shard-0.* and in shard-1"):
        loaded(tmp_path)
