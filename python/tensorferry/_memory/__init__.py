"""What optimizers and weights on the drive share: memory, and tensors laid out in it."""
