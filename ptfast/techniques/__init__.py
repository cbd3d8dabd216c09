"""Techniques with a config group of their own, one folder or module each."""
