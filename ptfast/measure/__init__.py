"""The measuring commands, on one engine for trials."""
