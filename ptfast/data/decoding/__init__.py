"""Decoding of image files and tokenization of texts."""
