"""The measuring commands; all share one engine that runs trials."""
