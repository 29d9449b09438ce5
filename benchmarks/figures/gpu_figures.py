#!/usr/bin/env python3
"""The figures of tensors on a GPU: `make gpu-figures`, on a machine with a GPU.

Each row is a ratio of two sides, measured in turns on the same file:
- a tensor of 1 GiB on the GPU against page-locked memory of the CPU, raw io_uring (raw_ring),
  NVIDIA's cuFile (torch.cuda.gds), torch.load().cuda() and torch.save(x.cpu());
- the latency of small transfers against cuFile's;
- a step of AdamW with states on the drive against the drive alone;
- such a step with moments in 8 bits, also with half of them in memory, against 12 and 10 bytes for
  each parameter;
- such a step with all states in memory of the CPU against copying them over PCIe, both ways at
  once;
- a file in memory (tmpfs) against the slower of a page-locked copy over PCIe and pread by as many
  threads;
- load_file of a checkpoint of 1 GiB against raw io_uring, with the memory that it takes on both
  sides.
- a model of transformers of 8 GB: loaded, run with a quarter of its weights on the GPU, and with
  half of the keys and values of a long context there, against raw io_uring (model_figures.py);
- whole iterations of training a GPT, against the slower of the drive and the GPU
  (iteration_figures.py);
- the call of a save in the background against copying as much over PCIe (saving_figures.py).
Then it reads a set of tensors, 20 GB in all, to the GPU: speed over time, memory, CPU time. The
sections "threads" and "drives" are those of scale_figures.py and need no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import tensorferry
import tensorferry.safetensors.torch
import torch

from benchmarks.figures import (
    iteration_figures,
    model_figures,
    saving_figures,
    scale_figures,
)
from benchmarks.figures.paired import HEAD, row, timed
from benchmarks.jobs.checkpoint_tensors import check, tensors_of
from benchmarks.rows.pairs import Target

GB, MiB, GiB = 1e9, 1 << 20, 1 << 30


class Gds:
    """torch's cuFile; None if it does not work here."""

    def __init__(self, path: Path, tensor: torch.Tensor):
        self._file = torch.cuda.gds.GdsFile(str(path), os.O_RDWR | os.O_CREAT)
        self._storage = tensor.untyped_storage()

    def read(self) -> float:
        return timed(lambda: self._file.load_storage(self._storage, 0))

    def write(self) -> float:
        return timed(lambda: self._file.save_storage(self._storage, 0))


def open_gds(path: Path, tensor: torch.Tensor) -> Gds | None:
    try:
        gds = Gds(path, tensor)
        gds.read()
        return gds
    except RuntimeError as refused:
        print(f"cuFile does not work here: {refused}".splitlines()[0])
        return None


def raw_ring(program: Path, verb: str, path: Path, size: int) -> float:
    best = [str(program), verb, str(path), str(size), str(MiB), "32"]
    return float(subprocess.run(best, check=True, capture_output=True, text=True).stdout)


def large_rows(folder: Path, program: Path, pairs: int) -> None:
    path = folder / "large.bin"
    gpu = torch.empty(GiB, dtype=torch.uint8, device="cuda").random_(0, 256)
    locked = tensorferry.aio_handle().new_cpu_locked_tensor(GiB, torch.empty(0, dtype=torch.uint8))
    torch.cuda.synchronize()
    with tensorferry.Handle() as handle, tensorferry.File(path, "read_write") as file:
        handle.write_now(gpu, file)
        ways = {
            "read": (handle.read_now, "load"),
            "write": (handle.write_now, "save"),
        }
        for verb, (call, torchs) in ways.items():

            def ours(call=call):
                return timed(lambda: call(gpu, file))

            def on_cpu(call=call):
                return timed(lambda: call(locked, file))

            def ring(verb=verb):
                return raw_ring(program, verb, path, GiB)

            row(
                f"{verb} 1 GiB, GPU / page-locked memory of the CPU",
                ours,
                on_cpu,
                pairs,
                Target(0.95, True),
            )
            row(f"{verb} 1 GiB, GPU / raw io_uring", ours, ring, pairs, Target(0.98, True))
            if (gds := open_gds(path, gpu)) is not None:
                row(
                    f"{verb} 1 GiB, GPU / cuFile",
                    ours,
                    getattr(gds, verb),
                    pairs,
                    Target(1.0, True),
                )
            saved = folder / "saved.pt"
            torch.save(gpu.cpu(), saved)

            def by_torch(torchs=torchs):
                if torchs == "save":
                    return timed(lambda: torch.save(gpu.cpu(), saved))
                drop_cache(saved)
                return timed(lambda: (torch.load(saved).cuda(), torch.cuda.synchronize()))

            what = "torch.load().cuda()" if torchs == "load" else "torch.save(x.cpu())"
            row(f"{verb} 1 GiB, GPU / {what}", ours, by_torch, pairs, Target(3.0, True))
            saved.unlink()
    path.unlink()


