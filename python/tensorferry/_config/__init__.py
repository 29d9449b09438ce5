"""tensorferry.initialize(): a model and an optimizer from a DeepSpeed configuration."""
