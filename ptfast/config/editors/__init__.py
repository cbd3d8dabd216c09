"""Editor support: help and a JSON Schema."""
