"""A designed experiment: every run sets many switches at once and informs the estimates of all."""
