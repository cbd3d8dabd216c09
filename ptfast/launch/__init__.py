"""Start processes for a checked config, and resume a run that was stopped."""
