"""Real DeepSpeed on tensorferry: its builders, its ZeRO-Infinity, its FastFileWriter."""

import re
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

from deepspeed_training import FAST_FILE_WRITER, config, train
from programs import run_python
from warm_python import WARM_PYTHON


def python(code, *args, **env):
    done = run_python(code, *args, timeout=600, python=WARM_PYTHON, DS_ACCELERATOR="cpu", **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ---- builders ------------------------------------------------------------------------------------

CHECK = """
from deepspeed.ops.op_builder import AsyncIOBuilder, PinMemoryBuilder, GDSBuilder
import deepspeed.ops.aio, deepspeed.ops.gds, deepspeed.ops.pin_memory
import deepspeed.runtime.swap_tensor.partitioned_param_swapper as swapper
for builder in (AsyncIOBuilder, deepspeed.ops.aio.AsyncIOBuilder, swapper.AsyncIOBuilder):
    assert builder().load().aio_handle is tensorferry.aio_handle
    assert builder().is_compatible()
for builder in (GDSBuilder, deepspeed.ops.gds.GDSBuilder, swapper.GDSBuilder):
    assert builder().load(verbose=False).gds_handle is tensorferry.gds_handle
for builder in (PinMemoryBuilder, deepspeed.ops.pin_memory.PinMemoryBuilder):
    assert builder().load().pin_handle is tensorferry.pin_handle
    assert builder().is_compatible()
compatible = deepspeed.ops.__compatible_ops__
assert compatible["async_io"] and compatible["pin_memory"] and compatible[GDSBuilder.NAME] is False
from deepspeed.ops.op_builder import UtilsBuilder, FusedLambBuilder
for other in (UtilsBuilder, FusedLambBuilder):
    try:
        other().load()
    except ValueError:
        pass
    else:
        raise SystemExit("an op that is not ours was touched")
"""


@pytest.mark.parametrize("first", ["tensorferry", "deepspeed"])
def test_enable_before_and_after_the_import(first):
    imports = ["import deepspeed", "import tensorferry.deepspeed; tensorferry.deepspeed.enable()"]
    if first == "tensorferry":
        imports.reverse()
    python("\n".join(imports) + CHECK)


def test_disable_gives_everything_back():
    python(
        """
import deepspeed, tensorferry.deepspeed
import deepspeed.ops.aio, deepspeed.ops.gds
import deepspeed.runtime.swap_tensor.partitioned_param_swapper as swapper
from deepspeed.ops.op_builder import AsyncIOBuilder
modules = [deepspeed.ops.op_builder, deepspeed.ops.aio, deepspeed.ops.gds, swapper, deepspeed.ops]
before = [dict(vars(module)) for module in modules]
builder = dict(vars(AsyncIOBuilder))
for _ in range(2):
    tensorferry.deepspeed.enable()
    tensorferry.deepspeed.enable()
    assert AsyncIOBuilder().load().aio_handle is tensorferry.aio_handle
    tensorferry.deepspeed.disable()
    tensorferry.deepspeed.disable()
    assert [dict(vars(module)) for module in modules] == before
    assert dict(vars(AsyncIOBuilder)) == builder
"""
    )


def test_a_deepspeed_without_the_op_for_page_locked_memory():
    python(
        """
import deepspeed.ops.op_builder as builders
import deepspeed.ops, tensorferry.deepspeed
del builders.PinMemoryBuilder
tensorferry.deepspeed.enable()
assert builders.AsyncIOBuilder().load().aio_handle is tensorferry.aio_handle
tensorferry.deepspeed.disable()
assert not hasattr(builders, "PinMemoryBuilder")
"""
    )


def test_the_environment_variable_needs_no_code(tmp_path):
    """The .pth file stands in for the installed one."""
    start = Path(__file__).resolve().parents[2] / "python/tensorferry-deepspeed.pth"
    code = start.read_text() + "import deepspeed, tensorferry" + CHECK
    python(code, TENSORFERRY_DEEPSPEED="1")
    done = run_python(start.read_text() + "import sys; print('tensorferry' in sys.modules)")
    assert done.stdout == "False\n"
    report = python(
        start.read_text() + "from deepspeed.env_report import op_report; op_report()",
        TENSORFERRY_DEEPSPEED="1",
    )
    plain = re.sub(r"\x1b\[\d+m", "", report)
    assert re.search(r"async_io \.+ .*\[OKAY\]", plain), plain
    assert re.search(r"pin_memory \.+ .*\[OKAY\]", plain), plain


def test_without_deepspeed_the_error_says_what_to_do():
    done = run_python(
        """
        import sys
        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] == "deepspeed":
                    raise ModuleNotFoundError(f"No module named {name!r}", name="deepspeed")
        sys.meta_path.insert(0, Absent())
        import tensorferry.deepspeed
        tensorferry.deepspeed.enable()
        """
    )
    assert "pip install deepspeed" in done.stderr


def test_the_published_example_runs_unchanged(tmp_path):
    """As it stands in DeepSpeed's documentation, but for .cuda() and the directory."""
    out = python(
        f"""
import tensorferry.deepspeed; tensorferry.deepspeed.enable()
import torch
from deepspeed.ops.aio import aio_write, aio_read

# Write tensor to NVMe
tensor = torch.randn(1024, 1024)
tensor_cpu = tensor.cpu()
aio_write(tensor_cpu,
         "{tmp_path}/checkpoint.pt",
         block_size=1024*1024,      # 1MB blocks
         queue_depth=128,
         single_submit=False,
         overlap_events=True,
         validate=False)

# Read tensor from NVMe
buffer = torch.empty_like(tensor_cpu)
aio_read(buffer,
        "{tmp_path}/checkpoint.pt",
        block_size=1024*1024,
        queue_depth=128,
        single_submit=False,
        overlap_events=True,
        validate=True)  # Verify correctness

# Simple write with default settings
aio_write(tensor_cpu, "{tmp_path}/state.pt", 128*1024, 32, False, False, False)
assert torch.equal(tensor, buffer)
"""
    )
    assert len(re.findall(r"^Elapsed time\(usec\): aio = \S+ call = \S+$", out, re.M)) == 3


# ---- ZeRO-Infinity -------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """The same training with everything in CPU memory."""
    place = tmp_path_factory.mktemp("reference")
    kept = {}

    def losses(ranks):
        if ranks not in kept:
            results = train(config(place, "cpu", "cpu"), ranks, op="none")
            kept[ranks] = [losses for losses, _ in results]
        return kept[ranks]

    return losses


@pytest.mark.parametrize("ranks", [1, 2])
def test_zero_infinity_gives_the_same_losses_to_the_last_bit(tmp_path, reference, ranks):
    results = train(config(tmp_path, "nvme", "nvme"), ranks)
    assert [losses for losses, _ in results] == reference(ranks)
    assert len(results[0][0]) == 10
    for _, moved in results:
        assert moved["read_bytes"] > 10 * 4_000_000 / ranks
        assert moved["written_bytes"] > 10 * 4_000_000 / ranks


@pytest.mark.parametrize("optimizer,parameters", [("nvme", "cpu"), ("cpu", "nvme")])
def test_only_the_optimizer_or_only_the_parameters(tmp_path, reference, optimizer, parameters):
    ((losses, moved),) = train(config(tmp_path, optimizer, parameters))
    assert [losses] == reference(1)
    assert moved["read_bytes"] > 0 and moved["written_bytes"] > 0


def test_a_checkpoint_is_saved_and_resumed(tmp_path, reference):
    """To the bit as with ordinary files. DeepSpeed itself goes on to other numbers than without
    the interruption, with its own op and on the CPU as well, so that is not asked for."""
    settings = config(tmp_path, "nvme", "cpu")
    resumed = {}
    for op in ("tensorferry", "plain"):
        ((first, _),) = train(settings, op=op, steps=5, save=tmp_path / op)
        assert first == reference(1)[0][:5]
        ((resumed[op], _),) = train(settings, op=op, load=tmp_path / op, skip=5)
        assert len(resumed[op]) == 5
    assert resumed["tensorferry"] == resumed["plain"]


# ---- FastFileWriter ------------------------------------------------------------------------------


@pytest.mark.parametrize("double", [False, True])
def test_fast_file_writer(tmp_path, double):
    python(
        FAST_FILE_WRITER
        + """
path, double = sys.argv[1], sys.argv[2] == "True"
handle = AsyncIOBuilder().load().aio_handle(65536, 8, False, True, 2)
writer = open_writer(path, handle, 1 << 20, double)
state = {"weight": torch.randn(700, 1001), "bias": torch.randn(13), "step": 5}
torch.save(state, f=writer, _use_new_zipfile_serialization=False)
writer.close()
loaded = torch.load(path)
assert torch.equal(loaded["weight"], state["weight"]) and torch.equal(loaded["bias"], state["bias"])
assert loaded["step"] == 5
assert handle.stats()["written_bytes"] >= 2 << 20
""",
        tmp_path / "state.pt",
        double,
    )
