"""OffloadedParameters: the interface to a model whose weights are on the drive."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from .._memory.buffers import NvmePath, open_space
from .._memory.gpu_pool import GpuPool
from .._memory.heap import map_large_blocks
from .._memory.layout import PAGE, check_dense, page_up
from .._memory.operators import UnseenChanges
from .._memory.stored_parameter import stored_parameter_of
from .._memory.weight_memory import WeightMemory
from .hooks import Calls, ModuleHooks, OnDrive, refuse_other_optimizers
from .modules import owners, smallest, unit_modules
from .move_out import MoveOut
from .residency import Residency
from .saved_weights import save_weights
from .unit import Unit

# Their forward uses the weights of their children without calling them.
ONE_UNIT = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)


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
    ) -> None:
        """`needs` are the units that each module needs."""
        self._model = model
        self._store = store
        self._residency = residency
        self._needs: dict[torch.nn.Module, list[Unit]] = {model: [], **needs}
        self._calls = Calls()
        self._hooks = [
            ModuleHooks(module, units, residency, self._calls, begins_pass=module is model)
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
        is in memory."""
        return self._store.stats() | self._residency.stats()

    def close(self, restore: bool = False) -> None:
        """Removes the hooks, and files that parameters() has made. With restore=True the weights
        come back into memory; if they cannot be read, nothing changes. Without it the model has no
        weights any more."""
        if self._store.closed:
            return
        self._calls.end_interrupted()
        failure = None
        try:
            self._residency.settle()
        except (OSError, RuntimeError) as error:
            failure = None if restore else error  # memory still has the values
        values = self._residency.values() if restore else {}
        for hooks in self._hooks:
            hooks.remove()
        self._hooks = []
        for unit in self._residency.units:
            unit.end(values.get(unit))
        self._store.close()
        if failure is not None:
            raise failure

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
    max_bytes: int,
    keep_bytes: int,
    one_unit: tuple[type[torch.nn.Module], ...],
    initialize: Callable[[torch.nn.Module], object] | None,
    handle_options: dict[str, Any],
) -> OffloadedParameters:
    """Moves the weights of a model to the drive and puts hooks on its modules."""
    check_model(model)
    map_large_blocks()
    modules = list(unit_modules(model, ONE_UNIT + one_unit, set()))
    kept = smallest(model, keep_bytes, max_bytes // 16)
    owned = owners(modules, kept)
    sizes = [sum(page_up(p.nbytes) for p in params) for params in owned.values()]
    limit = min(sum(sizes), max(max_bytes, max(sizes, default=0)))
    on_cpu = device.type == "cpu"
    space = open_space(nvme_path, page_up(limit) if on_cpu else PAGE, **handle_options)
    residency = Residency(WeightMemory(space, None if on_cpu else GpuPool(device, limit)))
    on_meta = any(param.device.type == "meta" for param in model.parameters())
    move = MoveOut(space, residency, initialize)
    try:
        needs = move.run(modules, owned)
    except BaseException as error:
        move.undo(error, restore=not on_meta)  # a model on the meta device may not fit
        with contextlib.suppress(OSError):
            space.close()
        raise
    for param in kept:
        if param.device.type != "meta":
            param.data = param.data.to(device)
    weights = OffloadedParameters(model, space, residency, needs)
    refuse_other_optimizers()
    return weights


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
