"""tensorferry.initialize(): the configuration that DeepSpeed users have."""

import copy
import gc
import json
import logging
from pathlib import Path

import pytest
import tensorferry
import torch
from tensorferry._config.config import Config
from tensorferry._config.initialize import _check

NVME = {"device": "nvme", "nvme_path": "."}


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def make_model(dtype=torch.float32):
    torch.manual_seed(7)
    layers = (torch.nn.Linear(64, 700), torch.nn.ReLU(), torch.nn.Linear(700, 64))
    return torch.nn.Sequential(*layers).to(dtype)


def batches(count, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(8, 64, generator=generator).to(dtype) for _ in range(count)]


def train(model, optimizer, data):
    """As a user of initialize() would."""
    losses = []
    for batch in data:
        loss = model(batch).float().square().mean()
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def config(optimizer="nvme", param="none", **more):
    """On nvme, the weights do not fit into memory, and so gradients go to the drive."""

    def place(device, **options):
        return NVME | options if device == "nvme" else {"device": device}

    return {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {
            "offload_optimizer": place(optimizer),
            "offload_param": place(param, max_in_cpu=0, buffer_size=1000),
        },
        **more,
    }


def run(settings, data, dtype=torch.float32):
    model, optimizer = tensorferry.initialize(make_model(), settings)
    losses = train(model, optimizer, data)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.close()
    if optimizer.weights is not None:
        optimizer.weights.close()
    return losses, state


def assert_same(one, other):
    assert one[0] == other[0]
    for name in one[1]:
        assert torch.equal(one[1][name], other[1][name]), name


def plain(data):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    losses = []
    for batch in data:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


PLACES = [("none", "none"), ("cpu", "none"), ("cpu", "cpu"), ("nvme", "none"), ("nvme", "nvme")]


@pytest.mark.parametrize("optimizer, param", PLACES)
def test_every_device_gives_the_numbers_of_torch(optimizer, param):
    data = batches(6)
    assert_same(run(config(optimizer, param), data), plain(data))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_masters_on_nvme_and_in_memory_give_the_same_numbers(precision):
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    data = batches(6, dtype)
    settings = {precision: {"enabled": True}, "gradient_clipping": 0.5}
    results = [run(config(*places, **settings), data) for places in PLACES]
    for other in results[1:]:
        assert_same(results[0], other)
    assert results[0][1]["0.weight"].dtype == dtype


@pytest.mark.parametrize("optimizer, param", PLACES)
def test_accumulated_micro_batches_are_one_batch(optimizer, param):
    data = batches(8)
    settings = config(optimizer, param, gradient_accumulation_steps=4, gradient_clipping=0.01)
    losses, state = run(settings, data)
    model = make_model()
    torch_optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    for start in (0, 4):
        for batch in data[start : start + 4]:
            model(batch).square().mean().backward()
        for p in model.parameters():
            p.grad.mul_(0.25)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        torch_optimizer.step()
        torch_optimizer.zero_grad()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=1e-6, atol=1e-8)


def test_accumulation_follows_from_the_batch_sizes():
    settings = config("none", train_batch_size=12, train_micro_batch_size_per_gpu=4)
    assert_same(
        run(settings, batches(6)), run(config("none", gradient_accumulation_steps=3), batches(6))
    )
    settings["gradient_accumulation_steps"] = 2
    with pytest.raises(ValueError, match="train_batch_size 12 is not"):
        tensorferry.initialize(make_model(), settings)


