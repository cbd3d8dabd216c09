"""Files and texts into arrays."""
