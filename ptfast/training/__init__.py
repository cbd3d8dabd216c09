"""Build a run from a config, train it, evaluate it, and save its checkpoints."""
