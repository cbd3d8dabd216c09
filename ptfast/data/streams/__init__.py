"""Data that is read in order and has no index: readers, shards, and agreement between ranks."""
