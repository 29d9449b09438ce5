"""OffloadedParameters: the interface to a model whose weights are on the drive."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from .._memory.budget import MemoryBudget, Portion
from .._memory.buffers import NvmePath, open_space
from .._memory.gpu_pool import GpuPool
from .._memory.heap import map_large_blocks
from .._memory.layout import PAGE, check_dense, page_up
from .._memory.operators import UnseenChanges
from .._memory.pending import settle_pending
from .._memory.stored_parameter import stored_parameter_of
from .._memory.weight_memory import WeightMemory
from .hooks import Calls, ModuleHooks, OnDrive, refuse_other_optimizers
from .modules import needed_modules, owners, smallest, unit_modules
from .move_out import MoveOut
from .residency import Residency
from .saved_weights import save_weights
from .split import Split, split_budget
from .unit import Unit

_log = logging.getLogger("tensorferry")

# Their forward uses the weights of their children without calling them.
ONE_UNIT = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)


class Whereabouts(NamedTuple):
    """Which weights of a model are in memory, and who uses them. Does not keep the model alive."""

    residency: Residency
    calls: Calls

    def settle(self) -> None:
        """Waits until the drive has all weights as they are now."""
        self.calls.end_interrupted()
        settle_pending(self.residency.parameters())
        self.residency.write_changed(self.residency.units)
        self.residency.settle()

    def forget_values(self) -> None:
        """Lets go of all weights in memory, because the drive is about to get others."""
        self.calls.end_interrupted()
        settle_pending(self.residency.parameters())
        self.residency.forget_values()


_whereabouts: weakref.WeakKeyDictionary[torch.nn.Module, Whereabouts] = weakref.WeakKeyDictionary()


def whereabouts_in(model: torch.nn.Module) -> list[Whereabouts]:
    """Returns those of the weights of a model, and of modules in it, that are on the drive."""
    return [found for module in model.modules() if (found := _whereabouts.get(module)) is not None]


class Store(Protocol):
    """What has the weights on the drive: a swap space, or files of a checkpoint."""

    @property
    def closed(self) -> bool: ...

    def stats(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


class OffloadedParameters(OnDrive):
    """The weights of a model on NVMe, as offload.parameters() and offload.checkpoint() return them.
    Lives as long as the model, or until close()."""

    __module__ = "tensorferry.offload"  # where users find it

    def __init__(
        self,
        model: torch.nn.Module,
        store: Store,
        residency: Residency,
        needs: dict[torch.nn.Module, list[Unit]],
        kept_bytes: int = 0,
        portion: Portion | None = None,
        stacks: Mapping[torch.nn.Module, Callable[[], bool]] | None = None,
        hooks: type[ModuleHooks] = ModuleHooks,
    ) -> None:
        """`needs` are the units that each module needs, `kept_bytes` those of weights that are not
        on the drive, `portion` what all of it takes of a budget. `stacks` are modules whose experts
        may come one by one: see experts.py. `hooks` are put on the modules."""
        self._model = model
        self._store = store
        self._residency = residency
        self._kept_bytes = kept_bytes
        self._portion = portion
        self._needs: dict[torch.nn.Module, list[Unit]] = {model: [], **needs}
        self._calls = Calls()
        _whereabouts[model] = Whereabouts(residency, self._calls)
        self._hooks = [
            hooks(
                module,
                units,
                residency,
                self._calls,
                begins_pass=module is model,
                asks_for_parts=(stacks or {}).get(module),
            )
            for module, units in self._needs.items()
        ]

    @contextlib.contextmanager
    def gather(
        self, module: torch.nn.Module | None = None, *, modify: bool = False
    ) -> Iterator[torch.nn.Module]:
        """Holds all weights of a module (default: of the model) in memory, however much that takes.

        At the end weights that were changed in place go to the drive. With modify=True all of them
        do: also those changed through .data or numpy, or by another thread in
        torch.inference_mode(), which torch does not notice."""
        self._calls.end_interrupted()
        module = self._model if module is None else module
        inside = set(module.modules())
        units = {unit: None for m, needed in self._needs.items() if m in inside for unit in needed}
        if modify:
            for unit in units:
                unit.check_writable()
        with contextlib.ExitStack() as at_end:
            self._residency.use(units, at_end)
            if torch.is_grad_enabled():
                save_weights(self._residency, at_end)
            if not modify:
                at_end.enter_context(UnseenChanges(self._residency.note_write))
            yield module
            if modify:
                self._residency.write_all(units)

    def stats(self) -> dict[str, Any]:
        """Returns what was read and written, as SwapSpace.stats() does, and how much of the weights
        is in memory:

        - `weight_bytes`: bytes of the weights on the drive.
        - `resident_bytes`: those of them that are in memory now, too.
        - `kept_bytes`: bytes of the weights that stay in memory and are not on the drive.
        - `hits`, `misses`: how often a module found its weights in memory, or had to wait.
        - `overflows`: how often the weights in use at once took more than their memory.
        - `expert_bytes`: bytes of experts that were chosen, read or found in memory, if they come
          one by one.
        - `wasted_bytes`: bytes that were read ahead and dropped before anybody needed them.
        - `waited_seconds`: how long modules waited for their weights so far.
        """
        kept = {"kept_bytes": self._kept_bytes}
        return self._store.stats() | self._residency.stats() | kept

    def close(self, restore: bool = False) -> None:
        """Removes the hooks, and files that parameters() has made. With restore=True the weights
        come back into memory; if they cannot be read, nothing changes. Without it the model has no
        weights any more."""
        if self._store.closed:
            return
        self._calls.end_interrupted()
        failure = None
        try:
            settle_pending(self._residency.parameters())
            self._residency.settle()
        except (OSError, RuntimeError) as error:
            failure = None if restore else error  # memory still has the values
        values = self._residency.values() if restore else {}
        _whereabouts.pop(self._model, None)
        for hooks in self._hooks:
            hooks.remove()
        self._hooks = []
        for unit in self._residency.units:
            unit.end(values.get(unit))
        self._store.close()
        if self._portion is not None:
            self._portion.close()
        if failure is not None:
            raise failure

    # A closed one belongs to no weights: a copy of what refers to it gets None.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return None if self._store.closed else super().__deepcopy__(memo)

    def __reduce__(self) -> Any:
        return (type(None), ()) if self._store.closed else super().__reduce__()

    def __enter__(self) -> OffloadedParameters:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<tensorferry.offload.OffloadedParameters: {self._store!r}>"


def offload_model(
    model: torch.nn.Module,
    nvme_path: NvmePath,
    device: torch.device,
    max_bytes: int | MemoryBudget,
    keep_bytes: int,
    one_unit: tuple[type[torch.nn.Module], ...],
    initialize: Callable[[torch.nn.Module], object] | None,
    handle_options: dict[str, Any],
) -> OffloadedParameters:
    """Moves the weights of a model to the drive and puts hooks on its modules."""
    check_model(model)
    map_large_blocks()
    modules = list(unit_modules(model, ONE_UNIT + one_unit, set()))
    given = max_bytes if isinstance(max_bytes, int) else max_bytes.portion(device)
    split = _split(model, modules, keep_bytes, given)
    portion = None if isinstance(given, int) else given
    limit = split.passing_bytes
    on_cpu = device.type == "cpu"
    space = open_space(nvme_path, page_up(limit) if on_cpu else PAGE, **handle_options)
    residency = Residency(WeightMemory(space, None if on_cpu else GpuPool(device, limit)))
    on_meta = any(param.device.type == "meta" for param in model.parameters())
    move = MoveOut(space, residency, initialize)
    try:
        needs = move.run(modules, owners(modules, split.kept))
    except BaseException as error:
        move.undo(error, restore=not on_meta)  # a model on the meta device may not fit
        with contextlib.suppress(OSError):
            space.close()
        raise
    for param in split.kept:
        if param.device.type != "meta":
            param.data = param.data.to(device)
    weights = OffloadedParameters(model, space, residency, needs, split.kept_bytes, portion)
    refuse_other_optimizers()
    return weights


def _split(
    model: torch.nn.Module,
    modules: list[tuple[torch.nn.Module, list[torch.nn.Module]]],
    keep_bytes: int,
    limit: int | Portion,
) -> Split:
    """Decides which weights stay in memory: the smallest and, within a portion of a budget, as many
    as fit."""
    room = limit if isinstance(limit, int) else limit.room
    small = smallest(model, keep_bytes, room // 16)
    owned = owners(modules, small)
    if isinstance(limit, int):
        sizes = [sum(page_up(p.nbytes) for p in params) for params in owned.values()]
        return Split(small, min(sum(sizes), max(room, max(sizes, default=0))))
    needed = needed_modules(modules, owned)
    split = split_budget(model, owned, needed, room - Split(small, 0).kept_bytes)
    split = Split(small | split.kept, split.passing_bytes)
    limit.hold(split.kept_bytes + split.passing_bytes)
    _log.info(
        "%d bytes of weights stay in memory for good, the others pass through %d bytes; the budget "
        "leaves %d bytes for states",
        split.kept_bytes,
        split.passing_bytes,
        room - limit.nbytes,
    )
    return split


def check_model(model: torch.nn.Module) -> None:
    """Raises ValueError if a weight of the model cannot be offloaded."""
    for name, param in model.named_parameters():
        if stored_parameter_of(param) is not None:
            raise ValueError(
                f"{name} is on NVMe already: call close(restore=True) before you offload the model "
                "again"
            )
        if param.device.type not in ("cpu", "cuda", "meta"):
            raise ValueError(
                f"cannot offload {name}, which is on {param.device}: move the model to the CPU or "
                "to a CUDA GPU first"
            )
        if param.layout != torch.strided:
            raise ValueError(
                f"{name} is {param.layout}: only dense weights can go to NVMe; convert it with "
                "to_dense()"
            )
        check_dense(param)
