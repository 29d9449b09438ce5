"""The package is typed: mypy reads a user's program strictly, and finds its mistakes."""

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tensorferry

pytest.importorskip("mypy")
pytest.importorskip("torch")

PUBLIC = [
    "tensorferry",
    "tensorferry.aio",
    "tensorferry.checkpoint",
    "tensorferry.dcp",
    "tensorferry.deepspeed",
    "tensorferry.inspection",
    "tensorferry.offload",
    "tensorferry.optim",
    "tensorferry.plan",
    "tensorferry.report",
    "tensorferry.safetensors",
    "tensorferry.safetensors.numpy",
    "tensorferry.safetensors.torch",
    "tensorferry.snapshot",
    "tensorferry.sweep",
    "tensorferry.transformers",
]

# torch is not read: it takes a minute, and says nothing about this package.
SETTINGS = """
[mypy]
strict = True
cache_dir = cache
[mypy-torch.*]
follow_imports = skip
[mypy-plotly.*]
follow_imports = skip
[mypy-transformers.*]
follow_imports = skip
"""

PROGRAM = """
import asyncio
import os
from pathlib import Path

import tensorferry
import tensorferry.aio
import tensorferry.checkpoint
import tensorferry.dcp
import tensorferry.deepspeed
import tensorferry.report
import tensorferry.safetensors.torch
import tensorferry.snapshot
import tensorferry.sweep
import tensorferry.transformers
import torch


async def load(handle: tensorferry.Handle, buffer: bytearray) -> int:
    moved: int = await handle.read(buffer, "weights.bin", offset=4096)
    return moved


def swap(directory: Path) -> dict[str, object]:
    with tensorferry.SwapSpace([directory], buffer_bytes=1 << 20) as space:
        space.put("layer 0", b"weights").wait(timeout=5)
        buffer, operation = space.fetch("layer 0")
        operation.add_done_callback(lambda done: print(done.seconds))
        room: memoryview = memoryview(space.take(4096))
        print(len(buffer), bytes(buffer), room.nbytes, space.size("layer 0") or 0)
        return space.stats()


def deepspeed_names(tensor: torch.Tensor) -> int:
    handle = tensorferry.aio_handle(block_size=1 << 20, queue_depth=8)
    handle.async_pwrite(tensor, "layer.bin", 4096)
    handle.async_pread(tensor, fd=3)
    handle.pread(tensor, "layer.bin", True, False, file_offset=0)
    locked = handle.new_cpu_locked_tensor(1000, tensor)
    freed: bool = handle.free_cpu_locked_tensor(locked)
    tensorferry.deepspeed.enable()
    return handle.wait() + tensorferry.aio_read(tensor, Path("layer.bin"), validate=freed)


def files(path: Path) -> dict[str, torch.Tensor]:
    tensorferry.safetensors.torch.save_file({"a": torch.ones(2)}, path, {"b": "c"}, checksums=True)
    with tensorferry.safetensors.safe_open(path, "pt", verify=True) as file:
        names: list[str] = file.keys()
        shape: list[int] = file.get_slice(names[0]).get_shape()
        print(shape, file.metadata() or {}, file.get_slice("a")[1:])
    return tensorferry.safetensors.torch.load_file(path, progress=lambda done, total: None)


def train(model: torch.nn.Linear) -> None:
    optimizer = tensorferry.optim.AdamW(model.parameters(), lr=1e-4, nvme_path="/mnt/nvme")
    optimizer.step()
    optimizer.close()
    weights = tensorferry.offload.parameters(model, nvme_path="/mnt/nvme", max_cpu_bytes=1 << 30)
    weights.close()
    budget = tensorferry.MemoryBudget("auto")
    weights = tensorferry.offload.parameters(model, "/mnt/nvme", max_cpu_bytes=budget)
    print(budget.max_bytes, budget.held_bytes + 1)
    try:
        model, configured = tensorferry.initialize(
            model, config="ds_config.json", max_cpu_bytes=1 << 30
        )
    except tensorferry.ConfigError as error:
        print(error)
    else:
        configured.backward(model(torch.ones(1)).sum())
        configured.step()


def overlap(model: torch.nn.Module, loss: torch.Tensor) -> float:
    optimizer = tensorferry.optim.AdamW(
        model.parameters(), nvme_path=["/mnt/a"], overlap="iteration", moments="int8"
    )
    with tensorferry.offload.activations("/mnt/a") as activations, optimizer.last_backward():
        loss.backward()
    optimizer.step()
    optimizer.settle()
    print(activations.stats()["saved_bytes"] + optimizer.stats()["kept_bytes"])
    with tensorferry.PriorityScope("background"):
        saving: tensorferry.checkpoint.Saving = tensorferry.checkpoint.save(
            model.state_dict(), "model.pt", wait=False, when_busy="refuse"
        )
    tensorferry.checkpoint.save(model, "model.pt", format="torch")
    saving.wait(timeout=3.5)
    done, total = saving.progress
    return done / total


def snapshots(model: torch.nn.Module, optimizer: tensorferry.optim.Offloaded) -> list[str]:
    taken = tensorferry.snapshot.take(
        Path("snapshots"), model=model, optimizer=optimizer, extra={"step": 3}, keep=2
    )
    resumed = tensorferry.snapshot.resume("snapshots", model=model, optimizer=optimizer)
    print(None if resumed is None else resumed.extra["step"], taken.stored_bytes + 1)
    counts = tensorferry.snapshot.export("snapshots", "model", name=taken.name, format="dcp")
    print(counts["bytes"] + tensorferry.snapshot.verify("snapshots")["tensors"])
    tensorferry.snapshot.drop("snapshots", taken.name)
    return [one.name for one in tensorferry.snapshot.find("snapshots")]


def larger_than_memory(model: torch.nn.Module, prompt: torch.Tensor) -> None:
    weights = tensorferry.offload.checkpoint(
        model, ["a.safetensors"], rename=lambda name: name or None, strict=False
    )
    weights.close(restore=True)
    llama = tensorferry.transformers.from_pretrained("llama", 1 << 30, dtype="auto")
    read: float = tensorferry.transformers.weights_of(llama).stats()["read_bytes"]
    with tensorferry.transformers.NvmeCache(llama.config, "/mnt/a", 1 << 30) as cache:
        cache.save("prompt", llama, prompt)
    callback = tensorferry.transformers.SnapshotCallback("snapshots", every=100)
    print(read, callback.checkpoint() or "the first run")


def distributed() -> dict[str, int]:
    stager = tensorferry.dcp.Stager(stage_bytes=1 << 30)
    tensorferry.dcp.Writer("checkpoint", layout="huggingface", progress=True)
    tensorferry.dcp.Reader(Path("checkpoint"), verify=False)
    tensorferry.dcp.verify("checkpoint")
    with tensorferry.NewFile("notes", permissions=0o600) as new:
        new.reserve(4096)
        new.commit()
    return stager.stats()


def main() -> None:
    pinned = tensorferry.PinnedBuffer(4096)
    with tensorferry.Handle("io_uring", queue_depth=64) as handle:
        with tensorferry.File(os.fsencode("weights.bin"), "read_write") as file:
            handle.write(memoryview(pinned), file, durability="data").wait()
            handle.write_many([(pinned, file), (b"x", file, file.size)]).wait()
            handle.read_now(pinned, file)
        print(asyncio.run(load(handle, bytearray(8))), handle.stats()["operations"])
    try:
        tensorferry.validate(b"x", "weights.bin")
    except tensorferry.InvalidArgument as error:
        print(error.errno, tensorferry.__version__)
    page: str = tensorferry.report.make_page([("a", tensorferry.report.load("a.json"))])
    lines: list[list[str]] = tensorferry.sweep.get_sweep_cmd_lines({"queue_depth": [4, 16]})
    print(page, lines)
"""

