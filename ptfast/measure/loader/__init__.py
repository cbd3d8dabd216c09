"""The loader and the number of workers that feed training."""
