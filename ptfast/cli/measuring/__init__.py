"""The commands that measure: flags and arguments of each, read before torch is imported."""
