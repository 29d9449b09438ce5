"""Weights that could not be written to the drive: older ones never take their place."""

import errno
import threading

import pytest

torch = pytest.importorskip("torch")

import tensorferry.offload
import tensorferry.optim
from drives import fill_up, loop_mount, overbooked_drive
from tensorferry._memory.stored_parameter import StoredParameter, stored_parameter_of
from tensorferry.offload.unit import Unit

MiB = 1 << 20
WIDTH = 1024


def make_model(layers):
    torch.manual_seed(1)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


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
        assert weights._store.closed


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


def test_a_state_dict_beside_passes_leaves_the_weights_alone(tmp_path):
    """While a layer is on its way its parameters show nothing: that is not what they are."""
    model, x = make_model(4), torch.ones(1, WIDTH)
    with torch.no_grad():
        expected = model(x)
        wanted = {name: value.clone() for name, value in model.state_dict().items()}
        with tensorferry.offload.parameters(model, tmp_path, max_cpu_bytes=5 * MiB):
            over = threading.Event()

            def infer():
                with torch.no_grad():
                    while not over.is_set():
                        assert torch.equal(model(x), expected)

            failures = []
            thread = threading.Thread(target=noting(infer, failures))
            thread.start()
            for _ in range(50):
                for name, value in model.state_dict().items():
                    assert torch.equal(value, wanted[name])
            over.set()
            thread.join()
            assert not failures
            assert torch.equal(model(x), expected)


def noting(work, failures):
    def run():
        try:
            work()
        except BaseException as error:
            failures.append(error)

    return run


def test_weights_that_are_nowhere_else_survive_a_close_that_fails(tmp_path, monkeypatch):
    with overbooked_drive(tmp_path) as (drive, fill), torch.no_grad():
        model = make_model(4)
        weights = tensorferry.offload.parameters(model, drive, max_cpu_bytes=5 * MiB)
        fill()
        with weights.gather(model[0]):
            model[0].weight.zero_()
        last, copies = weights._residency.units[-1], Unit.copies

        def interrupted(unit):
            if unit is last:
                raise KeyboardInterrupt
            return copies(unit)

        monkeypatch.setattr(Unit, "copies", interrupted)
        with pytest.raises(KeyboardInterrupt):
            weights.close(restore=True)
        monkeypatch.undo()
        weights.close(restore=True)
        assert not model[0].weight.any() and all(layer.weight.any() for layer in model[1:])


def test_what_cannot_be_written_is_no_matter_to_other_layers(tmp_path):
    with overbooked_drive(tmp_path) as (drive, fill), torch.no_grad():
        model, x = make_model(4), torch.ones(1, WIDTH)
        expected = model[3](model[2](model[1](x)))
        weights = tensorferry.offload.parameters(model, drive, max_cpu_bytes=9 * MiB)
        fill()
        with weights.gather(model[0]):
            model[0].weight.zero_()
        for _ in range(3):
            assert torch.equal(model[3](model[2](model[1](x))), expected)
        with pytest.raises(OSError):
            model(x)
        weights.close(restore=True)
        assert not model[0].weight.any()


def test_memory_that_is_still_held_is_waited_for_beside_what_cannot_be_written(tmp_path):
    with overbooked_drive(tmp_path) as (drive, fill), torch.no_grad():
        model, x = make_model(4), torch.ones(1, WIDTH)
        expected = model[2](model[1](x))
        weights = tensorferry.offload.parameters(model, drive, max_cpu_bytes=9 * MiB)
        fill()
        with weights.gather(model[0]):
            model[0].weight.zero_()
        held = []
        hook = model[1].register_forward_pre_hook(lambda *_: held.append(model[1].weight.data))
        first = model[1](x)
        hook.remove()
        assert len(held) == 1
        release = threading.Timer(0.1, held.clear)
        release.start()
        assert torch.equal(model[2](first), expected)
        release.join()
        weights.close(restore=True)


