"""States that stay in memory: the same numbers, and fewer bytes to move."""

import errno
import logging

import pytest
import tensorferry.offload
import tensorferry.optim
import torch
from drives import failing_drive
from master_adamw import MasterAdamW
from tensorferry._memory import available
from tensorferry._memory.available import available_bytes
from training import (
    MiB,
    assert_same,
    assert_same_states,
    both,
    copies,
    give_gradients,
    parameters,
)

OWN = dict(buffer_count=2, buffer_bytes=150_000)


def large(count=10, size=MiB // 4):
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(size)) for _ in range(count)]


def adamw(params, path, **options):
    """Each of large()'s parameters is a sub-group of 2 MiB."""
    return tensorferry.optim.AdamW(
        params, nvme_path=path, **(dict(buffer_count=3, buffer_bytes=2 * MiB + 65536) | options)
    )


def moved(optimizer):
    stats = optimizer.stats()
    return stats["read_bytes"] + stats["written_bytes"]


# --- numbers ---


@pytest.mark.parametrize("limit", ["30%", "50%", "100%", 100_000, 1 << 30, "auto"])
@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.AdamW(params, fused=True),
        lambda params: torch.optim.Adam(params, amsgrad=True, fused=True),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        lambda params: torch.optim.Adafactor([p for p in params if p.numel() > 0]),
    ],
    ids=["AdamW", "amsgrad", "momentum", "Adafactor"],
)
def test_numbers_are_those_of_torch(tmp_path, make, limit):
    """Some parameters get their first gradient late, so records grow."""
    mine, ours, theirs, reference = both(tmp_path, make, max_cpu_bytes=limit, **OWN)
    for step in range(8):
        give_gradients(step, [], mine, theirs, skip=(1, 4, 6) if step < 3 else ())
        ours.step()
        reference.step()
        assert_same(mine, theirs, f"after step {step}")
    assert_same_states(ours.state_dict(), reference.state_dict())
    ours.close()


