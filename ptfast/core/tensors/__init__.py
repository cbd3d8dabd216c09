"""Private names of torch; tensors in containers, on several ranks and on disk."""
