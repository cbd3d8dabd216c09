"""The techniques that have a group of their own, a folder or module each."""
