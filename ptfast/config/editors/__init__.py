"""Editor support: help, completion and a JSON Schema."""