# A line for the end of the program, and what mypy says of it.
MISTAKES = {
    "tensorferry.Handle(queue_depth='deep')": '"str"; expected "int | None"',
    "tensorferry.Handle('floppy')": "expected \"Literal['auto'",
    "tensorferry.Handle().read(b'', 3.5)": '"read" of "Handle" has incompatible type "float"',
    "tensorferry.Handle().reed(b'', 'a')": '"Handle" has no attribute "reed"',
    "tensorferry.File('a').size()": '"int" not callable',
    "len(tensorferry.File('a'))": 'expected "Sized"',
    "tensorferry.SwapSpace('.', buffers=1)": 'Unexpected keyword argument "buffers"',
    "tensorferry.PinnedBuffer()": 'Missing positional argument "bytes"',
    "tensorferry.aio_handle(1, 2, 3)": 'Argument 3 to "aio_handle" has incompatible type "int"',
    "tensorferry.aio_handle().read(b'', 'a')": 'Missing positional argument "validate"',
    "tensorferry.aio_read(b'', 3)": 'Argument 2 to "aio_read" has incompatible type "int"',
    "tensorferry.aio_handle().wait().bytes": '"int" has no attribute "bytes"',
    "tensorferry.initialize(torch.nn.Linear(1, 1), 3)": '"initialize" has incompatible type "int"',
    "tensorferry.offloads": 'Module has no attribute "offloads"',
    "tensorferry.optim.AdamX": 'Module has no attribute "AdamX"',
    "tensorferry.safetensors.safe_open('a')": 'Missing positional argument "framework"',
    "tensorferry.safetensors.torch.load_file('a', progress='b')": '"progress" to "load_file"',
    "tensorferry.checkpoint.save({}, 'a', when_busy='wait')": "No overload variant",
    "tensorferry.checkpoint.save({}, 'a').wait()": '"None" has no attribute "wait"',
    "tensorferry.dcp.Writer('a', layout='mine')": 'Argument "layout" to "Writer"',
    "tensorferry.snapshot.take(model=None)": 'Missing positional argument "path"',
    "tensorferry.snapshot.resume('a').extra": 'has no attribute "extra"',
    "tensorferry.transformers.SnapshotCallback('a')": 'Missing named argument "every"',
    "tensorferry.PriorityScope('idle')": "expected \"Literal['urgent'",
    "tensorferry.sweep.Job(3)": 'Argument 1 to "Job" has incompatible type "int"',
}