@pytest.mark.parametrize("limit", ["50%", "100%"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_may_stay_too(tmp_path, dtype, limit):
    mine = parameters(dtype)
    theirs = copies(mine)
    ours = tensorferry.optim.AdamW(mine, nvme_path=tmp_path, max_cpu_bytes=limit, **OWN)
    reference = MasterAdamW(theirs)
    for step in range(6):
        give_gradients(step, mine, theirs)
        ours.step()
        reference.step()
        assert_same(mine, theirs, f"after step {step}")
    ours.close()


@pytest.mark.parametrize("options", [dict(pipeline_write=True), dict(pipeline_read=False)])
def test_with_other_paces(tmp_path, options):
    mine = large()
    theirs = copies(mine)
    ours = adamw(mine, tmp_path, max_cpu_bytes="50%", **options)
    reference = torch.optim.AdamW(theirs, fused=True)
    for step in range(4):
        give_gradients(step, mine, theirs)
        ours.step()
        reference.step()
        assert_same(mine, theirs)
    ours.close()


# --- bytes ---


@pytest.mark.parametrize("limit, share", [(0, 0), ("50%", 0.5), ("100%", 1), (6 * MiB, 0.3)])
def test_what_stays_is_not_moved(tmp_path, limit, share):
    params = large()
    optimizer = adamw(params, tmp_path, max_cpu_bytes=limit)
    give_gradients(0, params)
    for _ in range(2):  # from the second step on it is known how little a record takes
        optimizer.step()
    before = moved(optimizer)
    optimizer.step()
    stats = optimizer.stats()
    total = 10 * 2 * MiB
    assert stats["kept_bytes"] == stats["kept_cpu_bytes"] == share * total
    assert stats["kept_gpu_bytes"] == 0
    assert stats["tensor_bytes"] == (1 - share) * total
    assert moved(optimizer) - before == 2 * (1 - share) * total
    optimizer.close()
    assert optimizer._store.kept.nbytes("cpu") == 0


@pytest.mark.parametrize(
    "dtype, options, expected",
    [
        (torch.float32, {}, 8),
        (torch.bfloat16, {}, 10),
        (torch.float16, {}, 12),
        (torch.float32, dict(max_cpu_bytes="50%"), 4),
        (torch.float32, dict(max_cpu_bytes="100%"), 0),
    ],
)
def test_stats_have_the_bytes_of_a_parameter_and_the_wear_of_a_day(
    tmp_path, dtype, options, expected
):
    params = [torch.nn.Parameter(torch.randn(MiB // 4).to(dtype)) for _ in range(10)]
    optimizer = adamw(params, tmp_path, **options)
    keys = ("read_bytes_per_parameter", "written_bytes_per_parameter", "written_bytes_per_day")
    assert [optimizer.stats()[key] for key in keys] == [0, 0, 0]
    for step in range(21):
        give_gradients(step, params)
        optimizer.step()
    stats = optimizer.stats()
    assert stats["read_bytes_per_parameter"] == pytest.approx(expected, rel=0.01)
    assert stats["written_bytes_per_parameter"] == pytest.approx(expected, rel=0.01)
    assert (stats["written_bytes_per_day"] > 0) == (expected > 0)
    optimizer.close()


def test_the_bytes_of_a_parameter_include_gradients_on_the_drive(tmp_path):
    params = large()
    optimizer = adamw(params, tmp_path, offload_gradients=True)
    for _ in range(10):
        sum((param * param).sum() for param in params).backward()
        optimizer.step()
        optimizer.zero_grad()
    # Some gradients may still be on their way when a step begins.
    assert optimizer.stats()["written_bytes_per_parameter"] == pytest.approx(12, rel=0.1)
    assert optimizer.stats()["read_bytes_per_parameter"] == pytest.approx(12, rel=0.1)
    optimizer.close()


def bytes_moved(*holders):
    """(read, written) so far."""
    stats = [holder.stats() for holder in holders]
    return [sum(own[key] for own in stats) for key in ("read_bytes", "written_bytes")]


@pytest.mark.parametrize("dtype, written", [(torch.float32, 12), (torch.bfloat16, 14)])
@pytest.mark.parametrize("weights_bytes", [1, 64 * MiB])
def test_the_bytes_of_a_parameter_include_weights_on_the_drive(
    tmp_path, dtype, written, weights_bytes
):
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(4)))
    model.to(dtype)
    weights = tensorferry.offload.parameters(model, tmp_path, max_cpu_bytes=weights_bytes)
    optimizer = tensorferry.optim.AdamW(model.parameters(), nvme_path=tmp_path)
    moved = []
    for _ in range(5):
        model(torch.ones(1, 512, dtype=dtype)).sum().backward()
        before = bytes_moved(weights, optimizer)
        optimizer.step()
        after = bytes_moved(weights, optimizer)
        moved = [(now - then) / (4 * 512 * 512) for now, then in zip(after, before)]
        optimizer.zero_grad()
    stats = optimizer.stats()
    assert moved[1] == pytest.approx(written, rel=0.01)
    assert stats["read_bytes_per_parameter"] == pytest.approx(moved[0], rel=0.01)
    assert stats["written_bytes_per_parameter"] == pytest.approx(moved[1], rel=0.01)
    optimizer.close()
    weights.close(restore=True)


def test_what_stays_is_spread_over_the_step(tmp_path):
    """So that the drive reads while torch computes what is in memory."""
    optimizer = adamw(large(), tmp_path, max_cpu_bytes="50%", fast_init=False)
    stays = [optimizer._store.kept.stays(group) for group in optimizer._sub_groups]
    assert sum(stays) == 5
    assert all(sum(stays[at : at + 4]) == 2 for at in range(0, 8, 2)), stays
    optimizer.close()


def test_room_is_used_when_states_turn_out_smaller(tmp_path):
    """Before the first step an optimizer may have three states; this one has one."""
    params = large()
    sgd = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    optimizer = tensorferry.optim.offload(
        sgd, tmp_path, buffer_bytes=3 * MiB + 65536, max_cpu_bytes=8 * MiB
    )
    give_gradients(0, params)
    kept_bytes = []
    for _ in range(3):
        optimizer.step()
        kept_bytes.append(optimizer.stats()["kept_bytes"])
    assert kept_bytes == [2 * MiB, 8 * MiB, 8 * MiB]
    assert optimizer.stats()["tensor_bytes"] == 2 * MiB
    optimizer.close()


def test_states_that_come_late_do_not_exceed_the_limit(tmp_path):
    """Half of the parameters of each sub-group get their first gradient when others have stayed for
    some steps."""
    params = large(20, MiB // 8)
    limit = 8 * MiB
    optimizer = adamw(params, tmp_path, max_cpu_bytes=limit, buffer_bytes=2 * MiB + (512 << 10))
    for step in range(6):
        give_gradients(step, params, skip=range(0, 20, 2) if step < 3 else ())
        optimizer.step()
        assert 0 < optimizer.stats()["kept_bytes"] <= limit
    assert optimizer.stats()["kept_bytes"] == limit
    optimizer.close()


@pytest.mark.parametrize("limit", [20 * MiB, 11 * MiB, "50%"])
def test_masters_that_are_stored_whole_do_not_exceed_the_limit(tmp_path, limit):
    """A record grows by a fifth when somebody changes weights or a checkpoint is loaded."""
    torch.manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(MiB // 4).to(torch.bfloat16)) for _ in range(8)]
    theirs = copies(params)
    optimizer = adamw(params, tmp_path, max_cpu_bytes=limit, buffer_bytes=4 * MiB)
    reference = MasterAdamW(theirs)

    def most():
        stats = optimizer.stats()
        whole = stats["kept_bytes"] + stats["tensor_bytes"]
        return whole // 2 if limit == "50%" else limit

    for step in range(6):
        give_gradients(step, params, theirs)
        optimizer.step()
        reference.step()
        assert_same(params, theirs)
        assert 0 < optimizer.stats()["kept_bytes"] <= most()
        if step == 3:
            optimizer.load_state_dict(optimizer.state_dict())
            assert 0 < optimizer.stats()["kept_bytes"] <= most()
        for number in range(step, 8, 3):
            params[number].data.mul_(2)
            theirs[number].data.mul_(2)
            reference.masters[number].data.copy_(theirs[number])
    optimizer.close()


def test_memory_takes_no_more_than_the_records(tmp_path):
    """Before the first step an optimizer may have three states; this one has one."""
    params = large()
    sgd = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    optimizer = tensorferry.optim.offload(
        sgd, tmp_path, buffer_bytes=3 * MiB + 65536, max_cpu_bytes=8 * MiB
    )
    give_gradients(0, params)
    for _ in range(3):
        optimizer.step()
        assert 0 < optimizer.stats()["kept_bytes"] <= 8 * MiB
    optimizer.close()


def test_a_sub_group_that_gets_more_parameters_does_not_exceed_the_limit(tmp_path):
    mine = large(2, MiB // 8)
    theirs = copies(mine)
    limit = MiB + 65536  # for the states of the first one
    ours = adamw(mine[:1], tmp_path, max_cpu_bytes=limit, buffer_bytes=4 * MiB)
    reference = torch.optim.AdamW(theirs[:1], fused=True)
    for step in range(6):
        give_gradients(step, mine, theirs)
        ours.step()
        reference.step()
        assert_same(mine, theirs)
        assert ours.stats()["kept_bytes"] == (MiB if step < 3 else 0)
        if step == 2:
            ours.add_param_group({"params": mine[1:]})
            reference.add_param_group({"params": theirs[1:]})
    ours.close()


def test_groups_that_come_later_take_what_is_left(tmp_path):
    params = large()
    optimizer = adamw(params[:2], tmp_path, max_cpu_bytes=8 * MiB)
    give_gradients(0, params)
    optimizer.step()
    assert optimizer.stats()["kept_bytes"] == 4 * MiB
    optimizer.add_param_group({"params": params[2:]})
    for _ in range(2):
        optimizer.step()
    assert optimizer.stats()["kept_bytes"] == 8 * MiB
    optimizer.close()


# --- limits ---


@pytest.mark.parametrize("limit", [-1, "half", "101%", "-5%", "%", 0.5, None])
def test_what_is_no_limit_is_refused(tmp_path, limit):
    with pytest.raises(ValueError, match="max_cpu_bytes is .*: give a number of bytes, a share"):
        adamw(large(1), tmp_path, max_cpu_bytes=limit)


def write_files(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


V2 = {"proc/self/cgroup": "0::/user/run\n"}
V1 = {"proc/self/cgroup": "5:cpu,memory:/job\n3:freezer:/\n0::/\n"}


@pytest.mark.parametrize(
    "files, left",
    [
        ({}, 1000 << 10),
        (V2, 1000 << 10),
        (V2 | {"cg/user/run/memory.max": "max\n", "cg/user/run/memory.current": "7\n"}, 1000 << 10),
        (V2 | {"cg/user/run/memory.max": "900\n", "cg/user/run/memory.current": "200\n"}, 700),
        (
            V2
            | {
                "cg/user/memory.max": "900\n",
                "cg/user/memory.current": "600\n",
                "cg/user/memory.stat": "anon 5\ninactive_file 100\n",
            },
            400,
        ),
        (V2 | {"cg/user/run/memory.max": "5\n", "cg/user/run/memory.current": "9\n"}, 0),
        (
            V1
            | {
                "cg/memory/job/memory.limit_in_bytes": "800\n",
                "cg/memory/job/memory.usage_in_bytes": "300\n",
                "cg/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "cg/memory/memory.usage_in_bytes": "5000\n",
            },
            500,
        ),
    ],
    ids=["no cgroup", "no limit", "max", "limit", "limit above", "over the limit", "version 1"],
)
def test_memory_that_is_left(tmp_path, files, left):
    write_files(tmp_path, {"proc/meminfo": "MemTotal: 5000 kB\nMemAvailable: 1000 kB\n"} | files)
    assert available_bytes(tmp_path / "proc", tmp_path / "cg") == left


def test_this_machine_has_memory_left():
    assert available_bytes() > 0


@pytest.mark.parametrize("ranks, kept_bytes", [("1", 10 * MiB), ("2", 4 * MiB)])
def test_auto_takes_half_of_what_is_left_for_each_rank(tmp_path, monkeypatch, ranks, kept_bytes):
    monkeypatch.setattr(available, "available_bytes", lambda: 20 * MiB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    params = large()
    optimizer = adamw(params, tmp_path, max_cpu_bytes="auto")
    give_gradients(0, params)
    for _ in range(2):
        optimizer.step()
    assert optimizer.stats()["kept_bytes"] == kept_bytes
    optimizer.close()


def test_auto_takes_half_of_a_gpu_for_a_rank_has_it_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * MiB, 30 * MiB))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert available.auto_bytes(torch.device("cuda", 1)) == 10 * MiB


def test_the_log_says_it_once(tmp_path, caplog):
    params = large()
    optimizer = adamw(params, tmp_path, max_cpu_bytes="50%")
    give_gradients(0, params)
    with caplog.at_level(logging.INFO, logger="tensorferry"):
        for _ in range(3):
            optimizer.step()
    assert [record.getMessage() for record in caplog.records] == [
        "5 of 10 sub-groups keep their states in memory (cpu): 10567680 of 21135360 bytes"
    ]
    optimizer.close()


# --- checkpoints and faults ---


@pytest.mark.parametrize("before, after", [("50%", 0), (0, "50%"), ("100%", "100%")])
def test_a_checkpoint_goes_from_one_limit_to_another(tmp_path, before, after):
    mine = parameters()
    theirs = copies(mine)
    first = tensorferry.optim.AdamW(mine, nvme_path=tmp_path, max_cpu_bytes=before, **OWN)
    reference = torch.optim.AdamW(theirs, fused=True)
    for step in range(3):
        give_gradients(step, mine, theirs)
        first.step()
        reference.step()
    second = tensorferry.optim.AdamW(mine, nvme_path=tmp_path, max_cpu_bytes=after, **OWN)
    second.load_state_dict(first.state_dict())
    first.close()
    for step in range(3, 6):
        give_gradients(step, mine, theirs)
        second.step()
        reference.step()
        assert_same(mine, theirs, f"after step {step}")
    assert_same_states(second.state_dict(), reference.state_dict())
    second.close()


def test_a_state_dict_stays_what_it_was(tmp_path):
    """Also after more steps. It takes no memory: what stays in memory is mapped from the drive."""
    params = large()
    optimizer = adamw(params, tmp_path, max_cpu_bytes="50%")
    give_gradients(0, params)
    optimizer.step()
    saved = optimizer.state_dict()
    copied = [own["exp_avg"].clone() for own in saved["state"].values()]
    stored = optimizer.stats()["tensor_bytes"]
    give_gradients(1, params)
    optimizer.step()
    assert all(torch.equal(own["exp_avg"], c) for own, c in zip(saved["state"].values(), copied))
    assert not torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], copied[0])
    assert optimizer.stats()["tensor_bytes"] == stored
    optimizer.close()


def test_a_step_that_fails_is_said_and_a_checkpoint_mends_it(tmp_path):
    with failing_drive(tmp_path) as drive:
        mine = large()
        theirs = copies(mine)
        ours = adamw(mine, drive.point, max_cpu_bytes="50%")
        reference = torch.optim.AdamW(theirs, fused=True)
        give_gradients(0, mine, theirs)
        ours.step()
        reference.step()
        file = tmp_path / "saved.pt"
        torch.save([[p.detach() for p in mine], ours.state_dict()], file)
        drive.lose()
        with pytest.raises(OSError) as caught:
            ours.step()
        assert caught.value.errno == errno.EIO
        with pytest.raises(RuntimeError, match="load a checkpoint"):
            ours.step()
        values, states = torch.load(file)
        with torch.no_grad():
            for param, value in zip(mine, values):
                param.copy_(value)
        ours.load_state_dict(states)
        give_gradients(1, mine, theirs)
        ours.step()
        reference.step()
        assert_same(mine, theirs)
        ours.close()
