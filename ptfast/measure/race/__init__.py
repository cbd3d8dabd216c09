"""`ptfast race`: which of several ways to train reaches a target first."""
