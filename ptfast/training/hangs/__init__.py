"""Detect, report and end runs that make no progress."""
