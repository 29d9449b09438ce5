"""What the tests on a GPU share. They run on a machine with one: `make test-gpu`."""

import pytest
import torch
from handle_fixtures import engine, handle, path

__all__ = ["engine", "handle", "path"]

if not torch.cuda.is_available():
    pytest.exit("torch finds no GPU that it can use here", returncode=1)
