"""What torch keeps private, and tensors that lie on several ranks."""
