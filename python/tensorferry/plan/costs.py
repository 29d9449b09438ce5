"""Measures what a plan is made of: costs of each byte, operation, parameter and module.

src/bench/plan/costs.h says what each of them means. All are measured by what the package itself
does: a drive through a swap space, a step of an optimizer, a pass through a model."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import offload, optim
from .._memory.buffers import NvmePath, open_space
from .._memory.layout import PAGE, page_up

_TENSOR_BYTES, _TENSORS = 24 << 20, 8  # of the drive's sample
_ELEMENTS = 12 << 20  # that a step of the sample has: more than fit into a cache
_SMALL_ELEMENTS = 32 << 10  # of a small sub-group
_HEAD = 128  # of the model of the sample
_LAYERS = 2
_SEQUENCE = 256  # tokens at most
_ROUNDS = 4
# A GPU hides small work behind what it takes to start it: it gets more.
_GPU_ELEMENTS = 192 << 20
_GPU_ELEMENT_BYTES = 64  # that a step may take there, for each


@dataclasses.dataclass(frozen=True)
class _PassSample:
    """The model whose passes are measured, and how many tokens pass."""

    width: int
    few: int
    many: int


_PASSES = {"cpu": _PassSample(1280, 24, 168), "cuda": _PassSample(4096, 1024, 4096)}


def _timed(work: Callable[[], object], device: torch.device) -> float:
    """The median of some rounds, after one that does not count."""
    times = []
    for _ in range(_ROUNDS + 1):
        _finish(device)
        begin = time.perf_counter()
        work()
        _finish(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# --- the drive ---


def drive_costs(directory: NvmePath) -> tuple[dict[str, float], dict[str, float]]:
    """Returns ({"read", "write", "both"}: bytes per second, {"operation_seconds"})."""
    nbytes = _TENSORS * _TENSOR_BYTES
    with open_space(directory, 2 * nbytes + (8 << 20)) as space:
        first = [space.take(_TENSOR_BYTES) for _ in range(_TENSORS)]
        second = [space.take(_TENSOR_BYTES) for _ in range(_TENSORS)]
        small = space.take(PAGE)

        def write(prefix: str = "a") -> None:
            _wait([space.put(f"{prefix}{i}", one) for i, one in enumerate(first)])

        def read() -> None:
            _wait([space.get(f"a{i}", one) for i, one in enumerate(second)])

        def both() -> None:
            writes = [space.put(f"b{i}", one) for i, one in enumerate(first)]
            _wait([space.get(f"a{i}", one) for i, one in enumerate(second)] + writes)

        def operations() -> None:
            for _ in range(16):
                space.get("small", small).wait()

        cpu = torch.device("cpu")
        write("b")
        speeds = {"write": nbytes / _timed(write, cpu), "read": nbytes / _timed(read, cpu)}
        speeds["both"] = 2 * nbytes / _timed(both, cpu)
        space.put("small", small).wait()
        return speeds, {"operation_seconds": _timed(operations, cpu) / 16}


def _wait(operations: list[Any]) -> None:
    for operation in operations:
        operation.wait()


# --- the step ---


def step_costs(directory: NvmePath, device: torch.device) -> dict[str, float]:
    """What a step costs for each parameter, in each form, and for each sub-group."""
    whole = {"max_cpu_bytes": "100%"} if device.type == "cpu" else {"max_gpu_bytes": "100%"}
    base = _each_element(directory, device, torch.float32, whole)
    half = _each_element(directory, device, torch.float16, whole)
    cut = _each_element(directory, device, torch.bfloat16, whole)
    packed = _each_element(directory, device, torch.float32, {**whole, "moments": "int8"})
    sgd, taking = _sgd_costs(directory, device, whole)
    return {
        "adam_seconds": base,
        "sgd_seconds": sgd,
        "master_seconds": max(half - base, 0.0),
        "cut_seconds": max(cut - half, 0.0),
        "pack_seconds": max(packed - base, 0.0),
        "group_seconds": _group_seconds(directory, device, base),
        "taking_seconds": taking,
    }


def _sgd_costs(
    directory: NvmePath, device: torch.device, whole: dict[str, Any]
) -> tuple[float, float]:
    """Returns what SGD costs for each parameter, and for each sub-group, because it takes memory
    that goes back afterwards: from steps of few sub-groups and of many."""
    options = {**whole, "kind": torch.optim.SGD}
    few = _step_of_three(directory, device, torch.float32, options)
    many = _step_of_three(directory, device, torch.float32, {**options, "buffer_bytes": 16 << 20})
    each_group = max(many - few, 0.0) / 6  # 9 sub-groups, and 3
    if device.type == "cuda":
        return _each_element(directory, device, torch.float32, options), each_group
    return max(few - 3 * each_group, 0.0) / _ELEMENTS, each_group


def _each_element(
    directory: NvmePath, device: torch.device, dtype: torch.dtype, options: dict[str, Any]
) -> float:
    """What a step takes for each parameter."""
    if device.type == "cpu":
        return _step_of_three(directory, device, dtype, options) / _ELEMENTS
    # What its one sub-group takes, whatever its size, is in both.
    free, _ = torch.cuda.mem_get_info(device)
    many = min(_GPU_ELEMENTS, free // _GPU_ELEMENT_BYTES)
    few = many // 4
    times = [
        _step_seconds(
            directory,
            _params(1, count, device, dtype),
            {**options, "buffer_count": 1, "buffer_bytes": page_up(24 * count + 16 * PAGE)},
        )
        for count in (few, many)
    ]
    return max(times[1] - times[0], 0.0) / (many - few)


def _step_of_three(
    directory: NvmePath, device: torch.device, dtype: torch.dtype, options: dict[str, Any]
) -> float:
    return _step_seconds(directory, _params(3, _ELEMENTS // 3, device, dtype), options)


def _params(count: int, each: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    params = []
    for _ in range(count):
        param = nn.Parameter(torch.zeros(each, device=device, dtype=dtype))
        param.grad = torch.full_like(param, 1e-3)
        params.append(param)
    return params


def _step_seconds(directory: NvmePath, params: list[Tensor], options: dict[str, Any]) -> float:
    options = dict(options)
    if (kind := options.pop("kind", None)) is not None:
        inner = kind(params, lr=1e-3, momentum=0.9)
        optimizer = optim.offload(inner, nvme_path=directory, **options)
    else:
        optimizer = optim.AdamW(params, lr=1e-3, nvme_path=directory, **options)
    try:
        optimizer.step()
        return _timed(optimizer.step, params[0].device)
    finally:
        optimizer.close()


def _group_seconds(directory: NvmePath, device: torch.device, each: float) -> float:
    """Of many small sub-groups on the drive, less what their parameters take."""
    count = 48
    params = _params(count, _SMALL_ELEMENTS, device, torch.float32)
    optimizer = optim.AdamW(
        params, lr=1e-3, nvme_path=directory, buffer_bytes=page_up(_SMALL_ELEMENTS * 8 + 12 * PAGE)
    )
    try:
        optimizer.step()
        return max(_timed(optimizer.step, device) / count - each * _SMALL_ELEMENTS, 0.0)
    finally:
        optimizer.close()


# --- the pass ---


class _Layer(nn.Module):
    """What decoders are made of: attention and a gated perceptron, each behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = width * 8 // 3
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.attention = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        before = self.norms[0](x)
        heads = [
            one(before).view(rows, length, width // _HEAD, _HEAD).transpose(1, 2)
            for one in list(self.attention)[:3]
        ]
        seen = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.attention[3](seen.transpose(1, 2).reshape(rows, length, width))
        before = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(before)) * self.up(before))


