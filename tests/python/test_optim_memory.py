"""What a step with states and gradients on NVMe adds to the memory of its process.

A process of its own, whose peak does not depend on what else runs."""

import pytest
from programs import check_python
from training import MiB
from warm_python import WARM_PYTHON

MEMORY = {
    "fp32": "float32 8 AdamW(params, **options)",
    "amsgrad": "float32 12 AdamW(params, amsgrad=True, **options)",
    "bf16": "bfloat16 10 AdamW(params, **options)",
    "momentum": "float32 4 offload(torch.optim.SGD(params, momentum=0.9), **options)",
    "rmsprop": "float32 8 offload(torch.optim.RMSprop(params, momentum=0.9), **options)",
}


@pytest.mark.parametrize("name", MEMORY)
def test_memory_stays_within_the_buffers(tmp_path, name):
    """40 M parameters have 160 MB of states and more; what a step adds to the peak is far less."""
    out = check_python(
        """
        import sys, torch, tensorferry.optim
        from tensorferry.optim import AdamW, offload
        def peak():
            with open("/proc/self/status") as file:
                return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) << 10
        dtype, state_bytes, make = sys.argv[2].split(" ", 2)
        dtype = getattr(torch, dtype)
        params = [torch.nn.Parameter(torch.full((2_000_000,), 0.5, dtype=dtype)) for _ in range(10)]
        params.append(torch.nn.Parameter(torch.full((20_000_000,), 0.5, dtype=dtype)))
        for param in params:
            param.grad = torch.full_like(param, 0.01)
        warm = torch.nn.Parameter(torch.ones(100_000))
        warm.grad = torch.ones(100_000)
        torch.optim.AdamW([warm], fused=True).step()
        before = peak()
        options = dict(nvme_path=sys.argv[1], buffer_count=4, buffer_bytes=8 << 20)
        optimizer = eval(make)
        for _ in range(3):
            optimizer.step()
        stats = optimizer.stats()
        assert stats["buffer_bytes"] == 32 << 20, stats  # not a byte more than was asked for
        assert stats["tensor_bytes"] >= 40_000_000 * int(state_bytes), stats
        print(peak() - before)
        """,
        tmp_path,
        MEMORY[name],
        python=WARM_PYTHON,
    )
    assert int(out) < (32 + 24) * MiB


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width, count", [(2048, 12), (700, 64)])
def test_memory_for_gradients_is_that_of_one(tmp_path, dtype, width, count):
    """Those of 12 large layers or of 64 small ones, again and again: what backward has freed is
    given back."""
    out = check_python(
        """
        import sys, torch, tensorferry.optim
        def peak():
            with open("/proc/self/status") as file:
                return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) << 10
        dtype, width, count = getattr(torch, sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
        layers = (torch.nn.Linear(width, width, dtype=dtype) for _ in range(count))
        model = torch.nn.Sequential(*layers)
        options = dict(nvme_path=sys.argv[1], buffer_count=2, buffer_bytes=8 << 20)
        optimizer = tensorferry.optim.AdamW(model.parameters(), offload_gradients=True, **options)
        x = torch.ones(1, width, dtype=dtype)
        with torch.no_grad():
            model(x)
        before = peak()
        for _ in range(3):
            for _ in range(2):
                model(x).float().square().sum().backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        print(peak() - before)
        """,
        tmp_path,
        dtype,
        str(width),
        str(count),
        python=WARM_PYTHON,
    )
    # The buffers, in part, the gradient in fp32 for its norm, and a little.
    assert int(out) < 32 * MiB + 2 * 4 * width * width
