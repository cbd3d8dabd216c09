"""Debugging aids that slow a run down and change nothing in it."""
