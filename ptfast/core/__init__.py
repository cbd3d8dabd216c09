"""Foundations: every other room may use this one, which uses none."""