def pass_costs(
    directory: NvmePath, device: torch.device, dtype: torch.dtype, write_speed: float
) -> tuple[float, dict[str, float]]:
    """Returns (floating-point operations per second, what a pass costs besides). `write_speed` is
    that of the drive."""
    sample = _PASSES[device.type]
    begin_peak()
    before = _memory("VmRSS")
    model = nn.Sequential(*(_Layer(sample.width) for _ in range(_LAYERS))).to(device, dtype)
    count = sum(param.numel() for param in model.parameters())

    def passing(tokens: int) -> float:
        length = min(tokens, _SEQUENCE)
        x = torch.ones(tokens // length, length, sample.width, device=device, dtype=dtype)

        def work() -> None:
            model(x).sum().backward()
            model.zero_grad()

        return _timed(work, device)

    few, many = passing(sample.few), passing(sample.many)
    of_activations = 17 * sample.width * _LAYERS * sample.many
    accounted = (2 * count + of_activations) * dtype.itemsize
    working = max(_memory("VmHWM") - before - accounted, 0) if device.type == "cpu" else 0
    each_token = token_seconds(few, many, sample.few, sample.many)
    optimizer = optim.AdamW(model.parameters(), nvme_path=directory, offload_gradients=True)
    try:
        saving = passing(sample.few) - max(few, count * dtype.itemsize / write_speed)
    finally:
        optimizer.close()
    return 6 * count / each_token, {
        "pass_seconds": max(few - sample.few * each_token, 0.0) / count,
        "module_seconds": _module_seconds(directory, device),
        "working_bytes": working,
        "gradient_byte_seconds": max(saving, 0.0) / (count * dtype.itemsize),
    }


def token_seconds(few: float, many: float, few_tokens: int, many_tokens: int) -> float:
    """What a token takes, from passes of few tokens and of many. If there is no difference to
    speak of, tokens take all the time of the many: more operations per second nobody has seen."""
    each = (many - few) / (many_tokens - few_tokens)
    all_of_it = many / many_tokens
    return each if each > 0.1 * all_of_it else all_of_it


def _module_seconds(directory: NvmePath, device: torch.device) -> float:
    """Of modules whose weights are on the drive and in memory too, too small to compute."""
    count = 32
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(count))).to(device)
    limit = {"max_cpu_bytes": 8 << 20} if device.type == "cpu" else {"max_gpu_bytes": 8 << 20}
    weights = offload.parameters(model, directory, keep_bytes=0, **limit)  # type: ignore[arg-type]
    x = torch.ones(1, 64, device=device)

    def work() -> None:
        model(x).sum().backward()

    try:
        return _timed(work, device) / (2 * count)
    finally:
        weights.close()


# --- memory ---


def copy_costs() -> dict[str, float]:
    """Bytes per second between page-locked memory and the GPU."""
    device = torch.device("cuda")
    nbytes = 256 << 20
    here = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    side = torch.cuda.Stream()

    def read() -> None:
        there[0].copy_(here[0], non_blocking=True)

    def write() -> None:
        here[1].copy_(there[1], non_blocking=True)

    def both() -> None:
        with torch.cuda.stream(side):
            write()
        read()

    return {
        "copy_read": nbytes / _timed(read, device),
        "copy_write": nbytes / _timed(write, device),
        "copy_both": 2 * nbytes / _timed(both, device),
    }


def begin_peak() -> None:
    """Lets the peak of this process's memory begin anew, if the system allows that."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _memory(name: str) -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name)) << 10


def process_bytes() -> int:
    """Memory of this process that nobody else has."""
    with open("/proc/self/statm", encoding="ascii") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * os.sysconf("SC_PAGESIZE")
