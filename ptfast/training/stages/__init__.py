"""The stages of `build`; each adds its part to the run."""
