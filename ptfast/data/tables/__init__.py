"""Files of columns: reading, preparing inputs, targets."""