def test_a_configuration_comes_from_a_file(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config()))
    assert_same(run(str(path), batches(2)), run(path, batches(2)))
    path.write_text('{"optimizer": ')
    with pytest.raises(ValueError, match="ds_config.json is not JSON"):
        tensorferry.initialize(make_model(), path)
    path.write_text('{"bf16": {}, "bf16": {}}')
    with pytest.raises(ValueError, match="occurs twice"):
        tensorferry.initialize(make_model(), path)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"zero_optimisation": {}}, "did you mean zero_optimization"),
        ({"zero_optimization": {"offload_optimiser": {}}}, "did you mean .*offload_optimizer"),
        ({"zero_optimization": {"offload_optimizer": {"nvme_pat": "."}}}, "mean .*nvme_path"),
        ({"aio": {"blocksize": 1}}, "did you mean aio.block_size"),
        ({"optimizer": {"type": "Adam", "params": {"learning_rate": 1}}}, "params.learning_rate"),
        ({"optimizer": {"type": "Lamb"}}, "must be one of .*AdamW"),
        ({"optimizer": {"params": {}}}, "optimizer.type is missing"),
        ({"scheduler": {"type": "OneCycle"}}, "must be one of WarmupLR"),
        ({"zero_optimization": {"offload_param": {"device": "disk"}}}, "one of none, cpu, nvme"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "nvme_path is missing"),
        ({"zero_optimization": {"offload_param": NVME}}, "must be on nvme too"),
        (
            {"zero_optimization": {"zero_quantized_weights": True}},
            "moves weights and gradients unchanged",
        ),
        ({"gradient_clipping": "auto"}, "write the value"),
        ({"gradient_clipping": -1}, "at least 0"),
        ({"gradient_accumulation_steps": 2.5}, "whole number"),
        ({"bf16": {"enabled": 1}}, "true or false"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "choose one"),
        ({"aio": {"thread_count": 2, "num_threads": 2}}, "the same setting"),
        ({"amp": {"enabled": True}}, "torch.autocast"),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, "grad_accum_dtype"),
        ({"prescale_gradients": True}, "prescale_gradients"),
        ({"bf16": 3}, "must be an object"),
        ({"gradient_accumulation_steps": float("inf")}, "whole number"),
        ({"gradient_clipping": float("nan")}, "not a number"),
        ({"zero_optimization": {"offload_param": {"nvme_path": [3]}}}, "a path or a list"),
        ({"optimizer": {"type": "AdamW", "params": {"amsgrad": "false"}}}, "true or false"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "1e-3"}}}, "lr.*must be a number"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": -1}}}, "AdamW refuses optimizer.params"),
        (
            {"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}},
            "AdamW refuses optimizer.params",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "1"}}},
            "a number or a list",
        ),
        ({3: 4}, "3 is not a known key"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_reason(change, message):
    settings = {"optimizer": {"type": "AdamW"}, **change}
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        tensorferry.initialize(model, settings)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": {"type": "AdamW", "params": {"eps": -1}}},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [1, 2]}}},
        {"zero_optimization": {"offload_param": NVME, "offload_optimizer": {"device": "cpu"}}},
        {
            "zero_optimization": {
                "offload_param": NVME,
                "offload_optimizer": {"device": "nvme", "nvme_path": "nowhere"},
            }
        },
    ],
)
def test_a_model_that_could_not_be_set_up_has_its_weights(change):
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises((ValueError, OSError)):
        tensorferry.initialize(model, config(param="nvme", bf16={"enabled": True}) | change)
    for param, value in zip(model.parameters(), before.values()):
        assert torch.equal(param, value)
    assert not list(Path().rglob("tensors"))


def test_keys_of_deepspeeds_machinery_are_listed_in_one_warning(caplog):
    settings = config("none", steps_per_print=10, wall_clock_breakdown=False)
    settings["zero_optimization"] |= {"stage": 3, "overlap_comm": True, "sub_group_size": 1e9}
    with caplog.at_level(logging.WARNING, "tensorferry"):
        tensorferry.initialize(make_model(), settings)
    [record] = caplog.records
    for key in ("steps_per_print", "zero_optimization.stage", "zero_optimization.sub_group_size"):
        assert key in record.getMessage()


@pytest.mark.parametrize("states", ["none", "nvme"])
@pytest.mark.parametrize("weights", ["none", "nvme"])
def test_weights_that_are_loaded_later_are_what_is_stepped(states, weights):
    """Before the first step and between two, into parameters that have masters in fp32."""
    if weights == "nvme" and states == "none":
        pytest.skip("such weights need states on NVMe")
    torch.manual_seed(5)
    loaded = [make_model(torch.bfloat16).state_dict() for _ in range(2)]
    for values, sign in zip(loaded, (1, -1)):  # no element is what it was by chance
        for value in values.values():
            value.normal_().abs_().add_(1).mul_(sign)
    bf16 = {"bf16": {"enabled": True}}
    model, optimizer = tensorferry.initialize(make_model(), config(states, param=weights) | bf16)
    other, reference = tensorferry.initialize(make_model(), config("none") | bf16)
    for values in loaded:
        model.load_state_dict(values)
        other.load_state_dict(values)
        for batch in batches(2, torch.bfloat16):
            for one, its in ((model, optimizer), (other, reference)):
                its.backward(one(batch).float().square().mean())
                its.step()
                its.zero_grad()
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
        assert (value.float() - values[name].float()).abs().max() < 0.5, name