def step_row(folder: Path, program: Path, pairs: int) -> None:
    """A step of AdamW with its states on the drive, against the drive alone, which reads and writes
    the same bytes at the same time."""
    params = [torch.nn.Parameter(torch.zeros(25_000_000, device="cuda")) for _ in range(8)]
    for param in params:
        param.grad = torch.ones_like(param)
    moved = 2 * 4 * sum(param.numel() for param in params)
    files = {"read": folder / "read.bin", "write": folder / "write.bin"}
    for path in files.values():
        raw_ring(program, "write", path, moved)
    with_states = folder / "states"
    with_states.mkdir()
    optimizer = tensorferry.optim.AdamW(params, 1e-3, nvme_path=with_states)
    optimizer.step()

    def ours():
        return timed(lambda: (optimizer.step(), torch.cuda.synchronize()))

    def drive():
        with ThreadPoolExecutor(2) as pool:
            return max(pool.map(lambda way: raw_ring(program, way, files[way], moved), files))

    row(
        "AdamW step, 200 M fp32 on the GPU / raw io_uring, reads and writes",
        ours,
        drive,
        pairs,
        None,
    )
    optimizer.close()
    for path in files.values():
        path.unlink()


# How the states of parameters in 16 bits are stored: (dtype, options).
FORMS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "12 bytes": (torch.float16, {}),  # whole masters
    "10 bytes": (torch.bfloat16, {}),
    "4 bytes": (torch.bfloat16, {"moments": "int8"}),
    "4 bytes, half of it in memory": (
        torch.bfloat16,
        {"moments": "int8", "max_cpu_bytes": "50%"},
    ),
    "4 bytes, all of it on the GPU": (
        torch.bfloat16,
        {"moments": "int8", "max_gpu_bytes": "100%"},
    ),
    "8 bytes, all of it in memory": (torch.float32, {"max_cpu_bytes": "100%"}),
    "10 bytes, all of it in memory": (torch.bfloat16, {"max_cpu_bytes": "100%"}),
}


@contextlib.contextmanager
def stepping(folder: Path, form: str):
    """A step of 200 M parameters, as seconds."""
    dtype, options = FORMS[form]
    params = [torch.nn.Parameter(torch.zeros(25_000_000, device="cuda", dtype=dtype))
              for _ in range(8)]  # fmt: skip
    for param in params:
        param.grad = torch.ones_like(param)
    states = folder / form.replace(" ", "-")
    states.mkdir(exist_ok=True)
    optimizer = tensorferry.optim.AdamW(params, 1e-3, nvme_path=states, **options)
    for _ in range(2):
        optimizer.step()
    yield lambda: timed(lambda: (optimizer.step(), torch.cuda.synchronize()))
    stats = optimizer.stats()
    kept = stats["kept_bytes"] / sum(param.numel() for param in params)
    read = stats["read_bytes_per_parameter"]
    print(f"{form}: {read:.2f} bytes per parameter read, {kept:.2f} in memory")
    optimizer.close()


def moments_rows(folder: Path, pairs: int) -> None:
    """Steps of 200 M parameters in 16 bits with masters, by what the drive has of each."""

    for form, against, target in (
        ("4 bytes", "12 bytes", Target(2.5, True)),
        ("4 bytes", "10 bytes", None),
        ("4 bytes, half of it in memory", "12 bytes", Target(5.0, True)),
        ("4 bytes, all of it on the GPU", "4 bytes", None),
    ):
        with stepping(folder, form) as ours, stepping(folder, against) as other:
            row(f"AdamW step, 200 M, {form} / {against}", ours, other, pairs, target)


