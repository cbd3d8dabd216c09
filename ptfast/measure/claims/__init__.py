"""What the sources of the techniques promise, held against this machine."""
