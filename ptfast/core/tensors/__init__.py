"""Tensors in containers, on several ranks and on disk, and the private names of torch."""
