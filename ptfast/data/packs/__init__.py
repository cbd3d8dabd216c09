"""Data decoded once into files that are mapped into memory."""
