"""Which parameters train, and with what settings each."""
