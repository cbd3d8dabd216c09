"""Tabular files: reading, preparation of inputs, and targets."""
