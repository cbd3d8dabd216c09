"""What stands in a terminal or a pipe while a command works."""