def kept_rows(folder: Path, pairs: int) -> None:
    """Steps whose states lie in memory of the CPU, against copying as many bytes both ways."""
    for element_bytes in (8, 10):
        size = element_bytes * 200_000_000
        here = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        there = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
        streams = [torch.cuda.Stream() for _ in range(2)]

        def copies(here=here, there=there, streams=streams):
            with torch.cuda.stream(streams[0]):
                there[0].copy_(here[0], non_blocking=True)
            with torch.cuda.stream(streams[1]):
                here[1].copy_(there[1], non_blocking=True)
            torch.cuda.synchronize()

        form = f"{element_bytes} bytes, all of it in memory"
        with stepping(folder, form) as ours:
            row(
                f"AdamW step, 200 M, {form} / PCIe, both ways at once",
                ours,
                partial(timed, copies),
                pairs,
                Target(1 / 1.1, True),
            )


def drop_cache(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def small_rows(folder: Path, pairs: int) -> None:
    path = folder / "small.bin"
    path.write_bytes(os.urandom(64 * MiB))
    drop_cache(path)
    for size in (4 << 10, 64 << 10, MiB):
        tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        with tensorferry.Handle() as handle, tensorferry.File(path, "read_write") as file:
            gds = open_gds(path, tensor)
            if gds is None:
                return
            for verb, call in (("read", handle.read_now), ("write", handle.write_now)):

                def ours(call=call):
                    return timed(lambda: [call(tensor, file) for _ in range(20)]) / 20

                def cufile(verb=verb):
                    return sum(getattr(gds, verb)() for _ in range(20)) / 20

                row(f"{verb} {size >> 10} KiB, GPU / cuFile", ours, cufile, pairs, None, "us")
    path.unlink()


def cached_rows(folder: Path, pairs: int) -> None:
    """Reads from memory, so the drive is not the limit."""
    path = folder / "cached.bin"
    size, block, threads = GiB, 4 * MiB, 16
    gpu = torch.empty(size, dtype=torch.uint8, device="cuda").random_(0, 256)
    locked = torch.empty(size, dtype=torch.uint8).pin_memory()
    locked.zero_()
    view = memoryview(locked.numpy())
    torch.cuda.synchronize()

    def pcie():
        return timed(lambda: (gpu.copy_(locked, non_blocking=True), torch.cuda.synchronize()))

    with (
        tensorferry.Handle() as handle,
        tensorferry.File(path, "read_write") as file,
        ThreadPoolExecutor(threads) as pool,
    ):
        handle.write_now(gpu, file)
        fd = os.open(path, os.O_RDONLY)

        def pread():
            pieces = range(0, size, block)
            return timed(lambda: list(pool.map(
                lambda at: os.preadv(fd, [view[at : at + block]], at), pieces)))  # fmt: skip

        def limit():
            return max(pcie(), pread())

        def ours():
            return timed(lambda: handle.read_now(gpu, file))

        operation = handle.read(gpu, file)
        operation.wait()
        print(f"in {folder}: engine {operation.engine}: {operation.engine_reason}")
        row(
            "read 1 GiB from memory, GPU / the lesser of PCIe and pread",
            ours,
            limit,
            pairs,
            Target(0.8, True),
        )
        os.close(fd)
    path.unlink()


def resident_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) << 10


def set_of_tensors(folder: Path, total: int) -> None:
    """Reads the tensors of a whole model, one after the other."""
    path, size, ahead = folder / "set.bin", 256 * MiB, 4
    count = int(total // size)
    source = torch.empty(size, dtype=torch.uint8, device="cuda").random_(0, 256)
    with tensorferry.Handle() as handle, tensorferry.File(path, "read_write") as file:
        for i in range(count):
            handle.write_now(source, file, i * size)
        targets = [torch.empty_like(source) for _ in range(ahead)]
        torch.cuda.synchronize()
        before, cpu = resident_bytes(), sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        begin = last = time.perf_counter()
        under_way: list[tensorferry.Operation] = []
        speeds, most = [], 0
        for i in range(count):
            if len(under_way) == ahead:
                under_way.pop(0).wait()
            under_way.append(handle.read(targets[i % ahead], file, i * size))
            if i % 8 == 7:
                now = time.perf_counter()
                speeds.append(8 * size / GB / (now - last))
                last, most = now, max(most, resident_bytes())
        for operation in under_way:
            operation.wait()
        took = time.perf_counter() - begin
        cpu = sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) - cpu
        same = all(torch.equal(target, source) for target in targets)
    gigabytes = count * size / GB
    shown = " ".join(f"{speed:.2f}" for speed in speeds)
    print(f"{gigabytes:.1f} GB to the GPU in {took:.1f} s: {gigabytes / took:.2f} GB/s; "
          f"every 2.1 GB: {shown} GB/s")  # fmt: skip
    print(f"memory grew by {(most - before) / MiB:.1f} MiB; {cpu / gigabytes:.3f} CPU s/GB; "
          f"bytes {'right' if same else 'WRONG'}")  # fmt: skip
    path.unlink()


