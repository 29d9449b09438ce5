"""A model whose weights are on the drive: its hooks, and what users may ask of it."""

import contextlib
import sys
import threading

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .._memory.buffers import open_space
from .._memory.gpu_pool import GpuPool
from .._memory.heap import map_large_blocks
from .._memory.layout import PAGE, check_dense, page_up
from .._memory.operators import UnseenChanges
from .._memory.stored_parameter import Home, home_of
from .._notes import add_note
from .modules import materialise, owners, smallest, starts, unit_modules, units_of
from .residency import Residency
from .unit import Unit

# Their forward reads the weights of their children without calling them.
_ONE_UNIT = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)


class _OnDrive:
    """Belongs to what is on the drive, and so can be neither copied nor pickled."""

    def __deepcopy__(self, memo):
        raise TypeError("a model with weights on NVMe cannot be copied")

    def __reduce__(self):
        raise TypeError("a model with weights on NVMe cannot be pickled: save its state_dict()")


class _Hook(_OnDrive):
    """A hook on a module, which keeps that from being copied too."""

    def __init__(self, function):
        self._function = function

    def __call__(self, *args):
        return self._function(*args)


class OffloadedParameters(_OnDrive):
    """What offload.parameters() has made of a model. Lives as long as that or until close()."""

    __module__ = "tensorferry.offload"  # where users find it

    def __init__(
        self, model, nvme_path, device, max_bytes, keep_bytes, classes, initialize, handle_options
    ):
        _check(model)
        map_large_blocks()
        self._model = model
        self._hooks = []
        self._frames = threading.local()
        self._initialize = initialize
        self._modules = list(unit_modules(model, _ONE_UNIT + classes, set()))
        kept = smallest(model, keep_bytes, max_bytes // 16)
        owned = owners(self._modules, kept)
        sizes = [sum(page_up(p.nbytes) for p in params) for params in owned.values()]
        room = min(sum(sizes), max(max_bytes, max(sizes, default=0)))
        self._device = device
        on_cpu = device.type == "cpu"
        self._space = open_space(nvme_path, page_up(room) if on_cpu else PAGE, **handle_options)
        self._residency = Residency(self._space, None if on_cpu else GpuPool(device, room))
        on_meta = any(param.device.type == "meta" for param in model.parameters())
        try:
            self._needs = self._bring_out(owned)
        except BaseException as error:
            self._put_back(error, restore=not on_meta)  # what never was in memory may not fit
            raise
        for param in kept:
            if param.device.type != "meta":
                param.data = param.data.to(device)
        for module, needed in self._needs.items():
            self._watch(module, needed)
        _refuse_other_optimizers()

    # --- moving out ---

    def _bring_out(self, owners):
        """Makes the units, one module at a time, and returns which ones each module needs."""
        made = {}  # a parameter on the meta device -> the real one
        units = {}  # param -> unit
        needs = {self._model: []}
        for number, (module, subtree) in enumerate(self._modules):
            fresh = [part for part in subtree if materialise(part, made, self._device)]
            unit = Unit(self._residency) if owners[module] else None
            for index, param in enumerate(made.get(param, param) for param in owners[module]):
                unit.add(Home(param, f"{number}.{index}", self._space, unit))
                units[param] = unit
            if unit:
                unit.bring_in(empty={made[param] for param in owners[module] if param in made})
            self._start(subtree, fresh, units)
            if unit:
                unit.bring_out()
            for part in subtree:
                if needed := units_of([part], units):
                    needs.setdefault(part, needed)
            if needed := units_of(subtree, units):
                needs[module] = needed
        self._residency.settle()
        return needs

    def _put_back(self, error, restore):
        """When not all could be brought out: what has gone comes back."""
        # First what is in memory: it may be nowhere else, and must not give way to the others.
        for unit in sorted(self._residency.units, key=lambda unit: unit.memory is None):
            unit.forgo_writes()  # that may be what has failed
            try:
                unit.end(unit.values() if restore and unit.moved else None)
            except OSError:
                unit.end()
                add_note(error, "some weights could not be read back: load the model anew")
        with contextlib.suppress(OSError):
            self._space.close()

    def _start(self, subtree, fresh, units):
        """Gives fresh modules the values they start with."""
        with contextlib.ExitStack() as frame:
            for unit in units_of(fresh, units):  # also what was made before and is shared
                self._use(unit, frame)
            for start in starts(subtree, fresh, self._initialize):
                start()

    # --- hooks ---

    def _watch(self, module, needed):
        def before(*_):
            # Hooks of users come before ours and may look at the weights.
            module._forward_hooks.move_to_end(release.id)
            self._enter(module, needed)

        def after(_module, _inputs, output):
            output = _without_parameters(output)
            self._leave(module)
            return output

        def before_load(_module, _state, _prefix, metadata, *_):
            if metadata.get("assign_to_params_buffers"):
                raise ValueError("weights on NVMe are loaded by value: use assign=False")
            frame = self._begin_call(module, _frame_of_load())
            try:
                for unit in needed:
                    self._use(unit, frame, replacing=True)
            except BaseException:
                self._leave(module)
                raise

        def after_load(*_):
            if torch.is_inference_mode_enabled():  # where autograd sees no change
                self._residency.note_changes(needed)
            self._leave(module)

        def fill(_module, state_dict, prefix, _metadata):
            self._fill_state_dict(module, state_dict, prefix)

        release = module.register_forward_hook(_Hook(after), always_call=True)
        self._hooks += [
            release,
            module.register_forward_pre_hook(_Hook(before), prepend=True),
            module.register_load_state_dict_pre_hook(_Hook(before_load)),
            module.register_load_state_dict_post_hook(_Hook(after_load)),
            module.register_state_dict_post_hook(_Hook(fill)),
        ]

    def _enter(self, module, needed):
        torchs = sys._getframe(3)  # after our two hooks: torch's, which lasts as long as the call
        frame = self._begin_call(module, torchs)
        if module is self._model:
            self._residency.begin_pass()
        for unit in needed:
            self._use(unit, frame)
        if torch.is_grad_enabled():
            self._save_places(frame)
        elif torch.is_autocast_enabled(self._device.type) and torch.is_autocast_cache_enabled():
            # It would keep what it has made of all the weights until autocast ends.
            torch.set_autocast_cache_enabled(False)
            frame.callback(torch.set_autocast_cache_enabled, True)

    def _begin_call(self, module, torchs):
        """What is to be undone when a call of torch is over, whose frame that is."""
        self._end_calls_that_are_over()
        frame = contextlib.ExitStack()
        self._calls().append((module, frame, torchs))
        return frame

    def _leave(self, module):
        calls = self._calls()
        if calls and calls[-1][0] is module:  # it is not where a hook before ours has failed
            calls.pop()[1].close()

    def _end_calls_that_are_over(self):
        """After an exception torch calls our hook, but not after Ctrl-C."""
        calls = self._calls()
        while calls:
            running = sys._getframe()
            while running is not None and running is not calls[-1][2]:
                running = running.f_back
            if running is not None:
                return
            calls.pop()[1].close()

    def _calls(self):
        """(module, what is to be undone, torch's frame) of the calls this thread is in."""
        return self._frames.__dict__.setdefault("calls", [])

    def _use(self, unit, frame, replacing=False):
        self._residency.enter(unit, replacing)
        frame.callback(self._residency.leave, unit)

    def _save_places(self, frame):
        if (saved := self._residency.saved_weights()) is not None:
            hooks = torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack)
            frame.enter_context(hooks)

    def _fill_state_dict(self, module, state_dict, prefix):
        self._end_calls_that_are_over()
        self._residency.write_changed(self._needs.get(module, ()))
        self._residency.settle()
        for name, param in module._parameters.items():
            if param is None or prefix + name not in state_dict:
                continue
            if (home := home_of(param)) is not None:
                state_dict[prefix + name] = home.view()

    # --- for users ---

    @contextlib.contextmanager
    def gather(self, module=None, *, modify=False):
        """Inside, all weights of a module (of the model, if none is named) are in memory, whatever
        that takes. What is changed in place goes to the drive at the end; with modify=True all
        does, also what was changed through .data or numpy, or by another thread in
        torch.inference_mode(), which torch does not notice."""
        self._end_calls_that_are_over()
        module = self._model if module is None else module
        inside = set(module.modules())
        units = {unit: None for m, needed in self._needs.items() if m in inside for unit in needed}
        with contextlib.ExitStack() as frame:
            for unit in units:
                self._use(unit, frame)
            if torch.is_grad_enabled():
                self._save_places(frame)
            if not modify:
                frame.enter_context(UnseenChanges(self._residency.note_write))
            yield module
            if modify:
                self._residency.write_all(units)

    def stats(self):
        """SwapSpace.stats(), and what of the weights is in memory."""
        return self._space.stats() | self._residency.stats()

    def close(self, restore=False):
        """Ends it and removes the files. With restore=True the weights come back into memory; if
        they cannot be read, all stays as it is. Without, the model has none any more."""
        if self._space.closed:
            return
        self._end_calls_that_are_over()
        failure = None
        try:
            self._residency.settle()
        except (OSError, RuntimeError) as error:
            failure = None if restore else error  # it is in memory still
        values = self._values() if restore else {}
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for unit in self._residency.units:
            unit.end(values.get(unit))
        self._space.close()
        if failure is not None:
            raise failure

    def _values(self):
        """Copies of the weights of each unit."""
        units = self._residency.units
        only_here = [unit for unit in units if unit.has_failed()]
        for unit in only_here:
            unit.users += 1  # it must not give way to the others
        try:
            values = {unit: unit.values() for unit in units}
        finally:
            for unit in only_here:
                unit.users -= 1
        for unit in units:
            unit.forgo_writes()
        return values

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __repr__(self):
        return f"<tensorferry.offload.OffloadedParameters: {self._space!r}>"


