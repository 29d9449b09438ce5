"""Masters of bf16 weights of which the drive has 16 bits: the same numbers, in 10 bytes of 12."""

import logging

import pytest
import tensorferry.optim
import torch
from master_adamw import MasterAdamW
from tensorferry.optim.cut_masters import (
    begin_cut_by_torch,
    cut,
    digests_by_torch,
    join,
    join_by_torch,
)
from training import MiB, assert_same, copies, give_gradients, parameters

BLOCK = 16384


def bits(tensor):
    return tensor.view(torch.int32)


def from_bits(*values):
    return torch.tensor(values, dtype=torch.int64).to(torch.int32).view(torch.float32)


def cut_and_joined(master):
    weights = master.to(torch.bfloat16)
    low = torch.empty(master.shape, dtype=torch.int16)
    known = cut(master, weights, low)
    assert known is not None
    back = torch.full_like(master, 7)
    assert join(back, weights, low, known) == 0
    if master.numel() > 0:
        assert_same_by_torch(master, weights, low)
    return back, known


def assert_same_by_torch(master, weights, low):
    """As a GPU does it."""
    own, back = torch.zeros_like(low), torch.full_like(master, 7)
    cutting = begin_cut_by_torch(master, weights, own)
    assert int(cutting.excess) == 0 and torch.equal(own, low)
    assert int(join_by_torch(back, weights, low, cutting.cut)) == 0
    assert torch.equal(bits(back), bits(master))
    weights = weights.clone()
    weights[-1] = 99
    assert int(join_by_torch(back, weights, low, cutting.cut)) == 1
    same = (len(back) - 1) // BLOCK * BLOCK
    assert torch.equal(bits(back[:same]), bits(master[:same]))
    assert torch.equal(bits(back[same:]), bits(weights[same:].float()))


# --- the arithmetic ---


@pytest.mark.parametrize("count", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3, 70 * BLOCK])
def test_masters_come_back_to_the_bit(count):
    torch.manual_seed(count)
    master = torch.randn(count) * torch.tensor(10.0) ** torch.randint(-30, 30, (count,))
    back, _ = cut_and_joined(master)
    assert torch.equal(bits(back), bits(master))


def test_every_lower_half_comes_back():
    """Beside even and odd weights, the smallest and the largest ones, with both signs."""
    highs = [0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F, 0x8000, 0x8001, 0xFF7F]
    lows = torch.arange(1 << 16, dtype=torch.int64)
    for high in highs:
        master = ((high << 16) | lows).to(torch.int32).view(torch.float32)
        back, known = cut_and_joined(master)
        assert torch.equal(bits(back), bits(master)), hex(high)
        assert len(known.listed) // 8 <= 1, hex(high)  # the tie that rounds up


def test_nan_infinity_and_zeros_come_back():
    master = torch.randn(10_000)
    special = from_bits(0x7FC00000, 0xFFC12345, 0x7F800001, 0x7F800000, 0xFF800000, 0x80000000, 0)
    master[100 : 100 + len(special)] = special
    back, known = cut_and_joined(master)
    assert torch.equal(bits(back), bits(master))
    assert len(known.listed) // 8 >= 3


def test_ties_at_even_weights_are_listed():
    """1.0 lies between two weights whose masters end in 8000: only one of them is listed."""
    down, up = from_bits(0x3F808000)[0], from_bits(0x3F7F8000)[0]
    master = torch.stack([down, up] * 8)
    assert (master.to(torch.bfloat16) == 1).all()
    back, known = cut_and_joined(master)
    assert torch.equal(bits(back), bits(master))
    assert len(known.listed) // 8 == 8


def test_too_many_exceptions_are_refused():
    master = torch.full((100_000,), float("nan"))
    low = torch.empty(100_000, dtype=torch.int16)
    assert cut(master, master.to(torch.bfloat16), low) is None


