#!/usr/bin/env python3
"""What `tensorferry plan` says beside what happens: `make plan-figures`, 8 minutes.

Trains small Llamas, each in a process of its own, in set-ups that gave no cost: dtypes,
optimizers, buffers, states in memory, moments in 8 bits, gradients and weights on the drive, two
ranks. Before and after each of them it measures the costs (`python -m tensorferry.plan`), and the
plan is made from the mean of both. Prints the medians of passes, steps and memory, what the plan
says of each, and how many are within 15 %. Exit status 3: one is not. Writes what it measured into
the table of docs/plan.md; lines of other set-ups stay.

With --sections gpu it does so on a GPU: scripts/gpu.sh plan-figures. Where that machine keeps no
files, save what it prints, and give it to --said here.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from queue import Empty
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 0.15
STEPS = 5  # that count, after two that do not
LAYER = {"vocab_size": 1000, "num_attention_heads": 12, "num_key_value_heads": 12}
PAGE = ROOT / "docs" / "plan.md"
TABLE = "| set-up | pass | the plan says | step | the plan says | memory | the plan says |"
HEAD = f"{'set-up':42} {'what':7} {'measured':>10} {'plan':>10}   plan / measured"


@dataclasses.dataclass(frozen=True, eq=False)
class SetUp:
    """A model, how it is trained, and the flags that tell the plan the same."""

    name: str
    dtype: str = "bf16"
    tokens: int = 160
    layers: int = 5
    width: int = 1344
    ranks: int = 1
    device: str = "cpu"
    optimizer: str = "adamw"
    states: dict[str, Any] = dataclasses.field(default_factory=dict)  # options of the optimizer
    weights: int = 0  # memory for weights that are on the drive
    budget: bool = False
    trains: bool = True

    def flags(self) -> list[str]:
        told = ({} if self.budget else {"max_cpu_bytes": 0, "max_gpu_bytes": 0}) | self.states
        flags = ["--dtype", self.dtype, "--optimizer", self.optimizer]
        flags += ["--ranks", str(self.ranks), "--accumulation", "1"]
        flags += ["--tokens-per-step", str(self.tokens * self.ranks)]
        flags += ["--weights", "drive" if self.weights else "memory"]
        flags += ["--weight-bytes", str(self.weights)] if self.weights else []
        flags += [] if self.budget else ["--separate"]
        flags += [] if self.trains else ["--inference", "--batch", str(self.tokens)]
        flags += ["--gradients", "drive" if told.pop("offload_gradients", False) else "memory"]
        for name, value in told.items():
            flags += [f"--{name.replace('_', '-')}", str(value)]
        return flags

    def config(self) -> Any:
        import transformers

        return transformers.LlamaConfig(
            hidden_size=self.width,
            intermediate_size=self.width * 8 // 3,
            num_hidden_layers=self.layers,
            use_cache=False,
            **LAYER,
        )


MIB = 1 << 20
CPU_SET_UPS = (
    SetUp("fp32, AdamW: 8 bytes", "fp32"),
    SetUp("bf16, AdamW: 10 bytes"),
    SetUp("fp16, AdamW: 12 bytes", "fp16", tokens=48),
    SetUp("bf16, moments in 8 bits: 4 bytes", states={"moments": "int8"}),
    SetUp("fp32, SGD, 3 buffers of 32 MiB", "fp32", optimizer="sgd",
          states={"buffer_count": 3, "buffer_bytes": 32 * MIB}),
    SetUp("fp32, AdamW, 6 buffers of 20 MiB", "fp32", tokens=96,
          states={"buffer_count": 6, "buffer_bytes": 20 * MIB}),
    SetUp("fp32, AdamW, 350 MB of states in memory", "fp32", states={"max_cpu_bytes": 350_000_000}),
    SetUp("bf16, 8 bits, 150 MB of states in memory",
          states={"moments": "int8", "max_cpu_bytes": 150_000_000}),
    SetUp("bf16, gradients on the drive", states={"offload_gradients": True}),
    SetUp("bf16, weights and gradients on the drive", tokens=224, weights=80 * MIB,
          states={"offload_gradients": True}),
    SetUp("fp32, one budget of 250 MB", "fp32", tokens=224, weights=250_000_000, budget=True,
          states={"offload_gradients": True}),
    SetUp("bf16, inference, weights on the drive", tokens=12, layers=9, weights=140 * MIB,
          trains=False),
    SetUp("fp32, two ranks", "fp32", ranks=2),
)  # fmt: skip
LARGE: dict[str, Any] = {"layers": 16, "width": 3072, "tokens": 2048, "device": "cuda"}
GPU_SET_UPS = (
    SetUp("GPU: fp16, AdamW: 12 bytes", "fp16", **LARGE),
    SetUp("GPU: bf16, 8 bits, 4 GB of states in memory",
          states={"moments": "int8", "max_cpu_bytes": 4_000_000_000}, **LARGE),
    SetUp("GPU: bf16, weights and gradients on the drive", weights=1 << 30,
          states={"offload_gradients": True}, **LARGE),
)  # fmt: skip


# --- in a process of its own ---


def resident_bytes(name: str) -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name)) << 10


def join_ranks(rank: int, ranks: int, port: int) -> float:
    """Returns the bytes per second that a rank gets from the others."""
    import torch

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    torch.set_num_threads(max((os.cpu_count() or 1) // ranks, 1))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    part = torch.ones(8 << 20)
    whole = torch.empty(ranks * part.numel())
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        torch.distributed.all_gather_into_tensor(whole, part)
        times.append(time.perf_counter() - begin)
    return part.nbytes * (ranks - 1) / median(times)


def made(set_up: SetUp, folder: Path) -> tuple[Any, Any, Any]:
    """(model, optimizer, weights)"""
    import tensorferry
    import torch
    import transformers

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[set_up.dtype]
    torch.set_default_dtype(dtype)
    with torch.device(set_up.device):
        model = transformers.LlamaForCausalLM(set_up.config())
    torch.set_default_dtype(torch.float32)
    if set_up.ranks > 1:
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    limit: Any = tensorferry.MemoryBudget(set_up.weights) if set_up.budget else set_up.weights
    where = "max_gpu_bytes" if set_up.device == "cuda" else "max_cpu_bytes"
    weights = None
    if set_up.weights:
        weights = tensorferry.offload.parameters(model, folder, **{where: limit})
    if not set_up.trains:
        return model.eval().requires_grad_(False), None, weights
    options = dict(set_up.states)
    if set_up.budget:
        options[where] = limit
    if set_up.optimizer == "sgd":
        sgd = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        optimizer: Any = tensorferry.optim.offload(sgd, nvme_path=folder, **options)
    else:
        optimizer = tensorferry.optim.AdamW(
            model.parameters(), lr=1e-5, nvme_path=folder, **options
        )
    return model, optimizer, weights


def finish(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def warm_up(set_up: SetUp) -> None:
    """Loads what torch and transformers load at their first use: no part of the model."""
    import torch
    import transformers

    small = transformers.LlamaConfig(
        hidden_size=96, intermediate_size=96, num_hidden_layers=1, use_cache=False, **LAYER
    )
    with torch.device(set_up.device):
        model = transformers.LlamaForCausalLM(small)
        model(input_ids=torch.ones(1, 8, dtype=torch.long)).logits.mean().backward()


def train(set_up: SetUp, folder: Path, rank: int, port: int, answers: Any) -> None:
    """Trains, and puts what it took: {"pass", "step"} in seconds, {"memory"} in bytes."""
    import torch

    network = join_ranks(rank, set_up.ranks, port) if set_up.ranks > 1 else 0.0
    warm_up(set_up)
    before = resident_bytes("VmRSS")
    model, optimizer, weights = made(set_up, folder)
    # The peak begins here: the plan does not count what the making takes.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    if set_up.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    ids = torch.ones(1, set_up.tokens, dtype=torch.long, device=set_up.device)
    if not set_up.trains:  # as many sequences, of which each gets its next token
        ids = ids.view(-1, 1)
    passes, steps = [], []
    for _ in range(STEPS + 2):
        begin = time.perf_counter()
        if set_up.trains:
            model(input_ids=ids).logits.float().square().mean().backward()
        else:
            with torch.no_grad():
                model(input_ids=ids)
        finish(set_up.device)
        between = time.perf_counter()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        finish(set_up.device)
        passes.append(between - begin)
        steps.append(time.perf_counter() - between)
    peak = resident_bytes("VmHWM") - before
    if set_up.device == "cuda":
        peak = torch.cuda.max_memory_allocated()
    answers.put({"pass": passes[2:], "step": steps[2:], "memory": peak, "network": network})
    if optimizer is not None:
        optimizer.close()
    if weights is not None:
        weights.close()
    del model
    gc.collect()
    if set_up.ranks > 1:
        torch.distributed.destroy_process_group()
        answers.close()
        answers.join_thread()
        os._exit(0)  # gloo sometimes aborts at the end of a process


def calibrate(set_up: SetUp, folder: Path, answers: Any) -> None:
    """Puts {"drive", "flops", "costs"}."""
    from tensorferry.plan import program

    file = folder / "costs.json"
    code = program.main(
        [str(folder), "--dtype", set_up.dtype, "--device", set_up.device, "--output", str(file)]
    )
    assert code == 0
    answers.put(json.loads(file.read_text(encoding="utf-8")))


# --- the run ---


def in_processes(works: list[tuple[Any, ...]], starter: Any) -> list[Any]:
    """Runs them beside each other. Returns what they put into a queue."""
    queue = starter.Queue()
    processes = [starter.Process(target=work, args=(*rest, queue)) for work, *rest in works]
    for process in processes:
        process.start()
    answers: list[Any] = []
    while len(answers) < len(processes):
        try:
            answers.append(queue.get(timeout=1))
        except Empty:
            if any(process.exitcode not in (None, 0) for process in processes):
                raise RuntimeError(f"{works[0]} failed") from None
    for process in processes:
        process.join()
    return answers


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def mean_of(one: Any, other: Any) -> Any:
    if isinstance(one, dict):
        return {name: mean_of(value, other[name]) for name, value in one.items()}
    return (one + other) / 2


def plan_of(set_up: SetUp, measured: Any, folder: Path, program: Path) -> dict[str, float]:
    """What the plan says, from these costs."""
    set_up.config().save_pretrained(folder)
    (folder / "plan-costs.json").write_text(json.dumps({"costs": measured["costs"]}))
    words = [str(program), "plan", "--model", str(folder / "config.json"), *set_up.flags()]
    words += ["--costs", str(folder / "plan-costs.json"), "--json", str(folder / "plan.json")]
    # Ranks share the processors.
    shared = set_up.ranks if set_up.device == "cpu" else 1
    words += ["--flops", str(measured["flops"] / shared)]
    words += ["--network", str(measured["network"])] if measured["network"] > 0 else []
    for way, speed in measured["drive"].items():
        words += [f"--drive-{way}", str(speed)]
    if set_up.device == "cuda":
        words += ["--gpu-memory", "128G"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    results = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    choice = results["choices"][0]
    on_gpu = set_up.device == "cuda"
    own = choice["memory_bytes"] - results["settings"]["costs"]["process_bytes"]
    return {
        "pass": choice["pass_seconds"],
        "step": choice["step_seconds"],
        "memory": choice["gpu_bytes"] if on_gpu else own,
    }


def measure(
    set_up: SetUp, before: Any, folder: Path, program: Path, starter: Any
) -> tuple[Any, dict[str, Any], dict[str, float]]:
    """(costs after it, what was measured, what the plan says)"""
    port = free_port()
    works = [(train, set_up, folder, rank, port) for rank in range(set_up.ranks)]
    answers = in_processes(works, starter)
    (after,) = in_processes([(calibrate, set_up, folder)], starter)
    measured = {
        "pass": [median(answer["pass"]) for answer in answers],
        "step": [median(answer["step"]) for answer in answers],
        "memory": [answer["memory"] for answer in answers],
    }
    costs = mean_of(before, after)
    costs["network"] = median(answer["network"] for answer in answers)
    told = plan_of(set_up, costs, folder, program)
    return after, {name: sum(own) / len(own) for name, own in measured.items()}, told


Round = tuple[dict[str, float], dict[str, float]]  # what was measured, what the plan says


@dataclasses.dataclass(frozen=True)
class Figure:
    """The median of the rounds, and what the plan says of it."""

    what: str
    measured: float
    told: float
    unit: str

    def ratio(self) -> float:
        return self.told / self.measured

    def fails(self) -> bool:
        return abs(self.ratio() - 1) > TOLERANCE


def figures_of(set_up: SetUp, rounds: list[Round]) -> list[Figure]:
    found = []
    for what in ("pass", "step", "memory") if set_up.trains else ("pass", "memory"):
        scale, unit = (1e-6, "MB") if what == "memory" else (1e3, "ms")
        measured = scale * median(one[what] for one, _ in rounds)
        told = scale * median(plan[what] for _, plan in rounds)
        found.append(Figure(what, measured, told, unit))
    return found


def print_rows(set_up: SetUp, figures: list[Figure]) -> int:
    """Prints a line for each figure. Returns how many are off by more than the tolerance."""
    for one in figures:
        print(
            f"{set_up.name:42} {one.what:7} {one.measured:7.0f} {one.unit} "
            f"{one.told:7.0f} {one.unit}   {one.ratio():.3f}{'  is missed' if one.fails() else ''}",
            flush=True,
        )
    return sum(one.fails() for one in figures)


def row_of(set_up: SetUp, figures: list[Figure]) -> str:
    """Its line of the table."""
    found = {one.what: one for one in figures}
    cells = [set_up.name]
    for what in ("pass", "step", "memory"):
        one = found.get(what)
        cells.append(f"{one.measured:,.0f} {one.unit}" if one else "")
        cells.append(f"{one.told:,.0f} {one.unit}: {one.ratio():.2f}" if one else "")
    return f"| {' | '.join(cells)} |"


def with_rows(page: str, rows: dict[str, str]) -> str:
    """The page with these lines in its table, by the names of set-ups, in the order of those. Lines
    of other set-ups stay; those that no set-up has go."""
    lines = page.split("\n")
    if TABLE not in lines:
        raise SystemExit(f"{PAGE} has no table that begins with {TABLE}")
    begin = lines.index(TABLE) + 2
    end = begin
    while end < len(lines) and lines[end].startswith("|"):
        end += 1
    earlier = {line.split(" | ")[0].removeprefix("| "): line for line in lines[begin:end]}
    known = earlier | rows
    names = [one.name for one in (*CPU_SET_UPS, *GPU_SET_UPS)]
    return "\n".join(lines[:begin] + [known[name] for name in names if name in known] + lines[end:])


def rounds_said(text: str) -> dict[str, list[Round]]:
    """What another run has measured, from what it printed."""
    found: dict[str, list[Round]] = {}
    for set_up in (*CPU_SET_UPS, *GPU_SET_UPS):
        for line in text.splitlines():
            if line.startswith(f"# {set_up.name}: ["):
                measured, told = json.loads(line.removeprefix(f"# {set_up.name}: "))
                found.setdefault(set_up.name, []).append((measured, told))
    return found


def measure_all(
    chosen: list[SetUp], options: argparse.Namespace, folder: Path
) -> dict[str, list[Round]]:
    starter = multiprocessing.get_context("forkserver")
    starter.set_forkserver_preload(["torch", "tensorferry.plan", "transformers"])
    found: dict[str, list[Round]] = {}
    for _ in range(options.rounds):
        last: tuple[Any, Any] = (None, None)  # the kind of the last costs, and these
        for set_up in chosen:
            kind = (set_up.dtype, set_up.device)
            costs = last[1]
            try:
                if last[0] != kind:
                    (costs,) = in_processes([(calibrate, set_up, folder)], starter)
                costs, measured, told = measure(set_up, costs, folder, options.program, starter)
            except RuntimeError as error:
                print(f"# {set_up.name}: {error}", flush=True)
                last = (None, None)
                continue
            last = (kind, costs)
            print(f"# {set_up.name}: {json.dumps([measured, told])}", flush=True)
            found.setdefault(set_up.name, []).append((measured, told))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path("build"), help="where the files go")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--sections", nargs="+", choices=("cpu", "gpu"), default=["cpu"])
    parser.add_argument("--set-ups", default="", help="only those whose names have this text")
    parser.add_argument(
        "--program", type=Path, default=ROOT / "build" / "release" / "bin" / "tensorferry"
    )
    parser.add_argument("--said", type=Path, help="what another run printed: measure nothing")
    parser.add_argument("--page", type=Path, default=PAGE, help="whose table gets the figures")
    options = parser.parse_args()
    chosen = [*CPU_SET_UPS] if "cpu" in options.sections else []
    chosen += [*GPU_SET_UPS] if "gpu" in options.sections else []
    chosen = [one for one in chosen if options.set_ups in one.name]
    if options.said:
        found = rounds_said(options.said.read_text(encoding="utf-8"))
        chosen = [one for one in (*CPU_SET_UPS, *GPU_SET_UPS) if one.name in found]
    else:
        with tempfile.TemporaryDirectory(dir=options.dir) as name:
            found = measure_all(chosen, options, Path(name))
    print(HEAD)
    figures = {one: figures_of(one, found[one.name]) for one in chosen if one.name in found}
    off = sum(print_rows(one, own) for one, own in figures.items())
    off += len(chosen) - len(figures)
    print(f"{off} figures are off by more than {TOLERANCE:.0%}")
    if figures:
        rows = {one.name: row_of(one, own) for one, own in figures.items()}
        page = options.page.read_text(encoding="utf-8")
        options.page.write_text(with_rows(page, rows), encoding="utf-8")
    return 3 if off else 0


if __name__ == "__main__":
    sys.exit(main())
