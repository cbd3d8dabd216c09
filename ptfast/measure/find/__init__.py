"""`ptfast find`: find the learning rate, the batch size and the loader for a config on this machine."""
