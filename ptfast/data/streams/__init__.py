"""Data that is read in order and has no index: data workers, shards, and agreement between ranks."""
