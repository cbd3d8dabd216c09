"""Sequential data without an index: data workers, shards, and agreement between ranks."""
