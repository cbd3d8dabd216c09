"""What people are offered while they write: help, completion and a JSON Schema."""
