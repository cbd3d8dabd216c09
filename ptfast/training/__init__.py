"""Builds a run from a config, trains it, evaluates it and keeps its state."""
