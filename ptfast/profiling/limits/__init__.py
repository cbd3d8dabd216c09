"""Speed of light: operators counted, peaks measured, the next switch to try."""
