"""Output to a terminal or a pipe while a command runs."""
