"""Private names of torch, and tensors that lie on several ranks."""
