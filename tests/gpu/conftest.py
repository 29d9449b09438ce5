"""What the tests on a GPU share. They run where there is one: `make test-gpu`."""

import pytest
import tensorferry
import torch

if not torch.cuda.is_available():
    pytest.exit("there is no GPU here that torch can use", returncode=1)

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