@pytest.mark.parametrize("states", ["none", "nvme"])
def test_what_is_returned_cannot_be_pickled(states):
    import pickle

    settings = config(states) | {"bf16": {"enabled": True}}
    _, optimizer = tensorferry.initialize(make_model(), settings)
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(optimizer)
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(optimizer.optimizer)


def test_what_stays_where_it_is_is_in_that_warning(caplog):
    settings = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    with caplog.at_level(logging.WARNING, "tensorferry"):
        tensorferry.initialize(make_model(), {"optimizer": {"type": "AdamW"}} | settings)
    assert "zero_optimization.offload_optimizer.device" in caplog.text


def test_weights_of_several_ranks_go_to_nvme_where_they_are_sharded():
    offload = {"zero_optimization": {"offload_param": NVME, "offload_optimizer": NVME}}
    _check(Config(offload, world_size=2), None, {}, ())  # nobody trains
    training = Config(offload | {"optimizer": {"type": "AdamW"}}, world_size=2)
    _check(training, None, {}, ())
    with pytest.raises(tensorferry.ConfigError, match="needs stage 3 with 2 ranks"):
        _check(training, None, {}, (), ddp=True)


def test_adam_is_adamw_unless_it_says_otherwise():
    params = {"lr": 1e-2, "weight_decay": 0.1}
    adam = config("none") | {"optimizer": {"type": "Adam", "params": params}}
    assert_same(run(adam, batches(3)), run(config("none"), batches(3)))
    adam["optimizer"]["params"] = params | {"adam_w_mode": False}
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    for batch in batches(3):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    for name, value in run(adam, batches(3))[1].items():
        assert torch.equal(value, model.state_dict()[name])


@pytest.mark.parametrize(
    "name, params",
    [
        ("WarmupLR", {"warmup_num_steps": 5, "warmup_max_lr": 0.02}),
        ("WarmupLR", {"warmup_num_steps": 5, "warmup_type": "linear", "warmup_min_lr": 0.001}),
        ("WarmupDecayLR", {"total_num_steps": 12, "warmup_num_steps": 4}),
        ("WarmupCosineLR", {"total_num_steps": 12, "warmup_num_steps": 4, "cos_min_ratio": 0.1}),
    ],
)
def test_schedules_have_deepspeeds_numbers(name, params):
    schedules = pytest.importorskip("deepspeed.runtime.lr_schedules")
    settings = config("none", scheduler={"type": name, "params": params})
    model, optimizer = tensorferry.initialize(make_model(), settings)
    theirs = torch.optim.AdamW(make_model().parameters(), lr=1e-2)
    scheduler = getattr(schedules, name)(theirs, **params)
    for batch in batches(16):
        expected = theirs.param_groups[0]["lr"]
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected, rel=1e-12)
        train(model, optimizer, [batch])
        scheduler.step()


def test_fp16_scales_the_loss_and_leaves_out_steps_that_overflow(caplog):
    settings = config("nvme", fp16={"enabled": True, "initial_scale_power": 24, "hysteresis": 1})
    model, optimizer = tensorferry.initialize(make_model(), settings)
    before = model[0].weight.clone()
    assert optimizer.loss_scale == 2.0**24
    data = batches(12, torch.float16)
    train(model, optimizer, data[:1])
    assert optimizer.skipped_steps == 1 and torch.equal(model[0].weight, before)
    train(model, optimizer, data[1:])
    assert optimizer.loss_scale < 2.0**24 and optimizer.skipped_steps < 12
    assert not torch.equal(model[0].weight, before)
    assert model[0].weight.isfinite().all()
    model(data[0]).float().mean().backward()
    with pytest.raises(RuntimeError, match="optimizer.backward"):
        optimizer.step()


@pytest.mark.parametrize(
    "offload",
    [
        {"buffer_count": 1},
        {"buffer_count": 1, "pipeline_read": False},
        {"pipeline_write": True},
        {"pin_memory": False},
        {"fast_init": True},
        {"fast_init": False},
        {"ratio": 0.4},
        {"ratio": 0},
    ],
)
def test_settings_of_the_optimizers_buffers_change_no_number(offload):
    settings = config()
    settings["zero_optimization"]["offload_optimizer"] |= offload
    assert_same(run(settings, batches(5)), plain(batches(5)))


