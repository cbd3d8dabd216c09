"""Find slow code in a model, its data, its loop and its machine, and say how to fix it."""
