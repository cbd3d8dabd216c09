"""The stages of `build`, in which each adds its part to the run."""
