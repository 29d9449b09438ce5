"""Transfers of any tensor, at any offset, by any engine: what hypothesis chooses from."""

import hypothesis
import tensorferry
import torch
from handle_fixtures import ENGINES
from hypothesis import strategies as st

DTYPES = [
    torch.uint8,
    torch.float32,
    torch.bfloat16,
    torch.complex128,
    torch.float8_e5m2,
    torch.bool,
]


def any_tensor(examples):
    """Calls a test so often with (dtype, shape, skip, offset, engine, now). The tensor begins
    `skip` elements into its memory; `now` asks for a synchronous transfer."""
    shapes = st.builds(
        lambda shape, scale: [*shape[:-1], shape[-1] * scale] if shape else shape,
        st.lists(st.integers(0, 40), max_size=3),
        st.sampled_from([1, 1, 1, 300]),
    )
    given = hypothesis.given(
        dtype=st.sampled_from(DTYPES),
        shape=shapes,
        skip=st.integers(0, 5000),
        offset=st.integers(0, 3 << 20),
        engine=st.sampled_from(ENGINES),
        now=st.booleans(),
    )
    settings = hypothesis.settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
    )
    return lambda test: settings(given(test))


def write_and_read(engine, now, source, target, path, offset):
    with tensorferry.Handle(engine) as handle:
        if now:
            handle.write_now(source, path, offset)
            handle.read_now(target, path, offset)
        else:
            handle.write(source, path, offset).wait()
            handle.read(target, path, offset).wait()
