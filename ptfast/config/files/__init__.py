"""The files of a config: where they are searched, how they are read, frozen and laid over each other."""
