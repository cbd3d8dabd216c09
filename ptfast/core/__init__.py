"""Foundations that every other package of ptfast may import; it imports none of them."""
