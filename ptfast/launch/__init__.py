"""From a checked config to running processes, and on again after one was stopped."""
