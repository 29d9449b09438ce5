"""`tensorferry checkpoint`: looks at checkpoints, checks, converts and compares them.

    tensorferry checkpoint inspect model.safetensors

All formats are read in the same way: a checkpoint is a list of tensors, and a tensor is a list of
places in files. docs/checkpoint_command.md describes the command.
"""

from .opening import open_checkpoint
from .program import main
from .tensors import Checkpoint, Tensor, Unusable

__all__ = ["Checkpoint", "Tensor", "Unusable", "main", "open_checkpoint"]
