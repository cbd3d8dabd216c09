"""A designed experiment: every run varies many switches at once and informs the estimates of all."""
