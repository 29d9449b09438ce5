"""Runs a model from the files of a checkpoint: finds each weight there, and reads it in place."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn import Module, Parameter

from .._memory.file_values import FileValues, Stored
from .._memory.gpu_pool import GpuPool
from .._memory.heap import map_large_blocks
from .._memory.layout import PAGE, is_dense, page_up
from .._memory.weight_memory import WeightMemory
from .computed_buffers import compute_buffers
from .experts import ExpertWeights, Stacks, apart, have_experts
from .hooks import refuse_other_optimizers
from .modules import owners, smallest, unit_modules, units_of
from .offloaded import ONE_UNIT, OffloadedParameters, check_model
from .residency import Residency
from .stored_files import CheckpointPath, StoredFiles
from .unit import Unit, each

_log = logging.getLogger("tensorferry")

Rename = Mapping[str, str] | Callable[[str], "str | None"]
_SHOWN = 12  # names in an error
_ROUNDING = 4 * PAGE  # what a part of a weight may take besides its bytes
# Of a limit of at least so many bytes, a share is for the slots of bytes that the drive cannot put
# in place, and for lists. A smaller limit is for weights alone.
_SHARED_FROM = 256 << 20
_SLOTS_SHARE = 1 / 6
_SLOTS_BYTES = 72 << 20  # at most


class Source(NamedTuple):
    """Where the values of a tensor of the model come from."""

    names: tuple[str, ...]  # of tensors in the files
    stored: Callable[[], Stored]  # raises ValueError if torch cannot use them


def sources_by_name(files: StoredFiles, rename: Rename | None) -> dict[str, Source]:
    """Returns the tensors of the files by their names in the model."""
    sources: dict[str, Source] = {}
    for stored in files.tensors:
        if rename is None:
            name: str | None = stored
        elif callable(rename):
            name = rename(stored)
        else:
            name = rename.get(stored, stored)
        if name is None:
            continue
        if name in sources:
            raise ValueError(
                f"rename= makes {name} of both {sources[name].names[0]} and {stored}: give each "
                "tensor its own name, or None to leave it out"
            )
        sources[name] = Source((stored,), functools.partial(files.stored, stored))
    return sources


class InPlace:
    """Makes the weights of a model those of a checkpoint, which stays as it is."""

    def __init__(
        self,
        model: Module,
        files: StoredFiles,
        sources: Mapping[str, Source],
        device: torch.device,
        dtype_of: Callable[[str, torch.dtype], torch.dtype],
    ) -> None:
        """`dtype_of` tells with which dtype a weight is used: it gets its name, and its dtype in
        the files."""
        self._model = model
        self._files = files
        self._sources = sources
        self._device = device
        self._dtype_of = dtype_of
        self._values: dict[Parameter, FileValues] = {}  # by the parameter of the model
        self._buffers: dict[str, FileValues] = {}
        self._undo: list[Callable[[], object]] = []
        self.experts: dict[Module, ExpertWeights] = {}  # after run()

    # --- names ---

    def match(self, missing_is_error: bool, extra_is_error: bool) -> None:
        """Finds the values of each parameter and persistent buffer. Changes nothing. Raises
        ValueError with all that does not fit."""
        wanted = dict(self._model.named_parameters(remove_duplicate=False))
        buffers = dict(_persistent_buffers(self._model))
        problems: list[str] = []
        for name, tensor in (*wanted.items(), *buffers.items()):
            if name not in self._sources or tensor.numel() == 0:
                continue
            try:
                values = self._values_of(name, tensor)
            except ValueError as error:
                problems.append(str(error))
                continue
            # As load_state_dict() does it: of several names of one weight the last counts.
            if name in wanted:
                self._values[wanted[name]] = values
            else:
                self._buffers[name] = values
        missing = [name for name, p in wanted.items() if p.numel() and p not in self._values]
        missing += [n for n, b in buffers.items() if b.numel() and n not in self._sources]
        missing = [name for name in missing if name not in self._sources]
        extra = [n for n in self._sources if n not in wanted and n not in buffers]
        problems += self._misfits(missing, extra, missing_is_error, extra_is_error)
        if problems:
            raise ValueError(
                f"{self._files.paths[0]} does not fit the model: {'; '.join(problems)}"
            )

    def _misfits(
        self, missing: list[str], extra: list[str], missing_is_error: bool, extra_is_error: bool
    ) -> list[str]:
        problems: list[str] = []
        extra = [stored for name in extra for stored in self._sources[name].names]
        if missing_is_error:
            problems += _problem("the checkpoint lacks", missing)
        else:
            found = dict(self._model.named_parameters(remove_duplicate=False))
            found.update(_persistent_buffers(self._model))  # type: ignore[arg-type]
            on_meta = [name for name in missing if found[name].device.type == "meta"]
            problems += _problem("neither the checkpoint nor the model has values of", on_meta)
            if missing:
                _log.warning(
                    "the checkpoint lacks these weights, which stay as they are: %s",
                    _listed(missing),
                )
        if extra_is_error:
            problems += _problem("the model has no place for", extra)
        elif extra:
            _log.warning(
                "the model has no place for these tensors of the checkpoint: %s", _listed(extra)
            )
        return problems

    def _values_of(self, name: str, tensor: torch.Tensor) -> FileValues:
        stored = self._sources[name].stored()
        if stored.size != tensor.size():
            raise ValueError(
                f"{name} has the shape {tuple(tensor.size())}, and in the checkpoint "
                f"{tuple(stored.size)}"
            )
        stride = tensor.stride() if is_dense(tensor) else stored.stride
        if not is_dense(torch.empty_strided(stored.size, stride, device="meta")):
            stride = torch.empty(stored.size, device="meta").stride()
        dtype = self._dtype_of(name, stored.dtype)
        return self._files.values(name, _aligned(stored, stride), dtype, stride)

    # --- the model ---

    def run(
        self,
        max_bytes: int,
        keep_bytes: int,
        one_unit: tuple[type[Module], ...],
        initialize: Callable[[Module], object] | None,
        stacks: Stacks | None = None,
    ) -> OffloadedParameters:
        """Gives the model its weights. If that fails, it has the old ones. `stacks` are modules
        whose experts may come one by one; `experts` has those that can."""
        model, device = self._model, self._device
        try:
            computed = compute_buffers(model, device, initialize)
            self._fill_buffers(computed)
            self._check_attributes()
            values = self._place_parameters()
            modules = list(unit_modules(model, ONE_UNIT + one_unit, set()))
            modules = list(apart(modules, stacks or ()))
            kept = smallest(model, keep_bytes, max_bytes // 16)
            kept |= {param for param in model.parameters() if param not in values}
            for param in kept & values.keys():
                param.data = values[param].read_now(device)
            owned = owners(modules, kept)
            stacks = {
                module: asks
                for module, asks in (stacks or {}).items()
                if have_experts(owned[module], values)
            }
            residency = self._residency(owned, values, max_bytes, stacks)
            self._undo.append(lambda: each(Unit.end, residency.units))
            needs = _needs(modules, owned, values, residency)
            for module in stacks:
                on_drive = {param: values[param] for param in owned[module]}
                self.experts[module] = ExpertWeights(module, on_drive, residency)
            kept_bytes = sum(param.nbytes for param in kept)
            weights = OffloadedParameters(
                model, self._files, residency, needs, kept_bytes, stacks=stacks
            )
        except BaseException:
            for undo in reversed(self._undo):
                undo()
            raise
        refuse_other_optimizers()
        return weights

    def _fill_buffers(self, computed: dict[tuple[Module, str], torch.Tensor]) -> None:
        made: dict[torch.Tensor, torch.Tensor] = {}
        for prefix, module in self._model.named_modules():
            for name, buffer in list(module._buffers.items()):
                if buffer is None:
                    continue
                if buffer not in made:
                    full = f"{prefix}.{name}" if prefix else name
                    if (module, name) in computed:
                        made[buffer] = computed[module, name]
                    elif full in self._buffers:
                        made[buffer] = self._buffers[full].read_now(self._device)
                    elif buffer.device.type == "meta":
                        made[buffer] = torch.empty_like(buffer, device=self._device)  # no elements
                    else:
                        made[buffer] = buffer.to(self._device)
                self._replace(module._buffers, name, made[buffer])
            for name, value in list(vars(module).items()):
                if isinstance(value, torch.Tensor) and value in made:
                    self._replace(vars(module), name, made[value])

    def _replace(self, where: dict[str, Any], name: str, value: object) -> None:
        before = where[name]
        self._undo.append(lambda: where.__setitem__(name, before))
        where[name] = value

    def _check_attributes(self) -> None:
        found = [
            f"{prefix}.{name}" if prefix else name
            for prefix, module in self._model.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, torch.Tensor) and value.device.type == "meta"
        ]
        if found:
            raise ValueError(
                f"{_listed(found)}: a tensor that is neither a parameter nor a buffer is on the "
                "meta device and has no values. Build the model with such tensors in memory, for "
                'example under accelerate.init_empty_weights(), or set them after to("cpu")'
            )

    def _place_parameters(self) -> dict[Parameter, FileValues]:
        """Gives each parameter the dtype and the device of its values, without memory for them.
        Returns the values by the parameters that the model has now."""
        found: dict[Parameter, FileValues] = {}
        made: dict[Parameter, Parameter] = {}
        for module in self._model.modules():
            for name, param in list(module._parameters.items()):
                if param is None:
                    continue
                if param not in made:
                    made[param] = self._placed(param)
                    if param in self._values:
                        found[made[param]] = self._values[param]
                if made[param] is not param:
                    self._undo.append(_setting(module, name, param))
                    setattr(module, name, made[param])  # recurrent networks keep a list of them
        return found

    def _placed(self, param: Parameter) -> Parameter:
        """Returns the parameter, or a new one for one on the meta device."""
        values = self._values.get(param)
        if values is None:
            nothing = torch.empty_like(param, device=self._device) if param.is_meta else None
        else:
            one = torch.zeros((), dtype=values.dtype, device=self._device)
            nothing = one.expand(values.size)
        if param.is_meta:
            assert nothing is not None
            needs_grad = param.requires_grad and (
                nothing.dtype.is_floating_point or nothing.dtype.is_complex
            )
            made = Parameter(nothing, requires_grad=needs_grad)
            vars(made).update(vars(param))
            return made
        before = param.data
        self._undo.append(lambda: setattr(param, "data", before))
        param.data = before.to(self._device) if nothing is None else nothing
        return param

    def _residency(
        self,
        owned: dict[Module, list[Parameter]],
        values: dict[Parameter, FileValues],
        max_bytes: int,
        stacks: Stacks,
    ) -> Residency:
        sizes: list[int] = []
        experts: list[int] = []
        for module, params in owned.items():
            size = sum(values[param].slot_bytes for param in params)
            if module in stacks:
                count = values[params[0]].size[0]
                experts += [page_up(-(-size // count)) + len(params) * _ROUNDING] * count
            else:
                sizes.append(size)
        # One of them is in use, beside it an expert, wherever they lie, and the next one is read.
        least = max(sizes, default=0) + 2 * max(experts, default=0)
        total = sum(sizes) + sum(experts)
        on_cpu = self._device.type == "cpu"
        has_slots = on_cpu and not all(one.is_in_place for one in values.values())
        if has_slots and total > max_bytes >= _SHARED_FROM:
            max_bytes -= min(int(max_bytes * _SLOTS_SHARE), _SLOTS_BYTES)
        limit = min(total, max(max_bytes, least))
        buffers = self._files.take_buffers(page_up(limit) if on_cpu else PAGE)
        return Residency(WeightMemory(buffers, None if on_cpu else GpuPool(self._device, limit)))


def run_in_place(
    model: Module,
    path: CheckpointPath,
    device: torch.device,
    max_bytes: int,
    keep_bytes: int,
    one_unit: tuple[type[Module], ...],
    initialize: Callable[[Module], object] | None,
    dtype: torch.dtype | None,
    rename: Rename | None,
    strict: bool,
    handle_options: dict[str, Any],
) -> OffloadedParameters:
    """Makes the weights of a model those of the checkpoint at `path`."""
    check_model(model)
    map_large_blocks()

    def dtype_of(_: str, stored: torch.dtype) -> torch.dtype:
        # Numbers of 8 bits mean nothing without their scales.
        is_plain = stored.is_floating_point and stored.itemsize > 1
        return dtype if dtype is not None and is_plain else stored

    files = StoredFiles(path, handle_options)
    try:
        sources = sources_by_name(files, rename)
        in_place = InPlace(model, files, sources, device, dtype_of)
        try:
            in_place.match(missing_is_error=strict, extra_is_error=strict)
        except ValueError as error:
            advice = "; strict=False leaves out what has no counterpart" if strict else ""
            raise ValueError(
                f"{error}. rename= maps names of the checkpoint to those of the model{advice}"
            ) from None
        return in_place.run(max_bytes, keep_bytes, one_unit, initialize)
    except BaseException:
        files.close()
        raise


def _needs(
    modules: list[tuple[Module, list[Module]]],
    owned: dict[Module, list[Parameter]],
    values: dict[Parameter, FileValues],
    residency: Residency,
) -> dict[Module, list[Unit]]:
    """Makes the units, and returns which ones each module needs."""
    units: dict[Parameter, Unit] = {}
    needs: dict[Module, list[Unit]] = {}
    for module, subtree in modules:
        if owned[module]:
            unit = residency.new_unit()
            for param in owned[module]:
                unit.add(param, values[param])
                units[param] = unit
            unit.show_nothing()
        for part in subtree:
            if needed := units_of([part], units):
                needs.setdefault(part, needed)
        if needed := units_of(subtree, units):
            needs[module] = needed
    return needs


def _aligned(stored: Stored, stride: tuple[int, ...]) -> Stored:
    """Returns the tensor with these strides, if they mean the same: where a dimension has one
    element, its stride does not matter."""
    same = all(n == 1 or a == b for n, a, b in zip(stored.size, stored.stride, stride))
    return stored._replace(stride=stride) if same else stored


def _persistent_buffers(model: Module) -> list[tuple[str, torch.Tensor]]:
    return [
        (f"{prefix}.{name}" if prefix else name, buffer)
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]


def _setting(module: Module, name: str, param: Parameter) -> Callable[[], object]:
    return lambda: setattr(module, name, param)


def _problem(what: str, names: list[str]) -> list[str]:
    return [f"{what} {_listed(names)}"] if names else []


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
