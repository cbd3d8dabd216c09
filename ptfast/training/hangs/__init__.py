"""Runs that stand still: watched, told of, and ended."""
