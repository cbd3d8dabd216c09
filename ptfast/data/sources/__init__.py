"""Data sets, a file each."""
