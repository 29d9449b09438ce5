"""Moments in 8 bits: the arithmetic, and steps that equal the same arithmetic in memory."""

import logging

import pytest
import tensorferry.optim
import torch
from quantized_adamw import QuantizedAdamW, dequantized, dynamic_map, quantized
from tensorferry import _core
from tensorferry.optim.quantized_moments import (
    NAMES,
    PACKED,
    dequantize_by_torch,
    pack_moments,
    packed_bytes,
    quantize_by_torch,
    unpack_moments,
)
from training import (
    MiB,
    assert_same,
    assert_same_states,
    compute_gradients,
    copies,
    give_gradients,
    parameters,
)

BLOCK = 256
COUNTS = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3, 5000 * BLOCK + 7]


def bits(tensor):
    return tensor.view(torch.int32)


def by_core(name, values, threads=1):
    codes = torch.empty(values.numel(), dtype=torch.uint8)
    scales = torch.empty(-(-values.numel() // BLOCK))
    _core.quantize_moment(name, values, codes, scales, threads)
    return codes, scales


def by_torch(name, values):
    codes = torch.empty(values.numel(), dtype=torch.uint8)
    scales = torch.empty(-(-values.numel() // BLOCK))
    quantize_by_torch(name, values, codes, scales)
    return codes, scales


def back(name, codes, scales, threads=1):
    values = torch.full(codes.shape, 7.0)
    _core.dequantize_moment(name, values, codes, scales, threads)
    return values


def assert_same_codes(name, values):
    """However it is done."""
    codes, scales = quantized(name, values)
    for way in (by_core, by_torch):
        own_codes, own_scales = way(name, values)
        assert torch.equal(own_codes, codes), way
        assert torch.equal(bits(own_scales), bits(scales)), way
    expected = dequantized(name, codes, scales)
    by_operations = torch.full_like(values, 7)
    dequantize_by_torch(name, by_operations, codes, scales)
    for result in (back(name, codes, scales), by_operations):
        assert torch.equal(result.isnan(), expected.isnan())
        assert torch.equal(bits(result.nan_to_num()), bits(expected.nan_to_num()))


def spread(name, count, seed=0):
    """Elements of all magnitudes, some of them zero, as moments have them."""
    generator = torch.Generator().manual_seed(seed + count)
    values = torch.randn(count, generator=generator)
    values *= 10.0 ** torch.randint(-9, 2, (count,), generator=generator)
    values[torch.rand(count, generator=generator) < 0.1] = 0
    return values.abs() if name == "exp_avg_sq" else values


# --- the arithmetic ---


@pytest.mark.parametrize("name", NAMES)
def test_the_map_is_that_of_bitsandbytes(name):
    numbers, bounds = (
        torch.frombuffer(bytearray(own), dtype=torch.float32) for own in _core.moment_map(name)
    )
    assert torch.equal(numbers, dynamic_map(name).float())
    assert len(numbers.unique()) == 256 and numbers[255] == 1 and bounds[255] == float("inf")
    assert (numbers == 0).sum() == 1
    lowest, highest = (-0.99296875, 0.99296875) if name == "exp_avg" else (0, 0.996484375)
    assert numbers[0] == lowest and numbers[254] == highest
    assert (numbers[:-1] <= bounds[:-1]).all() and (bounds[:-1] < numbers[1:]).all()


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", NAMES)
def test_codes_are_the_same_by_the_extension_and_by_torch(name, count):
    assert_same_codes(name, spread(name, count))


@pytest.mark.parametrize("name", NAMES)
def test_codes_are_the_same_for_numbers_with_every_beginning(name):
    """Of which the extension looks up 16 bits; and for the bounds and their neighbours."""
    tops = torch.arange(1 << 16, dtype=torch.int64) << 16
    every = torch.cat([tops | low for low in (0, 1, 0x7FFF, 0x8000, 0xFFFF)])
    numbers = every.to(torch.int32).view(torch.float32)
    bounds = torch.frombuffer(bytearray(_core.moment_map(name)[1]), dtype=torch.float32)[:-1]
    around = [torch.nextafter(bounds, torch.tensor(to)) for to in (-9.0, 9.0)]
    numbers = torch.cat([numbers, bounds, *around])
    numbers = numbers[numbers.abs() < 1]
    blocks = torch.nn.functional.pad(numbers, (0, -numbers.numel() % (BLOCK - 1)))
    ones = torch.ones(blocks.numel() // (BLOCK - 1), 1)
    assert_same_codes(name, torch.cat([blocks.view(-1, BLOCK - 1), ones], 1).view(-1))


NAN, INF = float("nan"), float("inf")
HOSTILE = {
    "zeros": [0.0] * 300,
    "zeros below": [-0.0] * 300,
    "a one": [1.0],
    "below zero": [-1.0, -0.5, -1e-3] * 50,
    "both ends": [3.0, -3.0, 1.0],
    "subnormal": [1e-40, -1e-41, 1e-45],
    "subnormal among others": [1e-40, 1.0, -1e-45, 1e-38],
    "least normal": [torch.finfo(torch.float32).tiny, 1e-39, -1e-38 / 9],
    "huge": [3e38, -3.4e38, 1e30, 1.0],
    "huge beside tiny": [-3.4e38, 1e-38, 1e-45, 0.0],
    "nan": [1.0] * 255 + [NAN] + [2.0] * 256,
    "nan with a sign": [-NAN, 1.0],
    "infinity": [1.0, INF, -5.0] + [2.0] * 300,
    "infinity below": [1.0, -INF, -5.0],
    "both infinities": [INF, -INF],
    "nan and infinity": [NAN, INF, 0.0],
    "only nan": [NAN] * 257,
}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("name", NAMES)
def test_codes_are_the_same_for_hostile_numbers(name, case):
    values = torch.tensor(HOSTILE[case])
    if case == "nan with a sign":
        bits(values)[0] = -0x400000  # what x86 computes for inf - inf
    assert_same_codes(name, values)


@pytest.mark.parametrize("name", NAMES)
def test_codes_are_the_same_for_any_bits(name):
    generator = torch.Generator().manual_seed(5)
    any_bits = torch.randint(-(1 << 31), 1 << 31, (400 * BLOCK + 9,), generator=generator)
    values = any_bits.to(torch.int32).view(torch.float32)
    assert_same_codes(name, values)
    assert_same_codes(name, values.nan_to_num(nan=1e-3))


@pytest.mark.parametrize("name", NAMES)
def test_quantizing_again_changes_nothing(name):
    """So a checkpoint loses nothing. Also for what is close to the smallest numbers."""
    wide = spread(name, 3000 * BLOCK + 5)
    tiny = spread(name, 100 * BLOCK, seed=1) * 1e-33
    hostile = [torch.tensor(values) for values in HOSTILE.values()]
    for values in (wide, tiny, *hostile):
        codes, scales = by_core(name, values)
        again_codes, again_scales = by_core(name, back(name, codes, scales))
        assert torch.equal(again_codes, codes)
        assert torch.equal(again_scales.isnan(), scales.isnan())
        assert torch.equal(again_scales.nan_to_num(), scales.nan_to_num())


@pytest.mark.parametrize("name", NAMES)
def test_elements_come_back_as_near_as_the_map_allows(name):
    values = spread(name, 100 * BLOCK)
    codes, scales = by_core(name, values)
    result = back(name, codes, scales)
    blocks, came = values.view(-1, BLOCK), result.view(-1, BLOCK)
    size = blocks.abs().amax(1, keepdim=True)
    assert torch.equal(came.abs().amax(1, keepdim=True), size)  # the largest, to the bit
    off = (came - blocks).abs()
    assert (off <= 0.0071 * size).all()
    top = blocks.abs() > 0.1 * size
    assert (off <= 0.071 * blocks.abs())[top].all()
    assert (came.sign() * blocks.sign() >= 0).all()


def test_a_second_moment_that_is_not_zero_does_not_become_zero():
    """The step divides by its root: nearly nothing over nothing would be a leap."""
    values = torch.tensor([1.0, 1e-9, 1e-20, 1e-37, 0.0])
    result = back("exp_avg_sq", *by_core("exp_avg_sq", values))
    assert (result[:4] > 0).all() and result[4] == 0


@pytest.mark.parametrize("name", NAMES)
def test_nan_and_infinity_stay_visible_in_their_block(name):
    values = spread(name, 4 * BLOCK)
    values[BLOCK + 3], values[2 * BLOCK + 200] = NAN, INF
    result = back(name, *by_core(name, values)).view(-1, BLOCK)
    assert result[1].isnan().all() and (result[2] == INF).all()
    assert result[[0, 3]].isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_threads_give_the_same_bits(name):
    values = spread(name, 9000 * BLOCK + 11)
    alone = by_core(name, values)
    for threads in (2, 3, 8):
        codes, scales = by_core(name, values, threads)
        assert torch.equal(codes, alone[0]) and torch.equal(scales, alone[1])
        assert torch.equal(back(name, codes, scales, threads), back(name, *alone))


def test_memory_of_another_size_is_refused():
    values, codes, scales = torch.zeros(300), torch.zeros(300, dtype=torch.uint8), torch.zeros(2)
    for call in (_core.quantize_moment, _core.dequantize_moment):
        with pytest.raises(ValueError, match="codes must have as many elements as values"):
            call("exp_avg", values, codes[1:], scales, 1)
        with pytest.raises(ValueError, match="scales must have as many elements as values"):
            call("exp_avg", values, codes, scales[1:], 1)
        with pytest.raises(ValueError, match="step is neither exp_avg nor exp_avg_sq"):
            call("step", values, codes, scales, 1)


@pytest.mark.parametrize("count", COUNTS)
def test_both_moments_are_packed_into_one_stretch(count):
    states = {name: spread(name, count) for name in NAMES}
    expected = {name: dequantized(name, *quantized(name, own)) for name, own in states.items()}
    pack_moments(states)
    assert list(states) == [PACKED]
    assert states[PACKED].numel() == packed_bytes(count)
    whole = {name: torch.full((count,), 7.0) for name in NAMES}
    unpack_moments(states[PACKED], whole)
    for name in NAMES:
        assert torch.equal(whole[name], expected[name])


# --- steps ---


def large(count=6, size=MiB // 4, dtype=torch.bfloat16):
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(size).to(dtype)) for _ in range(count)]


def pair(path, params, kind=tensorferry.optim.AdamW, **options):
    theirs = copies(params)
    options = dict(buffer_count=3, buffer_bytes=5 * MiB) | options
    ours = kind(params, lr=0.01, nvme_path=path, moments="int8", **options)
    own = torch.optim.Adam if kind is tensorferry.optim.Adam else torch.optim.AdamW
    return params, ours, theirs, QuantizedAdamW(theirs, own, lr=0.01)


def train(mine, ours, theirs, reference, first, last, skip=()):
    for step in range(first, last):
        give_gradients(step, mine, theirs, skip=skip)
        ours.step()
        reference.step()
        assert_same(mine, theirs, f"after step {step}")


def assert_states_of(reference, ours):
    """Masters and moments, to the bit."""
    states = ours.state_dict()["state"]
    assert_same_states({"state": states}, reference.inner.state_dict())
    for number, (param, master) in enumerate(zip(reference.params, reference.masters)):
        if param.dtype != torch.float32 and param.numel():
            assert torch.equal(states[number]["master"], master), number


@pytest.mark.parametrize(("limit", "steps"), [(0, 200), ("50%", 40), ("100%", 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_two_hundred_steps_are_those_in_memory(tmp_path, dtype, limit, steps):
    """Parameters of many shapes, cut by small buffers."""
    mine, ours, theirs, reference = pair(
        tmp_path, parameters(dtype), buffer_bytes=100_000, max_cpu_bytes=limit
    )
    assert any(len(shards) > 1 for shards in ours._sub_groups.shards.values())
    train(mine, ours, theirs, reference, 0, steps)
    assert_states_of(reference, ours)
    ours.close()


def test_memory_that_only_computing_needs_is_there_once(tmp_path):
    """So that more of the buffers is for what the drive reads and writes."""
    params = large(count=1, size=8 * MiB)
    _, ours, _, _ = pair(tmp_path, params, buffer_count=4, buffer_bytes=4 * MiB)
    # Of each element 4 bytes of states in four buffers, and once its gradient, its master and its
    # moments: 32 bytes, where 80 would be needed if each buffer had all of it.
    assert 16 <= len(list(ours._sub_groups)) <= 18
    assert ours.stats()["buffer_bytes"] == 16 * MiB
    ours.close()


@pytest.mark.parametrize(
    "options",
    [
        dict(buffer_count=1, buffer_bytes=1),
        dict(pipeline_write=True),
        dict(pipeline_read=False),
        dict(fast_init=False),
        dict(kind=tensorferry.optim.Adam),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_other_options(tmp_path, dtype, options):
    mine, ours, theirs, reference = pair(tmp_path, parameters(dtype), **options)
    train(mine, ours, theirs, reference, 0, 6)
    assert_states_of(reference, ours)
    ours.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_may_get_their_first_gradient_late(tmp_path, dtype):
    mine, ours, theirs, reference = pair(
        tmp_path, parameters(dtype), buffer_bytes=100_000, max_cpu_bytes="30%"
    )
    train(mine, ours, theirs, reference, 0, 3, skip=(1, 4, 6))
    train(mine, ours, theirs, reference, 3, 6)
    train(mine, ours, theirs, reference, 6, 8, skip=(0, 5, 8))
    assert_states_of(reference, ours)
    ours.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_gradients_on_the_drive_and_a_scale(tmp_path, dtype):
    mine, ours, theirs, reference = pair(tmp_path, parameters(dtype), offload_gradients=True)
    for step in range(4):
        compute_gradients(step, mine, theirs)
        ours.step(gradient_scale=0.5)
        for param in theirs:
            param.grad.mul_(0.5)
        reference.step()
        assert_same(mine, theirs, f"after step {step}")
        ours.zero_grad()
        for param in theirs:
            param.grad = None
    ours.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_weights_on_the_drive(tmp_path, dtype):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 300)).to(dtype)
    theirs = copies(list(model.parameters()))
    weights = tensorferry.offload.parameters(model, tmp_path, max_cpu_bytes=1)
    ours = tensorferry.optim.AdamW(
        model.parameters(), nvme_path=tmp_path, lr=0.01, moments="int8", buffer_bytes=400_000
    )
    reference = QuantizedAdamW(theirs, lr=0.01)
    for step in range(5):
        give_gradients(step, list(model.parameters()), theirs)
        for param, other in zip(model.parameters(), theirs):
            param.grad = other.grad.clone()
        ours.step()
        reference.step()
        with weights.gather(model):
            assert_same(list(model.parameters()), theirs, f"after step {step}")
    ours.close()
    weights.close()


@pytest.mark.parametrize("settings", [dict(), dict(foreach=True), dict(foreach=False)])
def test_with_other_steps_of_torch(tmp_path, settings):
    mine = parameters()
    theirs = copies(mine)
    adamw = torch.optim.AdamW(mine, lr=0.01, **settings)
    ours = tensorferry.optim.offload(adamw, tmp_path, moments="int8", buffer_bytes=100_000)
    reference = QuantizedAdamW(theirs, lr=0.01, fused=None, **settings)
    train(mine, ours, theirs, reference, 0, 4)
    ours.close()


def test_groups_may_come_later(tmp_path):
    mine, ours, theirs, reference = pair(tmp_path, large(2))
    train(mine, ours, theirs, reference, 0, 2)
    more = large(2)
    ours.add_param_group({"params": more, "lr": 0.1})
    other = copies(more)
    second = QuantizedAdamW(other, lr=0.1)
    for step in range(2, 5):
        give_gradients(step, mine, theirs)
        give_gradients(step, more, other)
        ours.step()
        reference.step()
        second.step()
        assert_same([*mine, *more], [*theirs, *other])
    ours.close()


def test_a_changed_weight_never_meets_old_lower_bits(tmp_path, caplog):
    mine, ours, theirs, reference = pair(tmp_path, large(3), max_cpu_bytes="30%")
    train(mine, ours, theirs, reference, 0, 3)
    new = (mine[1].detach().float() * 1.5 + 3).to(torch.bfloat16)
    mine[1].data.copy_(new)
    with torch.no_grad():
        theirs[1].copy_(new)
        reference.masters[1].copy_(new)
    with caplog.at_level(logging.WARNING, "tensorferry"):
        train(mine, ours, theirs, reference, 3, 6)
    assert "was changed since the last step" in caplog.records[0].getMessage()
    assert_states_of(reference, ours)
    ours.close()


def test_a_gradient_that_is_nan_stays_visible(tmp_path):
    mine, ours, theirs, reference = pair(tmp_path, large(2))
    train(mine, ours, theirs, reference, 0, 2)
    give_gradients(2, mine, theirs)
    for params in (mine, theirs):
        params[0].grad[1000] = NAN
    ours.step()
    reference.step()
    state = ours.state_dict()["state"][0]
    assert all(state[name][768:1024].isnan().all() for name in NAMES)
    assert all(state[name][1024:].isfinite().all() for name in NAMES)
    give_gradients(3, mine, theirs)
    ours.step()
    assert mine[0].isnan().sum() == 256
    ours.close()


# --- bytes ---


@pytest.mark.parametrize(
    "dtype, expected", [(torch.float32, 2), (torch.bfloat16, 4), (torch.float16, 6)]
)
def test_a_step_moves_a_third_of_the_bytes(tmp_path, dtype, expected):
    mine, ours, theirs, reference = pair(tmp_path, large(10, MiB // 4, dtype))
    train(mine, ours, theirs, reference, 0, 4)
    stats = ours.stats()
    for way in ("read", "written"):
        moved = stats[f"{way}_bytes_per_parameter"]
        assert expected + 1 / 32 <= moved <= expected + 0.05, way
    ours.close()


def test_small_parameters_take_little_more(tmp_path):
    """Layer norms and biases: each state that began at a page would take three of them."""
    mine, ours, theirs, reference = pair(tmp_path, large(200, 768))
    train(mine, ours, theirs, reference, 0, 4)
    assert ours.stats()["read_bytes_per_parameter"] <= 4.4
    assert_states_of(reference, ours)
    ours.close()


# --- checkpoints ---


def record_of(optimizer):
    """All bytes of states in 8 bits."""
    space = optimizer._store.space
    found = []
    for group in optimizer._sub_groups:
        for field in group.fields:
            if field.name == PACKED:
                memory = torch.empty(field.nbytes, dtype=torch.uint8)
                space.get(group.key, memory, field.offset).wait()
                found.append(memory)
    return torch.cat(found)


@pytest.mark.parametrize("limit", [0, "40%"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_goes_on_with_the_same_bits(tmp_path, dtype, limit):
    options = dict(buffer_bytes=100_000, max_cpu_bytes=limit)
    mine, ours, theirs, reference = pair(tmp_path, parameters(dtype), **options)
    train(mine, ours, theirs, reference, 0, 3)
    torch.save([list(mine), ours.state_dict()], tmp_path / "saved.pt")
    ours.close()
    values, states = torch.load(tmp_path / "saved.pt", weights_only=False)
    again = [torch.nn.Parameter(value.detach()) for value in values]
    other = tensorferry.optim.AdamW(again, nvme_path=tmp_path, moments="int8", **options)
    other.load_state_dict(states)
    train(again, other, theirs, reference, 3, 6)
    assert_states_of(reference, other)
    other.close()


def test_a_state_dict_goes_through_torchs_optimizer_and_back(tmp_path):
    mine, ours, theirs, reference = pair(tmp_path, parameters(), buffer_bytes=100_000)
    train(mine, ours, theirs, reference, 0, 3)
    before = record_of(ours)
    torchs = torch.optim.AdamW(mine, fused=True)
    torchs.load_state_dict(ours.state_dict())
    for number, own in torchs.state_dict()["state"].items():
        assert set(own) == {"step", *NAMES} and own["exp_avg"].dtype == torch.float32, number
    ours.load_state_dict(torchs.state_dict())
    assert torch.equal(record_of(ours), before)
    train(mine, ours, theirs, reference, 3, 5)
    ours.close()


@pytest.mark.parametrize("size", [300_000, 262_144])
def test_one_buffer_is_enough_for_a_checkpoint(tmp_path, size):
    """What is loaded has whole masters; the next step cuts them."""
    options = dict(buffer_count=1, buffer_bytes=2 * MiB)
    mine, ours, theirs, reference = pair(tmp_path, large(2, size), **options)
    train(mine, ours, theirs, reference, 0, 2)
    ours.load_state_dict(ours.state_dict())
    train(mine, ours, theirs, reference, 2, 4)
    assert ours.stats()["tensor_bytes"] <= 4.1 * 2 * size
    ours.close()


def test_a_state_dict_stays_what_it_was(tmp_path):
    mine, ours, theirs, reference = pair(tmp_path, large(3), max_cpu_bytes="40%")
    train(mine, ours, theirs, reference, 0, 2)
    stored = ours.stats()["tensor_bytes"]
    saved = ours.state_dict()
    assert ours.stats()["tensor_bytes"] == stored
    kept = {n: {name: own[name].clone() for name in own} for n, own in saved["state"].items()}
    train(mine, ours, theirs, reference, 2, 4)
    for number, own in kept.items():
        for name, value in own.items():
            assert torch.equal(saved["state"][number][name], value), (number, name)
    ours.close()


def test_states_that_exist_are_quantized(tmp_path):
    mine = parameters()
    adamw = torch.optim.AdamW(mine, lr=0.01, fused=True)
    give_gradients(0, [], mine)
    adamw.step()
    whole = {p: {name: own[name].clone() for name in NAMES} for p, own in adamw.state.items()}
    ours = tensorferry.optim.offload(adamw, tmp_path, moments="int8")
    for param, own in zip(mine, range(len(mine))):
        for name in NAMES if param.numel() else ():
            moment = whole[param][name]
            flat = moment.as_strided((moment.numel(),), (1,))
            expected = dequantized(name, *quantized(name, flat))
            came = ours.state_dict()["state"][own][name]
            assert torch.equal(came.as_strided((moment.numel(),), (1,)), expected)
    ours.close()


# --- refusals ---


def refused(path, make, match, **options):
    with pytest.raises(ValueError, match=match):
        tensorferry.optim.offload(make, path, moments="int8", **options)


def test_what_is_no_form_of_moments_is_refused(tmp_path):
    for form in ("bf16", "int4", None, 8):
        with pytest.raises(ValueError, match="moments is .*: give one of 'fp32', 'int8'"):
            tensorferry.optim.AdamW(large(1), nvme_path=tmp_path, moments=form)


def test_other_optimizers_and_dtypes_are_refused(tmp_path):
    class Own(torch.optim.AdamW):
        pass

    single = large(1, 64, torch.float32)
    refused(tmp_path, torch.optim.SGD(single, lr=0.1), "and this is SGD")
    refused(tmp_path, Own(single), "and this is Own")
    refused(tmp_path, torch.optim.AdamW(large(1, 64)), "one is torch.bfloat16")
    double = [torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))]
    refused(tmp_path, torch.optim.AdamW(double), "one is torch.float64", master_weights=True)
    refused(tmp_path, torch.optim.Adam(single, amsgrad=True), "amsgrad=True is not supported")


def test_amsgrad_is_refused_whenever_it_comes(tmp_path):
    mine, ours, theirs, reference = pair(tmp_path, large(2))
    with pytest.raises(ValueError, match="amsgrad=True is not supported"):
        ours.add_param_group({"params": large(1), "amsgrad": True})
    with pytest.raises(ValueError, match="one is torch.float64"):
        ours.add_param_group({"params": large(1, 64, torch.float64)})
    assert len(ours.param_groups) == 1
    train(mine, ours, theirs, reference, 0, 2)
    saved = ours.state_dict()
    saved["param_groups"][0]["amsgrad"] = True
    with pytest.raises(ValueError, match="amsgrad=True is not supported"):
        ours.load_state_dict(saved)
    ours.param_groups[0]["amsgrad"] = True
    with pytest.raises(ValueError, match="amsgrad=True is not supported"):
        ours.step()
    ours.param_groups[0]["amsgrad"] = False
    train(mine, ours, theirs, reference, 2, 4)
    ours.close()
