"""What a run puts around its optimizer steps: sums, weights, ranks, looks at batches and gradients."""