def _check(model):
    for name, param in model.named_parameters():
        if home_of(param) is not None:
            raise ValueError(f"{name} is on NVMe already: the weights of a model go there once")
        if param.device.type not in ("cpu", "cuda", "meta"):
            raise ValueError(
                f"{name} is on {param.device}: only weights on the CPU or on a GPU of CUDA can go "
                "to NVMe"
            )
        if param.layout != torch.strided:
            raise ValueError(f"{name} is {param.layout}: only dense weights can go to NVMe")
        check_dense(param)


def _frame_of_load():
    """That of who has called torch's _load_from_state_dict(): the children are loaded there too."""
    name = "_load_from_state_dict"
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_name != name:
        frame = frame.f_back
    while frame.f_back is not None and frame.f_code.co_name == name:
        frame = frame.f_back
    return frame


def _without_parameters(output):
    """What a module returns, with views in place of weights, whose values go when it ends."""
    if isinstance(output, torch.nn.Parameter) and home_of(output) is not None:
        return output.view_as(output)
    if type(output) in (tuple, list) and any(type(o) is torch.nn.Parameter for o in output):
        return type(output)(_without_parameters(o) for o in output)
    if type(output) is dict:
        return {name: _without_parameters(o) for name, o in output.items()}
    return output


_refusing = []


def _refuse_other_optimizers():
    """From now on: an optimizer of torch would write where there is no weight."""

    def check(optimizer, *_):
        if getattr(getattr(optimizer, "optimizer", optimizer), "is_offloaded", False):
            return
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None and home_of(param) is not None:
                    raise RuntimeError(
                        f"{type(optimizer).__name__} cannot step weights that are on NVMe: use "
                        "tensorferry.optim.AdamW, or tensorferry.optim.offload(optimizer, ...)"
                    )

    if not _refusing:
        _refusing.append(register_optimizer_step_pre_hook(check))
