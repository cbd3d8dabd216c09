"""Config files: find and read them, freeze the config of a run, and write recipes."""
