"""Figures and predictions of a model: a pass over a split, mirror images, batches of one size."""
