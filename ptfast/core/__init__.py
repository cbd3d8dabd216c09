"""What every room may use, and which uses no other."""