def test_an_interrupted_offload_leaves_every_weight_as_it_was(tmp_path, monkeypatch):
    model = torch.nn.TransformerEncoderLayer(64, 4, 256)
    before = [param.detach().clone() for param in model.parameters()]
    of, left = StoredParameter.of, [2]

    def interrupted(stored, memory):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return of(stored, memory)

    monkeypatch.setattr(StoredParameter, "of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tensorferry.offload.parameters(model, tmp_path, keep_bytes=0)
    for param, value in zip(model.parameters(), before):
        assert torch.equal(param, value)


def test_an_interrupted_write_is_made_up_for(tmp_path, monkeypatch):
    model, x = make_model(3), torch.ones(1, WIDTH)
    with tensorferry.offload.parameters(model, tmp_path, max_cpu_bytes=5 * MiB) as weights:
        collect = StoredParameter.collect

        def interrupted(stored, memory):
            collect(stored, memory)
            raise KeyboardInterrupt

        monkeypatch.setattr(StoredParameter, "collect", interrupted)
        with pytest.raises(KeyboardInterrupt), torch.no_grad(), weights.gather(model[0]):
            model[0].weight.data = torch.zeros(WIDTH, WIDTH)
        monkeypatch.undo()
        with torch.no_grad():
            assert not model.state_dict()["0.weight"].any()
            for _ in range(3):  # it comes from memory first, and then from the drive
                assert not model(x).any()


def test_an_edit_that_autograd_does_not_see_survives_what_befalls_others(tmp_path):
    with loop_mount(tmp_path, size="128M") as drive, torch.no_grad():
        model = make_model(4)
        weights = tensorferry.offload.parameters(model, drive, max_cpu_bytes=5 * MiB)
        fill_up(drive / "filler")
        with pytest.raises(OSError), weights.gather(modify=True):
            for layer in model:
                layer.weight.data.zero_()
        (drive / "filler").unlink()
        assert not any(value.any() for value in model.state_dict().values())
        weights.close()


def test_an_edit_that_autograd_does_not_see_is_stepped(tmp_path):
    model, x = make_model(2).bfloat16(), torch.ones(1, WIDTH, dtype=torch.bfloat16)
    with tensorferry.offload.parameters(model, tmp_path, max_cpu_bytes=5 * MiB) as weights:
        optimizer = tensorferry.optim.AdamW(
            model.parameters(), lr=0.0, weight_decay=0.0, nvme_path=tmp_path
        )
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
            with weights.gather(model[0], modify=True):
                model[0].weight.data.mul_(2)
                wanted = model[0].weight.detach().clone()
        model(x).sum().backward()
        optimizer.step()
        assert torch.equal(model.state_dict()["0.weight"], wanted)
        optimizer.close()


def test_a_state_dict_has_nothing_older_than_a_write_that_failed(tmp_path):
    """As an optimizer begins it, with pipeline_write=True."""
    with overbooked_drive(tmp_path) as (drive, fill), torch.no_grad():
        model = make_model(2)
        weights = tensorferry.offload.parameters(model, drive, max_cpu_bytes=5 * MiB)
        fill()
        stored = stored_parameter_of(model[1].weight)
        for operation in stored.write(torch.zeros(stored.nbytes, dtype=torch.uint8)):
            with pytest.raises(OSError):
                operation.wait()
        with pytest.raises(OSError):
            model.state_dict()
        weights.close()


class Whole(torch.nn.Module):
    """Has a weight of its own, and a part that is not easily loaded."""

    def __init__(self):
        super().__init__()
        self.own = torch.nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.part = Part(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.part(x @ self.own)


class Part(torch.nn.Linear):
    fails = False

    def _load_from_state_dict(self, *args):
        super()._load_from_state_dict(*args)
        if self.fails:
            raise RuntimeError("not today")


def test_a_load_that_fails_further_down_leaves_nothing_in_use(tmp_path):
    model, x = Whole(), torch.ones(1, WIDTH)
    with tensorferry.offload.parameters(model, tmp_path, max_cpu_bytes=5 * MiB) as weights:
        zeros = {name: torch.zeros(WIDTH, WIDTH) for name, _ in model.named_parameters()}
        model.part.fails = True
        with pytest.raises(RuntimeError, match="not today"):
            model.load_state_dict(zeros)
        with torch.no_grad():
            assert not model(x).any()
        assert all(unit.users == 0 for unit in weights._residency.units)
        assert not any(value.any() for value in model.state_dict().values())
        model.part.fails = False
        model.load_state_dict({name: value + 1 for name, value in zeros.items()})
        assert all(unit.users == 0 for unit in weights._residency.units)
        assert all(value.all() for value in model.state_dict().values())
