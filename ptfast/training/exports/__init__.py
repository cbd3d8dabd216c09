"""Export a trained model as files that do not need ptfast."""
