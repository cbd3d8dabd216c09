"""Runs that are killed on purpose, resumed, and compared with an undisturbed run."""
