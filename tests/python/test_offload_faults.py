"""Weights that could not be written to the drive: older ones never take their place."""

import errno

import pytest

torch = pytest.importorskip("torch")

import tensorferry.offload
from drives import fill_up, loop_mount, overbooked_drive

MiB = 1 << 20
WIDTH = 1024


def make_model(layers):
    torch.manual_seed(1)
    return torch.nn.Sequential(
        *(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
    )


def change_by_loading(model, weights):
    zeros = {name: torch.zeros(WIDTH, WIDTH) for name, _ in model.named_parameters()}
    model.load_state_dict(zeros)


def change_in_place(model, weights):
    for layer in model:
        with weights.gather(layer, modify=True), torch.no_grad():
            layer.weight.zero_()


@pytest.mark.parametrize("change", [change_by_loading, change_in_place])
def test_weights_that_fail_to_be_written_are_kept_and_said_at_every_use(tmp_path, change):
    with overbooked_drive(tmp_path) as (drive, fill), torch.no_grad():
        model, x = make_model(4), torch.ones(1, WIDTH)
        before = [layer.weight.clone() for layer in model]
        weights = tensorferry.offload.parameters(model, drive, max_cpu_bytes=5 * MiB)
        model(x)
        fill()
        with pytest.raises(OSError):
            change(model, weights)
        for use in (lambda: model(x), model.state_dict) * 2:
            with pytest.raises(OSError) as caught:
                use()
            assert caught.value.errno in (errno.EIO, errno.ENOSPC)
        weights.close(restore=True)
        changed = [not torch.equal(layer.weight, old) for layer, old in zip(model, before)]
        assert changed == [True, False, False, False]
        assert not model[0].weight.any()


def test_a_close_that_drops_the_weights_says_that_they_were_not_written(tmp_path):
    with overbooked_drive(tmp_path) as (drive, fill), torch.no_grad():
        model = make_model(2)
        weights = tensorferry.offload.parameters(model, drive, max_cpu_bytes=9 * MiB)
        fill()
        change_in_place(model, weights)  # both are in memory
        with pytest.raises(OSError):
            weights.close()
        assert weights._space.closed


@pytest.mark.parametrize("change", [change_by_loading, change_in_place])
def test_a_full_drive_takes_the_weights_when_there_is_room_again(tmp_path, change):
    with loop_mount(tmp_path, size="128M") as drive, torch.no_grad():
        model, x = make_model(4), torch.ones(1, WIDTH)  # the 16 MiB that are taken at first
        weights = tensorferry.offload.parameters(model, drive, max_cpu_bytes=5 * MiB)
        fill_up(drive / "filler")
        with pytest.raises(OSError) as caught:
            change(model, weights)
        assert caught.value.errno == errno.ENOSPC
        with pytest.raises(OSError):
            model(x)
        (drive / "filler").unlink()
        change(model, weights)
        assert torch.equal(model(x), torch.zeros(1, WIDTH))
        assert not any(value.any() for value in model.state_dict().values())
        weights.close()


def test_a_state_dict_inside_gather_has_what_was_changed_there(tmp_path):
    model = make_model(3)
    with tensorferry.offload.parameters(model, tmp_path, max_cpu_bytes=5 * MiB) as weights:
        with weights.gather(), torch.no_grad():
            model[1].weight.fill_(3)
            assert torch.equal(model.state_dict()["1.weight"], torch.full((WIDTH, WIDTH), 3.0))
        assert torch.equal(model.state_dict()["1.weight"], torch.full((WIDTH, WIDTH), 3.0))
