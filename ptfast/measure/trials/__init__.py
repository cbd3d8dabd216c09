"""The commands that find numbers which depend on the model and the machine."""
