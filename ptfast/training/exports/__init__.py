"""Exports: a saved model as files that need no ptfast."""
