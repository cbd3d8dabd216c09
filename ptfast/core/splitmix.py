"""The hash behind all randomness that is a function of counters: the finaliser of SplitMix64.

Source: Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, 2014.
"""

from __future__ import annotations

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FACTOR_1 = 0xBF58476D1CE4E5B9
FACTOR_2 = 0x94D049BB133111EB


def finalise(bits: int) -> int:
    """64 bits of which each depends on every one of the low 64 of `bits`."""
    z = bits & MASK
    z = (z ^ (z >> 30)) * FACTOR_1 & MASK
    z = (z ^ (z >> 27)) * FACTOR_2 & MASK
    return z ^ (z >> 31)
