"""The largest useful batch: memory, throughput and gradient noise."""
