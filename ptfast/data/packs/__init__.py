"""Packs: data decoded once into memory-mapped files."""
