"""Small objects around the optimizer steps of a run: sums, weights, ranks, looks at batches and gradients."""
