"""Looks at a run that slow it down and change nothing in it."""