def checkpoint_rows(folder: Path, program: Path, pairs: int) -> None:
    """Loads a safetensors file to the GPU; it must take the tensors there and slots here."""
    for layout, words in (("32", "32 tensors"), ("mixed", "2,000 mixed tensors")):
        path = folder / "checkpoint.safetensors"
        tensorferry.safetensors.torch.save_file(tensors_of(layout, GiB), path, checksums=True)
        for verify in (False, True):

            def load(path=path, verify=verify):
                return tensorferry.safetensors.torch.load_file(path, "cuda", verify=verify)

            def ours(load=load, path=path):
                drop_cache(path)
                return timed(lambda: (load(), torch.cuda.synchronize()))

            row(
                f"load_file, 1 GiB in {words}, GPU{', verified' * verify} / raw io_uring",
                ours,
                partial(raw_ring, program, "read", path, GiB),
                pairs,
                Target(0.95, True),
            )
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        here, there = resident_bytes(), torch.cuda.memory_allocated()
        loaded = load()
        held = torch.cuda.memory_allocated()  # torch rounds up the memory of each tensor
        most = torch.cuda.max_memory_allocated() - held
        grown = resident_bytes() - here
        print(f"the tensors take {(held - there) / MiB:.1f} MiB on the GPU; loading takes "
              f"{most / MiB:.1f} MiB more there and {grown / MiB:.1f} MiB here")  # fmt: skip
        check(loaded)
        del loaded
        path.unlink()


GPU_SECTIONS = (
    "large",
    "small",
    "step",
    "moments",
    "kept",
    "set",
    "cached",
    "checkpoints",
    "models",
    "iteration",
    "saving",
)


def gpu_rows(options: argparse.Namespace, folder: Path) -> None:
    pairs, ring = options.pairs, options.programs / "raw_ring"
    if "large" in options.sections:
        large_rows(folder, ring, pairs)
    if "small" in options.sections:
        small_rows(folder, pairs)
    if "step" in options.sections:
        step_row(folder, ring, max(pairs // 2, 3))
    if "moments" in options.sections:
        moments_rows(folder, max(pairs // 2, 3))
    if "kept" in options.sections:
        kept_rows(folder, pairs)
    if "set" in options.sections:
        set_of_tensors(folder, options.set_gb * GB)
    if "checkpoints" in options.sections:
        checkpoint_rows(folder, ring, pairs)
    if "saving" in options.sections:
        saving_figures.saving_rows(folder, pairs)
    if "models" in options.sections:
        model_figures.model_rows(folder, ring, max(pairs // 3, 3))
    if "iteration" in options.sections:
        iteration_figures.iteration_rows(folder, partial(raw_ring, ring), max(pairs // 3, 3))
    if "cached" in options.sections:
        with contextlib.suppress(FileNotFoundError):
            with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
                cached_rows(Path(name), pairs)


def main() -> int:
    sections = (*GPU_SECTIONS, *scale_figures.SECTIONS)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path("build"), help="where the files go")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument(
        "--programs",
        type=Path,
        default=Path("build/carry"),
        help="the folder of ferry_job, raw_ring and raw_threads",
    )
    parser.add_argument("--set-gb", type=float, default=20, help="size of the set of tensors")
    parser.add_argument("--sections", nargs="+", choices=sections, default=sections)
    options = parser.parse_args()
    if set(options.sections) & set(GPU_SECTIONS) and not torch.cuda.is_available():
        print("torch finds no GPU here: run this on a machine with one", file=sys.stderr)
        return 1
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(f"{gpu}, torch {torch.__version__}, tensorferry {tensorferry.__version__}")
    print(HEAD)
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        gpu_rows(options, Path(name))
        scale_figures.scale_rows(
            Path(name), options.programs, options.pairs, tuple(options.sections)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