def mypy(folder, program):
    """The lines that mypy prints about a program of somebody who has installed the package."""
    (folder / "mypy.ini").write_text(SETTINGS)
    (folder / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "program.py"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(tensorferry.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert not done.stderr, done.stderr
    return done.stdout.splitlines()


def test_a_typed_program_passes_and_its_mistakes_are_found(tmp_path):
    found = mypy(tmp_path, PROGRAM)
    assert found == ["Success: no issues found in 1 source file"], "\n".join(found)
    found = mypy(tmp_path, PROGRAM + "\n".join(MISTAKES) + "\n")
    first = PROGRAM.count("\n") + 1
    for number, (line, expected) in enumerate(MISTAKES.items(), first):
        said = [text for text in found if text.startswith(f"program.py:{number}: error")]
        assert len(said) == 1 and expected in said[0], f"{line}\n" + "\n".join(said)
    assert found[-1].startswith(f"Found {len(MISTAKES)} errors in 1 file"), "\n".join(found)


def functions_of(module):
    """(name, function) of everything that a module offers and Python defines."""
    for name in module.__all__:
        thing = getattr(module, name)
        if inspect.isfunction(thing):
            yield f"{module.__name__}.{name}", thing
        if not inspect.isclass(thing) or thing.__module__ == "tensorferry._core":
            continue
        for member, value in vars(thing).items():
            if isinstance(value, property):
                value = value.fget
            value = inspect.unwrap(getattr(value, "__func__", value))
            own = member == "__init__" or not member.startswith("_")
            if own and inspect.isfunction(value):
                yield f"{module.__name__}.{name}.{member}", value


def unannotated(function):
    """The parameters without an annotation, and `return`."""
    signature = inspect.signature(function)
    found = [
        name
        for index, (name, parameter) in enumerate(signature.parameters.items())
        if parameter.annotation is parameter.empty and not (index == 0 and name in ("self", "cls"))
    ]
    return found + ["return"] * (signature.return_annotation is signature.empty)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_function_is_annotated(name):
    if name == "tensorferry.report":
        pytest.importorskip("plotly")
    functions = list(functions_of(importlib.import_module(name)))
    assert functions
    found = {function: names for function, of in functions if (names := unannotated(of))}
    assert not found


def test_a_planted_gap_is_found():
    class Sample:
        def whole(self, a: int, *args: int, **kwargs: str) -> None: ...
        def parameter(self, a: int, b=3) -> None: ...
        def returned(self, a: int): ...

    assert unannotated(Sample.whole) == []
    assert unannotated(Sample.parameter) == ["b"]
    assert unannotated(Sample.returned) == ["return"]