@pytest.mark.parametrize(
    "offload",
    [
        {"buffer_count": 1, "buffer_size": 1, "max_in_cpu": 0},
        {"max_in_cpu": 1000, "buffer_size": 1000},
        {"pin_memory": False},
    ],
)
def test_too_little_room_for_weights_means_waiting(offload):
    settings = config("nvme", "nvme")
    settings["zero_optimization"]["offload_param"] |= offload
    assert_same(run(settings, batches(5)), plain(batches(5)))


def optimizer_of(**offload):
    settings = config()
    settings["zero_optimization"]["offload_optimizer"] |= offload
    return tensorferry.initialize(make_model(), settings)[1]


@pytest.mark.parametrize("room, go", [(1_000, True), (10**6, False)])
@pytest.mark.parametrize("from_budget", [False, True])
def test_gradients_go_to_the_drive_if_the_weights_do_not_fit_into_memory(room, go, from_budget):
    settings = config("nvme", "nvme")
    budget = None
    if from_budget:
        budget = 4 * room + 200_000
    else:
        settings["zero_optimization"]["offload_param"] |= {"max_in_cpu": room, "buffer_size": 10}
    model, optimizer = tensorferry.initialize(make_model(), settings, max_cpu_bytes=budget)
    optimizer.backward(model(batches(1)[0]).square().mean())
    grads = [type(param.grad) is not torch.Tensor for param in model.parameters()]
    assert any(grads) == go
    optimizer.step()
    optimizer.close()
    optimizer.weights.close()


def test_buffers_are_as_many_as_configured():
    sizes = [optimizer_of(buffer_count=n).stats()["buffer_bytes"] for n in (1, 2, 6)]
    assert sizes[1] == 2 * sizes[0] and sizes[2] == 6 * sizes[0]


def test_ratio_is_the_share_of_the_states_on_the_drive():
    for ratio, share in ((1.0, 0), (0.0, 1)):
        optimizer = optimizer_of(ratio=ratio)
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        optimizer.step()
        stats = optimizer.stats()
        states = stats["kept_bytes"] + stats["tensor_bytes"]
        assert states > 0 and stats["kept_bytes"] == share * states
        optimizer.close()
    with pytest.raises(tensorferry.ConfigError, match="ratio is 1.5: it must be at most 1"):
        optimizer_of(ratio=1.5)


def test_moments_may_be_stored_in_8_bits():
    stored = []
    for moments in ("fp32", "int8"):
        model, optimizer = tensorferry.initialize(make_model(), config(), moments=moments)
        train(model, optimizer, batches(1))
        stored.append(optimizer.optimizer.stats()["tensor_bytes"])
        optimizer.close()
    assert stored[1] < 0.4 * stored[0]


@pytest.mark.parametrize(
    "change, moments, message",
    [
        ({}, "int4", "moments is 'int4'"),
        ({"optimizer": {"type": "SGD", "params": {"lr": 1}}}, "int8", "this is SGD"),
        ({"optimizer": {"type": "Adam", "params": {"amsgrad": True}}}, "int8", "amsgrad"),
        ({"zero_optimization": {}}, "int8", "keeps the states in memory"),
    ],
)
def test_moments_that_cannot_be_are_refused_before_anything_changes(change, moments, message):
    model = make_model()
    settings = config("nvme", "nvme", bf16={"enabled": True}) | change
    with pytest.raises(ValueError, match=message):
        tensorferry.initialize(model, settings, moments=moments)
    assert next(model.parameters()).dtype == torch.float32
    assert not list(Path().rglob("tensors"))


def test_pin_memory_decides_whether_the_buffers_are_locked():
    def locked_kib():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmLck"))

    gc.collect()
    before = locked_kib()
    ordinary = optimizer_of(pin_memory=False)
    assert locked_kib() == before
    pinned = optimizer_of(pin_memory=True)
    if locked_kib() == before:
        pytest.skip("no memory can be locked here")
    ordinary.close()
    pinned.close()


def test_without_fast_init_the_room_on_the_drive_is_taken_at_the_start():
    assert optimizer_of(fast_init=False).stats()["file_bytes"] > 0
    assert optimizer_of(fast_init=True).stats()["file_bytes"] == 0


