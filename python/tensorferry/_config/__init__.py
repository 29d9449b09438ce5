"""tensorferry.initialize(): what a DeepSpeed configuration asks for, and how it is done."""