@pytest.mark.parametrize("at", [0, BLOCK - 1, BLOCK, 3 * BLOCK + 5])
def test_a_change_of_one_bit_is_noticed(at):
    torch.manual_seed(3)
    master = torch.randn(3 * BLOCK + 6)
    weights = master.to(torch.bfloat16)
    low = torch.empty(master.shape, dtype=torch.int16)
    known = cut(master, weights, low)
    weights.view(torch.int16)[at] ^= 1
    back = torch.empty_like(master)
    assert join(back, weights, low, known) == 1
    block = slice(at // BLOCK * BLOCK, (at // BLOCK + 1) * BLOCK)
    assert torch.equal(back[block], weights[block].float())
    back[block] = master[block]
    assert torch.equal(bits(back), bits(master))


def test_two_weights_that_change_places_are_noticed():
    master = torch.randn(BLOCK)
    weights = master.to(torch.bfloat16)
    low = torch.empty(master.shape, dtype=torch.int16)
    known = cut(master, weights, low)
    weights[[5, 4000]] = weights[[4000, 5]]
    assert join(torch.empty_like(master), weights, low, known) == 1


# --- the digest of a GPU, which is made of torch's operations ---


def flipped(weights, *places):
    weights.view(torch.int16)[list(places)] ^= -(1 << 15)


def zero_becomes_minus_zero(weights):
    weights[3] = 0
    yield
    flipped(weights, 3)


def two_signs(first, second):
    def edit(weights):
        yield
        flipped(weights, first, second)

    return edit


def all_signs(weights):
    yield
    weights.neg_()


def one_bit(bit):
    def edit(weights):
        yield
        weights.view(torch.int16)[BLOCK // 2] ^= -(1 << 15) if bit == 15 else 1 << bit

    return edit


def swap(weights):
    yield
    weights[[5, 4000]] = weights[[4000, 5]]


def sign_moves(weights):
    weights[7], weights[11] = 2.0, -2.0
    yield
    flipped(weights, 7, 11)


def order(weights):
    yield
    weights.copy_(weights[torch.randperm(len(weights))])


def reverse(weights):
    yield
    weights.copy_(weights.flip(0))


def shift(weights):
    yield
    weights.copy_(weights.roll(1))


def steps_that_cancel_in_an_even_series(weights):
    weights.view(torch.int16)[20:23] = 1000
    yield
    weights.view(torch.int16)[20:23] += torch.tensor([1, -2, 1], dtype=torch.int16)


@pytest.mark.parametrize(
    "edit",
    [
        zero_becomes_minus_zero,
        two_signs(3, 7),
        two_signs(0, BLOCK - 2),
        all_signs,
        *map(one_bit, range(16)),
        swap,
        sign_moves,
        order,
        reverse,
        shift,
        steps_that_cancel_in_an_even_series,
    ],
)
@pytest.mark.parametrize("count", [BLOCK, BLOCK - 1])
def test_the_digest_of_a_gpu_notices(edit, count):
    torch.manual_seed(5)
    weights = torch.randn(2 * BLOCK + count).to(torch.bfloat16)
    last = weights[2 * BLOCK :]
    steps = edit(last)
    next(steps)
    before = digests_by_torch(weights)
    assert torch.equal(digests_by_torch(weights.clone()), before)
    next(steps, None)
    after = digests_by_torch(weights)
    assert (after != before).tolist() == [False, False, True]


def test_the_digest_of_a_gpu_notices_each_pair_of_signs():
    """The digest of zeros is zero, and the sign of an element adds its own number. None of these
    is another one, or another one below zero. That goes for two elements that change places too:
    their difference has fewer factors of two than a sign."""
    ones = []
    for begin in range(0, BLOCK, 512):
        weights = torch.zeros(512, BLOCK, dtype=torch.bfloat16)
        weights.view(torch.int16)[range(512), range(begin, begin + 512)] = -(1 << 15)
        ones.append(digests_by_torch(weights.view(-1)))
    signs = torch.cat(ones)
    assert torch.minimum(signs, -signs).unique().numel() == BLOCK


def test_the_digest_of_a_gpu_notices_any_number_of_signs():
    torch.manual_seed(6)
    weights = torch.randn(BLOCK).to(torch.bfloat16)
    before = digests_by_torch(weights)
    for count in [2, 3, 4, 8, 64, 1000, BLOCK] * 20:
        edited = weights.clone()
        flipped(edited, *torch.randperm(BLOCK)[:count].tolist())
        assert digests_by_torch(edited) != before, count


# --- steps ---


def large(count=6, size=MiB // 4):
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(size).to(torch.bfloat16)) for _ in range(count)]


def pair(path, params, **options):
    theirs = copies(params)
    options = dict(buffer_count=3, buffer_bytes=5 * MiB) | options
    ours = tensorferry.optim.AdamW(params, lr=0.01, nvme_path=path, **options)
    return params, ours, theirs, MasterAdamW(theirs, lr=0.01)


def train(mine, ours, theirs, reference, first, last):
    for step in range(first, last):
        give_gradients(step, mine, theirs)
        ours.step()
        reference.step()
        assert_same(mine, theirs, f"after step {step}")


@pytest.mark.parametrize("limit", [0, "50%"])
def test_two_hundred_steps_are_those_of_whole_masters(tmp_path, limit):
    mine, ours, theirs, reference = pair(
        tmp_path, parameters(torch.bfloat16), buffer_bytes=150_000, max_cpu_bytes=limit
    )
    train(mine, ours, theirs, reference, 0, 200)
    for number, master in enumerate(reference.masters):
        if master.numel():
            assert torch.equal(ours.state_dict()["state"][number]["master"], master), number
    ours.close()


def test_a_step_moves_ten_bytes_each_way(tmp_path):
    mine, ours, theirs, reference = pair(tmp_path, large())
    train(mine, ours, theirs, reference, 0, 2)
    before = ours.stats()
    train(mine, ours, theirs, reference, 2, 3)
    after = ours.stats()
    for way in ("read_bytes", "written_bytes"):
        assert after[way] - before[way] == 10 * 6 * MiB // 4
    assert after["tensor_bytes"] == 10 * 6 * MiB // 4
    ours.close()


def test_fp16_keeps_whole_masters(tmp_path):
    params = [torch.nn.Parameter(param.detach().half()) for param in large(2)]
    mine, ours, theirs, reference = pair(tmp_path, params)
    train(mine, ours, theirs, reference, 0, 3)
    assert ours.stats()["tensor_bytes"] == 12 * 2 * MiB // 4
    ours.close()


@pytest.mark.parametrize("way", ["data", "in place", "loaded", "numpy"])
def test_a_changed_weight_never_meets_old_lower_bits(tmp_path, way, caplog):
    """However it was changed. Its master begins anew, and the log says so; others go on."""
    mine, ours, theirs, reference = pair(tmp_path, large(3))
    train(mine, ours, theirs, reference, 0, 3)
    new = (mine[1].detach().float() * 1.5 + 3).to(torch.bfloat16)
    if way == "data":
        mine[1].data.copy_(new)
    elif way == "loaded":
        torch.nn.ParameterList(mine).load_state_dict({"1": new}, strict=False)
    elif way == "numpy":
        mine[1].detach().view(torch.int16).numpy()[:] = new.view(torch.int16).numpy()
    else:
        with torch.no_grad():
            mine[1].copy_(new)
    with torch.no_grad():
        theirs[1].copy_(new)
        reference.masters[1].copy_(new)
    with caplog.at_level(logging.WARNING, "tensorferry"):
        train(mine, ours, theirs, reference, 3, 6)
    [record] = caplog.records
    assert "a parameter of shape (262144,) was changed" in record.getMessage()
    assert torch.equal(ours.state_dict()["state"][1]["master"], reference.masters[1])
    assert ours.stats()["tensor_bytes"] == (10 + 12 + 10) * MiB // 4
    ours.close()


def change(way, param, places, values):
    """Changes some elements of a parameter."""
    if way == "data":
        param.data[places] = values
    elif way == "numpy":
        param.detach().view(torch.int16).numpy()[places] = values.view(torch.int16).numpy()
    else:
        with torch.no_grad():
            param[places] = values


@pytest.mark.parametrize("limit", [0, "100%"])
@pytest.mark.parametrize("way", ["data", "in place", "numpy"])
def test_each_later_change_is_noticed_too(tmp_path, way, limit):
    """The first one begins all masters of the parameter anew, the others those that changed."""
    mine, ours, theirs, reference = pair(tmp_path, large(2), max_cpu_bytes=limit)
    train(mine, ours, theirs, reference, 0, 2)
    for step, places in enumerate([slice(None), slice(5, 9), slice(100, None, 1000)], 2):
        new = (mine[1].detach()[places].float() * 1.5 + 3).to(torch.bfloat16)
        change(way, mine[1], places, new)
        with torch.no_grad():
            theirs[1][places] = new
            reference.masters[1][places] = new.float()
        train(mine, ours, theirs, reference, step, step + 1)
    assert torch.equal(ours.state_dict()["state"][1]["master"], reference.masters[1])
    ours.close()


def test_a_change_is_noticed_where_too_many_masters_were_listed(tmp_path):
    """All of such a master is stored, though nobody has changed its weights before."""
    mine, ours, theirs, reference = pair(tmp_path, large(1))
    train(mine, ours, theirs, reference, 0, 1)
    ties = torch.full_like(reference.masters[0], 1 + 2**-8)  # each lies between two weights
    state = ours.state_dict()
    state["state"][0]["master"] = ties
    for param in (mine[0], theirs[0]):
        param.data.fill_(1)
    ours.load_state_dict(state)
    reference.masters[0].data.copy_(ties)
    ours.param_groups[0]["lr"] = reference.inner.param_groups[0]["lr"] = 0.0
    train(mine, ours, theirs, reference, 1, 2)
    assert ours.stats()["tensor_bytes"] == 12 * MiB // 4
    mine[0].data[3] = 2
    reference.masters[0].data[3] = theirs[0].data[3] = 2
    train(mine, ours, theirs, reference, 2, 4)
    ours.close()


def test_a_master_that_is_nan_everywhere_is_stored_whole(tmp_path):
    mine, ours, theirs, reference = pair(tmp_path, large(2))
    train(mine, ours, theirs, reference, 0, 2)
    for params in (mine, theirs):
        params[0].grad = torch.full_like(params[0], float("nan"))
    ours.step()
    reference.step()
    assert mine[0].isnan().all() and torch.equal(mine[1], theirs[1])
    assert ours.stats()["tensor_bytes"] == (12 + 10) * MiB // 4
    ours.close()


def test_a_state_dict_has_whole_masters_and_stays_what_it_was(tmp_path):
    mine, ours, theirs, reference = pair(tmp_path, large(3), max_cpu_bytes="40%")
    train(mine, ours, theirs, reference, 0, 3)
    saved = ours.state_dict()
    kept = [master.detach().clone() for master in reference.masters]
    train(mine, ours, theirs, reference, 3, 4)
    for number, master in enumerate(kept):
        assert torch.equal(saved["state"][number]["master"], master)
        assert set(saved["state"][number]) == {"step", "exp_avg", "exp_avg_sq", "master"}
    ours.close()


@pytest.mark.parametrize("size", [300_000, MiB // 4])
def test_one_buffer_is_enough_for_a_checkpoint(tmp_path, size):
    """What is loaded has whole masters. The next step cuts them, without room beside them."""
    mine, ours, theirs, reference = pair(
        tmp_path, large(2, size), buffer_count=1, buffer_bytes=2 * MiB
    )
    train(mine, ours, theirs, reference, 0, 2)
    ours.load_state_dict(ours.state_dict())
    train(mine, ours, theirs, reference, 2, 4)
    assert ours.stats()["tensor_bytes"] <= 10.1 * 2 * size
    ours.close()


def test_a_checkpoint_gives_the_same_bits(tmp_path):
    mine, ours, theirs, reference = pair(tmp_path, large(3))
    train(mine, ours, theirs, reference, 0, 3)
    torch.save([list(mine), ours.state_dict()], tmp_path / "saved.pt")
    ours.close()
    values, states = torch.load(tmp_path / "saved.pt", weights_only=False)
    again = [torch.nn.Parameter(value.detach().clone()) for value in values]
    other = tensorferry.optim.AdamW(again, lr=0.01, nvme_path=tmp_path)
    other.load_state_dict(states)
    train(again, other, theirs, reference, 3, 8)
    assert other.stats()["tensor_bytes"] == 10 * 3 * MiB // 4
    other.close()
