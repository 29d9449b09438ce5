"""What the tests of the Python package share."""

import pytest
import tensorferry

ENGINES = ["io_uring", "libaio", "threads"]


@pytest.fixture(params=ENGINES)
def engine(request):
    return request.param


@pytest.fixture
def handle(engine):
    with tensorferry.Handle(engine) as handle:
        yield handle


@pytest.fixture
def path(tmp_path):
    """A path at which nothing is yet."""
    return str(tmp_path / "data.bin")


@pytest.fixture
def space(tmp_path, engine):
    with tensorferry.SwapSpace(tmp_path, buffer_bytes=4 << 20, engine=engine) as space:
        yield space
