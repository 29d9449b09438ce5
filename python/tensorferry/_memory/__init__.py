"""Memory, and how tensors lie in it: what optimizers and offloaded weights share."""
