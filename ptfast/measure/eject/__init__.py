"""`ptfast eject`: a run written out as one plain PyTorch script."""