def test_the_aio_section_reaches_the_engine():
    settings = config(aio={"block_size": 8192, "queue_depth": 2, "thread_count": 2})
    assert_same(run(settings, batches(2)), plain(batches(2)))
    for name, most in dict(block_size=1 << 30, queue_depth=4096, thread_count=256).items():
        with pytest.raises(tensorferry.ConfigError, match=f"aio.{name} is .* at most {most}"):
            tensorferry.initialize(make_model(), config(aio={name: most + 1}))


def test_torchs_own_adam_has_torchs_own_decay():
    def made(**params):
        settings = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, **params}}}
        return tensorferry.initialize(make_model(), settings)[1].param_groups[0]["weight_decay"]

    assert made() == 0
    assert made(torch_adam=True) == made(torch_adam=True, adam_w_mode=False) == 0.01


@pytest.mark.parametrize("key", ["communication_data_type", "seq_parallel_communication_data_type"])
def test_what_ranks_would_reduce_in_is_refused_where_there_are_several(key):
    Config({key: "fp32"})
    Config({key: None}, world_size=2)
    with pytest.raises(tensorferry.ConfigError, match=key):
        Config({key: "fp32"}, world_size=2)


@pytest.mark.parametrize("device", ["none", "nvme"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_groups_that_are_added_are_stepped(device, precision):
    settings = config(device, bf16={"enabled": precision == "bf16"})
    model, optimizer = tensorferry.initialize(make_model(), settings)
    added = torch.nn.Parameter(torch.ones(5, dtype=model[0].weight.dtype))
    optimizer.add_param_group({"params": [added], "lr": 0.5, "weight_decay": 0.0})
    added.grad = torch.ones_like(added)
    optimizer.step()
    torch.testing.assert_close(added.float(), torch.full((5,), 0.5))
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    torch.testing.assert_close(added.float(), torch.zeros(5))
    optimizer.close()


def test_the_schedule_of_a_configuration_has_the_groups_of_the_start():
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
    _, optimizer = tensorferry.initialize(make_model(), config("none", scheduler=schedule))
    with pytest.raises(ValueError, match="lr_scheduler"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(5))]})


def test_a_given_optimizer_is_offloaded():
    settings = config()
    del settings["optimizer"]
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = tensorferry.initialize(model, settings, optimizer=sgd)
    train(model, optimizer, batches(3))
    assert optimizer.stats()["written_bytes"] > 0
    with pytest.raises(ValueError, match="choose one"):
        tensorferry.initialize(make_model(), config(), optimizer=sgd)
    assert tensorferry.initialize(make_model(), {})[1] is None


@pytest.mark.parametrize("precision", [{}, {"fp16": {"enabled": True}}])
def test_a_run_goes_on_after_a_checkpoint_to_the_same_bits(precision, tmp_path):
    dtype = torch.float16 if precision else torch.float32
    data = batches(9, dtype)
    settings = config(
        "nvme",
        "nvme",
        gradient_accumulation_steps=2,
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 6}},
        **precision,
    )
    model, optimizer = tensorferry.initialize(make_model(), settings)
    train(model, optimizer, data[:4])
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "checkpoint.pt")
    expected = train(model, optimizer, data[4:])
    again, other = tensorferry.initialize(make_model(), settings)
    saved = torch.load(tmp_path / "checkpoint.pt", mmap=True)
    again.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    assert train(again, other, data[4:]) == expected


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_batch_that_was_under_way_at_a_checkpoint_begins_anew(precision, tmp_path):
    """Its gradients are not in the file: with what was left of it a step would be too small."""
    dtype = torch.float16 if precision == "fp16" else torch.float32
    more = {precision: {"enabled": True}} if precision == "fp16" else {}
    settings = config(**more, gradient_accumulation_steps=2)
    data = batches(4, dtype)
    _, expected = run(settings, data)

    model, optimizer = tensorferry.initialize(make_model(), settings)
    train(model, optimizer, data[:3])
    saved = tmp_path / "saved.pt"
    torch.save((model.state_dict(), optimizer.state_dict()), saved)
    optimizer.close()

    model, optimizer = tensorferry.initialize(make_model(), settings)
    optimizer.backward(model(data[0]).float().mean())
    optimizer.step()
    weights, states = torch.load(saved)
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)
    train(model, optimizer, data[2:])
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    optimizer.close()
